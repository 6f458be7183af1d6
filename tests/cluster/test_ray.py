"""examples/cluster/ray_cluster.py, as it is, on a Ray cluster of two nodes on this machine.

The lies: an example that nobody has run; actors that train on their own instead of together; an
actor that dies and leaves the driver waiting; a group that is made anew and begins anew, or comes
to something else; an actor that JAX ends because the driver has killed a finished one before it.
"""

import contextlib
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from circle_run import (
    EXAMPLES,
    TRAIN,
    check_it_went_on,
    result,
    undisturbed_fingerprint,
    wait_for,
    wait_for_first_checkpoint,
)
from processes import clean_environment, free_port


@contextlib.contextmanager
def in_background(words, output, **settings):
    """A command in a process group of its own, which is killed at the end."""
    with output.open("w") as file:
        process = subprocess.Popen(
            [sys.executable, *words],
            env=clean_environment(RAY_USAGE_STATS_ENABLED="0", **settings),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def processes_of(directory):
    """All processes whose command names a directory: Ray gives its own to each of its processes."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            if str(directory).encode() in path.read_bytes():
                yield int(path.parent.name)


@pytest.fixture(scope="module")
def cluster():
    """The address of a Ray cluster: two nodes with room for one process each."""
    if importlib.util.find_spec("ray") is None:
        pytest.fail("no ray here: pip install -r requirements/cluster-python3.X.txt", pytrace=False)
    directory = Path(tempfile.mkdtemp(prefix="ray-"))  # short, as the names of sockets must be
    address = f"127.0.0.1:{free_port()}"
    start = ["-m", "ray.scripts.scripts", "start", "--block", "--num-cpus", "1"]
    start += ["--object-store-memory", str(80 * 2**20), "--disable-usage-stats"]
    head = ["--head", "--port", address.split(":")[1], "--include-dashboard", "false"]
    try:
        with contextlib.ExitStack() as stack:
            for name, words in [
                ("head", [*head, "--temp-dir", str(directory)]),
                ("node", ["--address", address]),
            ]:
                output = directory / f"{name}.txt"
                node = stack.enter_context(in_background([*start, *words], output))
                wait_for(
                    lambda file=output: "Ray runtime started" in file.read_text(),
                    lambda process=node: process.poll() is None,
                )
            yield address
    finally:
        for pid in processes_of(directory):  # they have groups of their own
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shutil.rmtree(directory, ignore_errors=True)


def driver(cluster, run_dir):
    """The example, with a process on each node; what it writes goes to `output` beside the run."""
    words = [EXAMPLES / "cluster" / "ray_cluster.py", "--gpus", "0", "--run-dir", run_dir]
    words += ["--train", f"{TRAIN} --simulate 1", "--wait-s", "60", "--restarts", "1"]
    return in_background(words, run_dir.parent / "output", RAY_ADDRESS=cluster)


def test_actors_on_two_nodes_come_to_the_same_bits_as_one_process(cluster, tmp_path):
    run_dir, output = tmp_path / "run", tmp_path / "output"
    with driver(cluster, run_dir) as process:
        code = process.wait(timeout=120)
    assert code == 0, output.read_text()
    assert result(run_dir)["processes"] == 2
    assert result(run_dir)["fingerprint"] == undisturbed_fingerprint()
    said = output.read_text()
    assert "restart 1" not in said, said
    assert "Terminating process" not in said, said


def test_a_killed_actor_is_seen_and_the_run_goes_on_in_a_new_group(cluster, tmp_path):
    run_dir, output = tmp_path / "run", tmp_path / "output"
    with driver(cluster, run_dir) as process:
        alive = lambda: process.poll() is None
        lines = wait_for_first_checkpoint(run_dir, alive)
        found = dict(re.findall(r"process (\d) is (\d+) on", output.read_text()))
        os.kill(int(found["1"]), signal.SIGKILL)
        wait_for(lambda: "restart 1 of 1" in output.read_text(), alive, 45)
        code = process.wait(timeout=120)
    assert code == 0, output.read_text()
    assert "process 1 is lost" in output.read_text()
    assert "resuming circle" in output.read_text()
    check_it_went_on(run_dir, lines)

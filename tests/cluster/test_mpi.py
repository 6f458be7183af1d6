"""examples/cluster/mpirun.sh, as it is, with Open MPI on this machine.

The lies: an example that nobody has run; ranks that train on their own instead of together; a rank
that dies and leaves the others waiting; a run that is started again and begins anew, or comes to
something else.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
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

GRACE_S = 5


def environment(**settings):
    """For one run by mpirun."""
    port = str(free_port())
    return clean_environment(
        PATH=f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        # Open MPI refuses root unless it is told twice; and nothing may be heard outside.
        OMPI_ALLOW_RUN_AS_ROOT="1",
        OMPI_ALLOW_RUN_AS_ROOT_CONFIRM="1",
        OMPI_MCA_oob_tcp_if_include="lo",
        JAX_COORDINATOR_PORT=port,
        JAX_COORDINATOR_BIND_ADDRESS=f"127.0.0.1:{port}",
        **settings,
    )


@contextlib.contextmanager
def started(run_dir, ranks, train=TRAIN):
    """mpirun, whose children are the ranks; what it writes goes to `output` beside the run."""
    if shutil.which("mpirun") is None:
        pytest.fail("no mpirun here: apt-get install openmpi-bin", pytrace=False)
    env = environment(
        HOSTS=f"localhost:{ranks}",
        RUN_DIR=str(run_dir),
        TRAIN=train,
        GRACE_S=str(GRACE_S),
    )
    with (run_dir.parent / "output").open("w") as output:
        process = subprocess.Popen(
            [EXAMPLES / "cluster" / "mpirun.sh", "--simulate", "1"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        for pid in [*ranks_of(process), process.pid]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def ranks_of(process):
    try:
        found = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    except OSError:
        return []  # it has ended
    return [int(pid) for pid in found]


def run(run_dir, ranks):
    """The exit code, and what was written."""
    with started(run_dir, ranks) as process:
        code = process.wait(timeout=120)
    return code, (run_dir.parent / "output").read_text()


def disturb(run_dir, ranks, send, train=TRAIN):
    """What `send(process)` does to a run in the middle: lines, exit code, output, ranks left."""
    with started(run_dir, ranks, train) as process:
        lines = wait_for_first_checkpoint(run_dir, lambda: process.poll() is None)
        pids = ranks_of(process)
        assert len(pids) == ranks
        began = time.monotonic()
        send(process)
        code = process.wait(timeout=60)
        assert time.monotonic() - began < 60
        wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), lambda: True, 10)
    return lines, code, (run_dir.parent / "output").read_text()


def test_three_ranks_come_to_the_same_bits_as_one_process_and_stay_there(tmp_path):
    run_dir = tmp_path / "run"
    code, output = run(run_dir, 3)
    assert code == 0, output
    assert "3 processes (0, 1, 2 on" in output
    assert result(run_dir)["processes"] == 3
    assert result(run_dir)["fingerprint"] == undisturbed_fingerprint()
    before = (run_dir / "result.json").read_bytes()

    code, output = run(run_dir, 2)
    assert code == 0, output
    assert "is finished" in output
    assert (run_dir / "result.json").read_bytes() == before


def test_a_killed_rank_ends_all_and_started_again_the_run_goes_on(tmp_path):
    run_dir = tmp_path / "run"
    kill_last = lambda process: os.kill(ranks_of(process)[-1], signal.SIGKILL)
    lines, code, output = disturb(run_dir, 3, kill_last)
    assert code == 128 + signal.SIGKILL, output
    assert not (run_dir / "result.json").exists()

    code, output = run(run_dir, 2)
    assert code == 0, output
    assert "resuming circle" in output
    check_it_went_on(run_dir, lines)


def test_sigterm_to_mpirun_leaves_time_for_a_checkpoint(tmp_path):
    run_dir = tmp_path / "run"
    # Open MPI passes it on after GRACE_S, and kills after GRACE_S more: a run that is longer.
    train = TRAIN.replace("--steps 300", "--steps 100000")
    _, code, output = disturb(run_dir, 2, lambda process: process.terminate(), train)
    assert code != 0
    saved = max(int(path.name) for path in (run_dir / "checkpoints").iterdir())
    last = (run_dir / "metrics.jsonl").read_text().splitlines()[-1]
    assert json.loads(last)["step"] == saved, output


def test_verify_compares_two_ranks_with_one_process(tmp_path):
    """Lies: ranks that each verify alone; bits of rank 0 alone."""
    command = [sys.executable, "-m", "multitower", "verify", str(EXAMPLES / "own_recipe/recipe.py")]

    def said(*words, ranks=None):
        launcher = [] if ranks is None else ["mpirun", "--host", f"localhost:{ranks}"]
        launcher += [] if ranks is None else ["--bind-to", "none"]
        return subprocess.run(
            [*launcher, *command, "--simulate", "1", *words],
            env=environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    one = said("--towers", "2", "--steps", "2", "--batch-size", "13", "--json")
    assert one.returncode == 0, one.stderr
    file = tmp_path / "one.json"
    file.write_text(one.stdout)
    two = said("--distributed", "--against", str(file), "--json", ranks=2)
    assert two.returncode == 0, two.stderr
    found = json.loads(two.stdout)
    assert found["runs"] == [f"{file} (1 device)", "2 x 1"]
    assert found["fingerprints"][0] == found["fingerprints"][1]
    facts = json.loads(one.stdout)
    facts["first_run"][1]["digests"][0]["tower program"]["1"] = {}
    file.write_text(json.dumps(facts))
    wrong = said("--distributed", "--against", str(file), ranks=2)
    assert wrong.returncode == 1, wrong.stderr
    assert "step 2: " in wrong.stderr
    assert "part in the tower program (tower 1 in process 1)" in wrong.stderr

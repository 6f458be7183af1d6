"""The script that is shipped for SLURM, on a SLURM of two nodes.

The lies: a restart by hand that is called the engine's; a restart that begins anew and reaches the
same end; a job that hangs when one of its processes is gone; one that is started again for ever.
"""

import json
import os
import shutil
import signal
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from network_hosts import require, two_hosts
from processes import run_fork
from slurm import Slurm
from waiting import wait_until

EXAMPLES = Path(__file__).parents[2] / "examples"
SCRIPT = EXAMPLES / "cluster" / "slurm.sbatch"
# Compiled in a moment.
CIRCLE = str(EXAMPLES / "own_recipe" / "recipe.py")
# What this machine is instead of the one that the script is for.
NODES = ["--nodes=2", "--ntasks-per-node=1"]
# A step ends so long after one of its processes, as the guide says; and then the job is requeued.
STEP_ENDS_S = 60


@pytest.fixture(scope="module")
def slurm():
    require("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    with two_hosts() as hosts:
        directory = Path(tempfile.mkdtemp(prefix="slurm-"))
        try:
            cluster = Slurm(directory, hosts)
            yield cluster
            cluster.stop()
        finally:
            shutil.rmtree(directory, ignore_errors=True)


class Job:
    """A run that was handed to sbatch."""

    def __init__(self, slurm, directory, *words, **settings):
        self.slurm = slurm
        self.run_dir = directory / "run"
        settings = {"VENV": sys.prefix, "RUN_DIR": str(self.run_dir), **settings}
        flags = [*NODES, f"--chdir={directory}", f"--output={directory / 'job.out'}"]
        self._out = directory / "job.out"
        self.number = slurm.submit(*flags, SCRIPT, *words, **settings)

    def said(self):
        return self._out.read_text() if self._out.exists() else ""

    def explain(self):
        return f"{self.said()}\n{self.slurm.logs(self.number)}"

    def wait_for_step(self, step, timeout_s=180):
        """Until `metrics.jsonl` holds it."""
        file = self.run_dir / "metrics.jsonl"

        def made():
            return file.exists() and len(file.read_text().splitlines()) >= step

        wait_until(made, timeout_s, self.explain)

    def wait_for(self, state, timeout_s):
        def reached():
            now = self.slurm.state(self.number)
            assert now in (state, "RUNNING", "PENDING", "COMPLETING", "REQUEUED"), self.explain()
            return now == state

        wait_until(reached, timeout_s, self.explain)

    def result(self):
        return json.loads((self.run_dir / "result.json").read_text())

    def lines(self):
        """What each step gave, and how fast it was: a step that is made again has another line."""
        return (self.run_dir / "metrics.jsonl").read_text().splitlines()

    def steps(self):
        return [json.loads(line)["step"] for line in self.lines()]


def undisturbed(directory, *words):
    """The fingerprint of the same run in one process on one device, with no cluster at all."""
    words = [*words, "--run-dir", str(directory / "whole")]
    run_fork("-m", "multitower", "train", *words, "--simulate", "1")
    return json.loads((directory / "whole" / "result.json").read_text())["fingerprint"]


def test_a_run_killed_on_a_node_is_requeued_and_ends_with_the_same_bits(slurm, tmp_path):
    words = [CIRCLE, "--steps", "1000", "--batch-size", "33", "--towers", "4"]
    words += ["--checkpoint-every", "50"]
    job = Job(slurm, tmp_path, *words, "--simulate", "2")
    job.wait_for_step(200)
    processes = slurm.processes(job.number)
    assert sorted(processes) == [0, 1]
    kept = job.lines()[:100]  # a checkpoint later than that may not be complete yet
    os.kill(processes[1], signal.SIGKILL)
    killed = time.monotonic()
    with ThreadPoolExecutor() as meanwhile:
        expected = meanwhile.submit(undisturbed, tmp_path, *words)
        wait_until(lambda: "starting again" in job.said(), STEP_ENDS_S, job.explain)
        print(f"the step ended {time.monotonic() - killed:.1f} s after the kill")
        assert not (job.run_dir / "result.json").exists()
    assert "mt-host1: task 1: Killed" in job.said()
    job.wait_for("COMPLETED", 180)
    assert "training circle on 2 processes (0 on mt-host0; 1 on mt-host1)" in job.said()
    assert "resuming circle from" in job.said()
    # A machine that is too busy may end the second attempt too; then the third one goes on.
    assert slurm.restarts(job.number) >= 1
    assert job.lines()[:100] == kept
    assert job.steps() == [*range(1, 1001), 1000]  # every step once, then the test phase
    assert job.result()["processes"] == 2
    assert job.result()["fingerprint"] == expected.result()


LONG = [CIRCLE, "--steps", "1000", "--batch-size", "33", "--towers", "2"]


@pytest.fixture(scope="module")
def long_fingerprint(tmp_path_factory):
    return undisturbed(tmp_path_factory.mktemp("long"), *LONG)


@pytest.mark.parametrize("by", ["scontrol requeue", "scancel --signal=TERM"])
def test_a_job_that_is_told_to_stop_goes_on(slurm, tmp_path, long_fingerprint, by):
    """By its owner, or for another job; by the signal that SLURM gives before the time is up."""
    job = Job(slurm, tmp_path, *LONG, "--simulate", "1", MAX_RESTARTS="0")
    job.wait_for_step(100)
    kept = job.lines()[:100]
    slurm.call(*by.split(), job.number)
    wait_until(lambda: "SIGTERM: stopped after step" in job.said(), STEP_ENDS_S, job.explain)
    job.wait_for("COMPLETED", 120)
    assert "resuming circle from" in job.said()
    assert slurm.restarts(job.number) == 1
    assert job.lines()[:100] == kept
    assert job.steps() == [*range(1, 1001), 1000]
    assert job.result()["fingerprint"] == long_fingerprint


def test_a_job_that_is_cancelled_stays_so(slurm, tmp_path):
    job = Job(slurm, tmp_path, *LONG, "--simulate", "1")
    job.wait_for_step(1)
    slurm.call("scancel", job.number)
    job.wait_for("CANCELLED", STEP_ENDS_S)
    assert "starting again" not in job.said()
    assert slurm.restarts(job.number) == 0


def test_a_job_that_comes_no_further_ends(slurm, tmp_path):
    job = Job(slurm, tmp_path, "no_such_recipe", MAX_RESTARTS="1")
    job.wait_for("FAILED", 90)
    assert "there is no recipe 'no_such_recipe'" in job.said()
    assert job.said().count("starting again") == 1
    assert slurm.restarts(job.number) == 1


def test_a_loop_over_srun_makes_one_table(slurm, tmp_path):
    """Lies: tasks that each measure alone; a second job that forgets the first."""
    words = ["-m", "multitower", "scale", CIRCLE, "--towers", "2", "--batch-size", "12"]
    words += ["--steps", "1", "--rounds", "1", "--simulate", "1", "--distributed", "--add"]
    for nodes in (1, 2):
        flags = [f"--nodes={nodes}", "--ntasks-per-node=1"]
        said = slurm.call("srun", *flags, sys.executable, *words, "--run-dir", str(tmp_path))
    assert said.count("measuring circle on") == 1
    found = json.loads((tmp_path / "scale.json").read_text())
    assert found["layouts"] == ["1 x 1", "2 x 1"]
    assert [entry["hosts"] for entry in found["strong"]] == [1, 2]
    assert found["losses"]["same"] is True
    assert found["losses"]["rule"] == "the same bits"
    assert found["simulated"] is False  # as far as the command can see: two hosts


SHOW_GPUS = """
import os
from multitower.processes.gpu_share import gpus_of_process
gpus = os.environ.get("CUDA_VISIBLE_DEVICES")
print(gpus, gpus_of_process(os.environ))
"""


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # one process a machine drives all of them
        (["--ntasks-per-node=1", "--gpus-per-node=4"], {"0,1,2,3 all"}),
        # one process a GPU, which all see all of them
        (
            ["--ntasks-per-node=4", "--gpus-per-node=4"],
            {f"0,1,2,3 {gpu}" for gpu in range(4)},
        ),
        # SLURM has handed them out
        (
            ["--ntasks-per-node=2", "--gpus-per-task=2", "--gpu-bind=per_task:2"],
            {"0,1 all", "2,3 all"},
        ),
    ],
    ids=["a machine", "a GPU", "a task"],
)
def test_trap_every_gpu_has_one_process(slurm, flags, expected):
    """Lie: rules for variables that SLURM does not set. (The GPUs are files; CUDA is not asked.)"""
    said = slurm.call("srun", "--nodes=1", *flags, sys.executable, "-c", SHOW_GPUS)
    assert set(said.splitlines()) == expected

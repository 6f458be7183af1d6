"""A run that is compiled in a moment, whichever engine starts it, and what it must come to."""

import functools
import json
import tempfile
import time
from pathlib import Path

from places import EXAMPLES
from processes import run_fork

CIRCLE = str(EXAMPLES / "own_recipe" / "recipe.py")
TRAIN = f"{CIRCLE} --steps 300 --batch-size 33 --towers 4 --checkpoint-every 50"


@functools.cache
def undisturbed_fingerprint():
    """What the same command comes to in one process on one device that nobody disturbs."""
    with tempfile.TemporaryDirectory() as there:
        words = ["train", *TRAIN.split(), "--simulate", "1", "--run-dir", there]
        run_fork("-m", "multitower", *words)
        return result(Path(there))["fingerprint"]


def result(run_dir):
    return json.loads((run_dir / "result.json").read_text())


def wait_for(is_there, alive, timeout_s=90):
    """Waits until `is_there()`, as long as `alive()`, which are two functions."""
    deadline = time.monotonic() + timeout_s
    while not is_there():
        assert alive(), "it has ended already"
        assert time.monotonic() < deadline, f"not there after {timeout_s} s"
        time.sleep(0.05)


def wait_for_first_checkpoint(run_dir, alive):
    """Until there is a checkpoint, and a few steps more.

    Returns:
        The lines of the steps up to it, each with its own speed: who makes a step again, changes
        its line.
    """
    file = run_dir / "metrics.jsonl"
    lines = lambda: file.read_text().splitlines() if file.exists() else []
    wait_for((run_dir / "checkpoints" / "50").is_dir, alive)
    wait_for(lambda: len(lines()) > 60, alive)
    assert not (run_dir / "result.json").exists(), "it has ended already"
    return lines()[:50]


def check_it_went_on(run_dir, lines_before):
    """The run has gone on from its checkpoint, and has come to what nothing had disturbed."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    assert lines[:50] == lines_before, "it began anew"
    assert [json.loads(line)["step"] for line in lines] == [*range(1, 301), 300]
    assert result(run_dir)["fingerprint"] == undisturbed_fingerprint()

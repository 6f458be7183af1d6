"""A disk that is full or cannot be written: a clear error, and nothing is lost."""

import json
import shutil
import subprocess
import sys

import pytest

from places import PROGRAMS
from processes import clean_environment

PROGRAM = str(PROGRAMS / "bad_disk_program.py")


def in_namespace():
    """The words before a command that may mount things; None if this machine has no such words."""
    words = ["unshare", "--map-root-user", "--mount"]
    if shutil.which("unshare") is None:
        return None
    return words if subprocess.run([*words, "true"], check=False).returncode == 0 else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "said"),
    [("full", "No space left on device"), ("read-only", "Read-only file system")],
)
def test_a_bad_disk_is_told_and_the_run_goes_on_when_it_is_mended(tmp_path, how, said):
    # The lies: a run that "saves" on; a checkpoint half there, or lost with the failed one.
    words = in_namespace()
    if words is None:
        pytest.skip("needs unshare and a kernel that lets this user make namespaces")
    process = subprocess.run(
        [*words, sys.executable, PROGRAM, str(tmp_path), how],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert process.returncode == 0, process.stderr[-4000:]
    found = json.loads(process.stdout)
    for told in (found["told"], found["again"]):
        assert told.startswith("CheckpointError: a checkpoint could not be written to ")
        assert said in told
        assert "The checkpoints before it are untouched." in told
    assert found["left"]
    assert found["left"] == list(range(2, found["left"][-1] + 1, 2))
    assert found["same"]
    assert found["began_with"] == found["left"][-1] + 1  # a run begun anew has the same bits

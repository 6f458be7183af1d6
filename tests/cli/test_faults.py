"""A fault at any stage of a run: the exit code and the lines of the manual, and nothing is lost."""

import json
import re
import subprocess
import sys

import pytest

from places import PROGRAMS
from processes import clean_environment, run_fork

PROGRAM = str(PROGRAMS / "fault_program.py")
TRAINING = ["compile", "first step", "step", "save"]
# All faults at all stages take three minutes of two cores, and passed; every stage is among these.
CHOSEN = {
    "SIGINT": ["set-up", "compile", "exit"],
    "SIGTERM": ["first step", "step", "report"],
    "SIGKILL": ["save", "result"],
    "full-disk": ["step", "report", "exit"],
    "exception": ["first step", "evaluation"],
    "two-SIGINTs": ["save"],
}

# Imports until one of a given name begins; then comes Ctrl-C.
IMPORTS = """
import os, signal, sys
import multitower_command

class Finder:
    def find_spec(self, name, *_):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
sys.meta_path.insert(0, Finder())
if sys.argv[2:]:  # as if by python -m multitower, which imports the package first
    sys.argv, sys.orig_argv = ["-m", sys.argv[1]], ["python", "-m", "multitower"]
    import multitower
multitower_command.main()
"""


def checked(found, chosen):
    """What `fault_program` wrote; every resumed run has the undisturbed bits."""
    found = json.loads(found)
    whole = found.pop("whole")
    assert {fault: list(stages) for fault, stages in found.items()} == chosen
    for fault, stages in found.items():
        for stage, one in stages.items():
            assert one["resumed"] == 0, (fault, stage, one["said again"])
            assert one["fingerprint"] == whole, (fault, stage)
            assert one["went on"], (fault, stage)  # a run that begins anew has the same bits
    return found


def settings(directory):
    """JAX's compiled programs: what a killed process leaves of them concerns no other test."""
    return {
        "JAX_COMPILATION_CACHE_DIR": str(directory / "jax-cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """All faults that need no disk of their own."""
    directory = tmp_path_factory.mktemp("faults")
    chosen = {fault: stages for fault, stages in CHOSEN.items() if fault != "full-disk"}
    words = (PROGRAM, str(directory), json.dumps(chosen))
    return checked(run_fork(*words, timeout_s=550, **settings(directory)), chosen)


def outcomes(found):
    """For each stage the exit code, and how many lines there were."""
    return {stage: (one["code"], len(one["said"])) for stage, one in found.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "training", "elsewhere"),
    [
        ("SIGINT", (130, 1), (130, 1)),
        ("SIGTERM", (143, 1), (143, 1)),
        ("SIGKILL", (-9, 0), (-9, 0)),
    ],
)
def test_a_signal_at_any_stage(found, fault, training, elsewhere):
    """Lies: a page of lines, code 0, a step that is made twice, a run that cannot go on."""
    found = found[fault]
    assert outcomes(found) == {
        stage: training if stage in TRAINING else elsewhere for stage in found
    }
    for stage, one in found.items():
        if stage in TRAINING and fault != "SIGKILL":
            assert f"multitower: {fault}: stopped after step" in one["said"][0]
            assert re.search(r"To continue: multitower resume \S+/run$", one["said"][0])


@pytest.mark.slow
def test_a_second_ctrl_c_does_not_wait_for_the_save(found):
    for one in found["two-SIGINTs"].values():
        assert (one["code"], one["said"]) == (130, ["multitower: stopped"])


@pytest.mark.slow
def test_an_exception_at_any_stage(found):
    """A mistake in a user's function shows where it is; what is saved is not lost."""
    for one in found["exception"].values():
        assert one["code"] == 1
        assert one["said"][0] == "Traceback (most recent call last):"
        assert one["said"][-1] == "RuntimeError: injected"


@pytest.mark.slow
def test_a_full_disk_at_any_stage(tmp_path):
    """Lies: hundreds of lines; a file that is half there; code 0 for what was not saved."""
    unshare = ["unshare", "--map-root-user", "--mount"]
    try:
        subprocess.run([*unshare, "true"], check=True)
    except (FileNotFoundError, subprocess.CalledProcessError):
        pytest.skip("needs unshare and a kernel that lets this user make namespaces")
    chosen = {"full-disk": CHOSEN["full-disk"]}
    ended = subprocess.run(
        [*unshare, sys.executable, PROGRAM, str(tmp_path), json.dumps(chosen)],
        env=clean_environment(**settings(tmp_path)),
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert ended.returncode == 0, ended.stderr[-4000:]
    found = checked(ended.stdout, chosen)["full-disk"]
    assert outcomes(found) == dict.fromkeys(found, (2, 1)) | {"exit": (0, 0)}
    for stage, one in found.items():
        assert stage == "exit" or "No space left on device" in one["said"][0]


@pytest.mark.parametrize(
    "name",
    [
        *["multitower", "jax", "jax -m"],
        *[pytest.param(name, marks=pytest.mark.slow) for name in ("numpy", "optax", "tyro")],
    ],
)
def test_ctrl_c_during_imports(name):
    """Lies: a page of lines, a hang in an extension module that cannot be initialised."""
    ended = subprocess.run(
        [sys.executable, "-c", IMPORTS, *name.split()],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.returncode, ended.stderr) == (130, "multitower: stopped\n")

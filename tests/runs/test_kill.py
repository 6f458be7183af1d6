"""kill -9 at any moment, resume on any number of devices: the bits of the undisturbed run."""

import json

import pytest

from places import PROGRAMS
from processes import run_fork

PROGRAM = str(PROGRAMS / "kill_and_resume_program.py")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_kills", "seed", "options", "fewest"),  # fifty take four minutes, and passed
    [
        (5, 2, {}, 3),
        (4, 10, {"stages": 2}, 2),
        (4, 10, {"updates": "asynchronous"}, 2),
        (2, 6, {"sync_every": 4}, 2),  # saved every 5 steps, so mostly between two meetings
    ],
)
def test_killed_and_resumed_is_as_if_nothing_had_happened(
    tmp_path, num_kills, seed, options, fewest
):
    # The lie (law L4): a checkpoint that is half there, a batch seen twice, a key that starts anew.
    steps = str(25 * num_kills)  # more than all killed attempts can make
    # What a killed process leaves of JAX's compiled programs concerns no other test.
    own = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "jax-cache")}
    # Seed 10 draws 1, 4, 4, 2 and 3 devices: with stages four layouts.
    words = (str(tmp_path / "runs"), steps, str(num_kills), str(seed), json.dumps(options))
    found = json.loads(run_fork(PROGRAM, *words, timeout_s=550, **own))
    assert found["fingerprint"] == found["undisturbed"]
    begins = [begin for _, begin in found["attempts"] if begin is not None]
    assert len(found["attempts"]) == num_kills + 1
    assert begins == sorted(begins)  # no attempt lost what was saved before it
    assert len(set(begins)) >= fewest  # and they did get on, also on a busy machine
    assert len({devices for devices, _ in found["attempts"]}) >= fewest
    if every := options.get("sync_every"):
        assert any((begin - 1) % every for begin in begins)

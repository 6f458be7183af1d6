"""The note that the last test phase has been made, which lies in a checkpoint, and failed saves."""

import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import CheckpointError
from multitower.training.checkpoints.saving import Saver
from multitower.training.checkpoints.tested import read_tested

X = np.ones(2, np.float32)


def test_a_note_waits_for_its_checkpoint(tmp_path):
    # The lie: a test phase that is quicker than the save is made at every start.
    class Slow:
        directory = tmp_path

        def wait(self):
            (tmp_path / "2").mkdir()

    Saver(Slow(), 1, 2, {}, {}).note_tested(2, {"waited": 1})
    assert read_tested(tmp_path / "2") == {"waited": 1}
    assert read_tested(tmp_path / "1") is None


def test_half_a_note_is_none(tmp_path):
    """Lie: a run that was killed while it wrote the note can never be resumed."""
    (tmp_path / "tested.json").write_text('{"waited"')
    assert read_tested(tmp_path) is None


def test_a_save_that_has_failed_is_heard_of_at_the_next_step():
    """Lie: the run goes on to the next checkpoint, which may be hours away."""

    class Failed:
        def raise_failure(self):
            raise CheckpointError("the disk is full")

    with pytest.raises(CheckpointError, match="the disk is full"):
        Saver(Failed(), 1000, 5000, {}, {}).is_due(2)


class Buffered:
    """A hook that sends what it hears later."""

    def __init__(self):
        self.heard = []

    def __call__(self, progress):
        self.heard.append(progress.phase)

    def flush(self):
        self.heard.append("sent")


@pytest.mark.parametrize(("writes", "times"), [(False, 1), (True, 2)], ids=["reads", "writes"])
def test_the_last_test_phase_is_made_again_if_it_has_written_into_the_state(
    writes, times, tmp_path
):
    """Lies: a resume loses what the last phase wrote; hooks keep what a resume does not say."""
    hook, phases = Buffered(), []
    trainer = mt.Trainer(
        lambda p, x: p["w"] * x, optax.sgd(0.1), devices=1, run_dir=tmp_path, hooks=hook
    )

    def phase(state):
        phases.append(trainer.evaluate(lambda p, x: {"x": x}, state, X, global_batch=2))
        if writes:
            state.params["w"] = np.float32(7)

    for resume in (False, True):
        state = trainer.fit(
            {"w": np.float32(0)}, lambda first: iter([X]), steps=1, resume=resume,
            evaluate=phase, evaluate_every=1,
        )  # fmt: skip
        assert (float(state.params["w"]) == 7) == writes
    assert len(phases) == times
    assert hook.heard[-1] == ("test" if writes else "sent")

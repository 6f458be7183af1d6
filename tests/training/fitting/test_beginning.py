"""A run in its directory: it is resumed or extended, and never mixed with another one."""

import os
import threading

import optax
import pytest

import multitower as mt
from trainers import PARAMS, batches, losses, make_trainer


def test_a_run_directory_is_not_used_twice_by_accident(tmp_path):
    make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=2)
    with pytest.raises(mt.RunError, match=r"holds checkpoints of steps \[2\]: pass resume=True"):
        make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=4)
    told = []
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[told.append])
    state = trainer.fit(PARAMS, batches, steps=2, resume=True)
    assert int(state.step) == 2
    assert told == []  # nothing is left to do, and nothing is done


@pytest.mark.slow
def test_a_finished_run_is_extended(tmp_path, undisturbed):
    # The lie: a longer run that begins anew, or that is not the run of so many steps.
    make_trainer(2, run_dir=tmp_path, hooks=[]).fit(PARAMS, batches, steps=33)
    told = []
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[lambda progress: told.append(progress.step)])
    state = trainer.fit(PARAMS, batches, steps=60, resume=True)
    assert told == list(range(34, 61))
    assert mt.fingerprint(state) == undisturbed


@pytest.mark.slow
def test_an_extended_run_has_what_the_last_test_phase_wrote_into_the_state(tmp_path):
    # The lie (law L4): a learning rate that the test phase of the last step has lowered is high
    # again, since that step was saved before the phase.
    def lower_rate(state):
        state.opt_state.hyperparams["learning_rate"] = 0.01 / int(state.step)

    def fit(run_dir, steps):
        optimizer = optax.inject_hyperparams(optax.adam)(learning_rate=0.01)
        trainer = mt.Trainer(losses, optimizer, towers=4, devices=1, run_dir=run_dir, hooks=[])
        given = {"evaluate": lower_rate, "evaluate_every": 2, "resume": True}
        return mt.fingerprint(trainer.fit(PARAMS, batches, steps=steps, **given))

    first = fit(tmp_path / "extended", 4)
    assert fit(tmp_path / "extended", 4) == first
    assert fit(tmp_path / "extended", 7) == fit(tmp_path / "whole", 7)


@pytest.mark.slow
def test_two_trainers_in_one_directory(tmp_path):
    """Lie: two runs that write the same checkpoints, and a resume from a mixture of both."""
    run_dir = tmp_path / "is not" / "there yet"
    refused = []

    def train_beside(progress):
        if progress.step == 3:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()

    def other():
        trainer = make_trainer(1, run_dir=run_dir)
        with pytest.raises(mt.RunError, match=f"another run trains in .*process {os.getpid()}"):
            trainer.fit(PARAMS, batches, steps=8, resume=True)
        refused.append(True)

    trainer = make_trainer(1, run_dir=run_dir, checkpoint_every=2, hooks=[train_beside])
    trainer.fit(PARAMS, batches, steps=8)
    assert refused == [True]
    trainer.hooks.clear()
    trainer.fit(PARAMS, batches, steps=10, resume=True)  # the first one has given it back


@pytest.mark.parametrize("fails", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_batches_that_end_or_fail_lose_no_step(tmp_path, fails, undisturbed):
    """Lie: the steps since the last checkpoint are lost, because the loader failed."""

    def until_50(first):
        for number, batch in enumerate(batches(first), first):
            if number == 50:
                break
            yield batch
        if fails:
            raise OSError("the disk of the data is gone")

    trainer = make_trainer(1, run_dir=tmp_path, checkpoint_every=20)
    with pytest.raises(OSError if fails else mt.RunError) as error:
        trainer.fit(PARAMS, until_50, steps=60)
    said = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert f"The state after step 50 is saved in {tmp_path / 'checkpoints'}." in said[-1]
    seen = []
    again = make_trainer(1, run_dir=tmp_path, hooks=[lambda progress: seen.append(progress.step)])
    assert mt.fingerprint(again.fit(PARAMS, batches, steps=60, resume=True)) == undisturbed
    assert seen == list(range(51, 61))


@pytest.mark.slow
def test_a_run_stays_where_it_is_if_the_working_directory_changes(tmp_path, monkeypatch):
    """Lie: the best state, or all checkpoints, in a second directory that no resume finds."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(1, run_dir="run")
    trainer.fit(PARAMS, batches, steps=1)
    monkeypatch.chdir("/")
    assert trainer.restore(PARAMS).step == 1


@pytest.mark.slow
def test_fewer_steps_than_the_run_has_made(tmp_path):
    """Lie: a finished run of a checkpoint that is of another one."""
    make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=3)
    with pytest.raises(mt.RunError, match=r"steps=2, and the run in .* has made 3"):
        make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=2, resume=True)


def test_hooks_are_flushed_before_a_checkpoint_is_saved(tmp_path):
    # The lie: a killed run whose curves lack the steps before the checkpoint that it resumes from.
    class Hook:
        def __init__(self):
            self.last, self.flushed = 0, []

        def __call__(self, progress):
            self.last = progress.step

        def flush(self):
            saved = [path.name for path in (tmp_path / "checkpoints").iterdir()]
            assert str(self.last) not in saved or self.flushed[-1] == self.last  # it is tested
            assert not list(tmp_path.glob("checkpoints/*/tested.json"))
            self.flushed.append(self.last)

    hook = Hook()
    options = {"checkpoint_every": 2, "keep_last": 2}
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[hook], **options)
    trainer.fit(PARAMS, batches, steps=5, evaluate=lambda _: None, evaluate_every=5)
    assert hook.flushed == [2, 4, 5, 5]  # also before it is noted that the test phase was made
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"4", "5"}


@pytest.mark.parametrize("option", [{"checkpoint_every": 2}, {"keep_last": 5}])
def test_what_needs_a_run_dir_is_said(option, tmp_path):
    """Lie: a long run that was to be saved every two steps, and leaves nothing."""
    with pytest.warns(mt.MultitowerWarning, match=r"\w+=\d has no effect: .*need a run_dir"):
        make_trainer(1, **option)
    make_trainer(1, run_dir=tmp_path, **option)


@pytest.mark.slow
def test_a_damaged_checkpoint_is_passed_over_only_when_allowed(tmp_path, undisturbed):
    make_trainer(1, run_dir=tmp_path, checkpoint_every=20).fit(PARAMS, batches, steps=40)
    (tmp_path / "checkpoints" / "40" / "about" / "metadata").unlink()
    with pytest.raises(mt.CheckpointError, match="--allow-previous"):
        make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=60, resume=True)
    told = []
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[lambda progress: told.append(progress.step)])
    with pytest.warns(mt.MultitowerWarning, match="Continuing from checkpoint 20"):
        state = trainer.fit(PARAMS, batches, steps=60, resume=True, allow_previous=True)
    assert told == list(range(21, 61))
    assert mt.fingerprint(state) == undisturbed

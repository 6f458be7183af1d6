"""Early stopping: the same last step wherever a run is stopped and resumed, and it says why."""

import os
import shutil
import signal

import numpy as np
import optax
import pytest

import early_stopping_program
import multitower as mt
from multitower.training.fitting.early_stopping import Patience
from processes import run_processes

X = np.random.default_rng(0).normal(size=(16, 2)).astype(np.float32)
PARAMS = np.zeros(2, np.float32)
# How far from the data the test set of a step lies: the best score is that of step 4.
FAR = {2: 5.0, 4: 0.0, 6: 9.0, 8: 8.0, 10: 9.0, 12: -1.0}


def losses(params, x):
    return (x @ params - 1) ** 2


def batches(first):
    return mt.make_batches(X, global_batch=8, seed=0, first=first)


def make_trainer(directory, devices, rule, checkpoint_every=3, hooks=()):
    return mt.Trainer(
        losses,
        optax.sgd(0.1),
        towers=2,
        devices=devices,
        run_dir=directory,
        keep_best="far",
        best="min",
        checkpoint_every=checkpoint_every,
        early_stopping=rule,
        hooks=hooks,
    )


def fit(trainer, steps=12, *, tested=None, **options):
    def evaluate(state):
        if tested is not None:
            tested.append(int(state.step))
        far = np.full(4, FAR[int(state.step)], np.float32)
        trainer.evaluate(lambda _, rows: {"far": rows}, state, far, global_batch=4)

    given = {"evaluate": evaluate, "evaluate_every": 2, "resume": True, **options}
    return trainer.fit(PARAMS, batches, steps=steps, **given)


class PulledPlugError(Exception):
    pass


REASON = (
    "early stopping after step 10: far has not improved in the last 3 test phases; the best is 0 "
    "after step 4"
)
SOME = [("train", 6, False), ("test", 10, True)]
ALL = [(phase, at, kill) for phase in ("train", "test") for at in FAR for kill in (True, False)]


def test_a_run_ends_early_and_says_why(tmp_path):
    # The lie: the state of another step than the last one, or a run that begins once more.
    rule = mt.EarlyStopping("far", patience=3, best="min")
    trainer = make_trainer(tmp_path, 1, rule, 2)  # each step is saved before its test phase
    state = fit(trainer)
    assert (int(state.step), trainer.stopped) == (10, REASON)
    assert int(trainer.restore(PARAMS, best=True).step) == 4
    assert int(trainer.restore(PARAMS).step) == 10
    tested = []
    assert mt.fingerprint(fit(trainer, tested=tested)) == mt.fingerprint(state)
    assert (trainer.stopped, tested) == (REASON, [])
    told = []
    rule = mt.EarlyStopping("far", min_delta=1, best="min")
    other = make_trainer(tmp_path, 1, rule, hooks=[told.append])
    with pytest.raises(mt.RunError, match=r"another early_stopping: the run there has 'far, best"):
        fit(other)
    # More patience: the run goes on from where it ended.
    trainer._early_stopping = mt.EarlyStopping("far", patience=4, best="min")
    assert int(fit(trainer).step) == 12
    assert trainer.stopped is None
    fit(other, tested=tested, allow_changes=True, steps_per_epoch=8)
    assert tested == [12]  # its rule has not counted this test phase
    assert [(one.phase, one.epoch) for one in told] == [("test", 1.5)]


@pytest.mark.parametrize("cases", [SOME, pytest.param(ALL, marks=pytest.mark.slow)])
def test_law_l4_a_run_that_is_stopped_anywhere_ends_after_the_same_step(tmp_path, cases):
    # The lie: patience that is forgotten at a resume, or a test phase that is counted twice.
    rule = mt.EarlyStopping("far", patience=3, best="min")
    trainer, other = (make_trainer(tmp_path, devices, rule) for devices in (2, 1))
    expected = mt.fingerprint(fit(trainer))
    for phase, at, is_killed in cases:
        if at > 10 - (phase == "train"):
            continue

        def stop(progress, case=(phase, at), is_killed=is_killed):
            if (progress.phase, progress.step) != case:
                return
            if is_killed:
                raise PulledPlugError
            os.kill(os.getpid(), signal.SIGTERM)

        shutil.rmtree(tmp_path)
        trainer.hooks = [stop]
        with pytest.raises(PulledPlugError if is_killed else mt.Interrupted):
            fit(trainer)
        is_ended = (phase, at, is_killed) == ("test", 10, False)
        assert trainer.stopped == (REASON if is_ended else None)
        assert mt.fingerprint(fit(other)) == expected
        assert other.stopped == REASON


def test_a_better_score_that_does_not_count_is_not_denied():
    # The lie: "the best is 1", and the best state that is kept has 1.75.
    patience = Patience(mt.EarlyStopping("score", patience=2, min_delta=1), {}, {})
    for step, score in enumerate([1, 1.25, 1.75], start=1):
        patience.see(step, {"score": score})
    assert patience.reason() == (
        "early stopping after step 3: score has not improved by more than 1 in the last 2 test "
        "phases; the last improvement was to 1 after step 1"
    )


def test_patience_in_numbers():
    # The lie: an improvement of less than min_delta, or a NaN, starts the patience anew.
    def last_step(scores, **options):
        run = {}
        patience = Patience(mt.EarlyStopping("score", **options), run, {})
        for step, score in enumerate(scores, start=1):
            if score is not None:
                patience.see(step, {"score": score})
                patience.see(step, {"score": 100.0})  # a second evaluation after the same step
            if patience.reason():
                return step
        return None

    assert last_step([1, 2, 2, 3, 3, 3], patience=2) == 6
    assert last_step([1, 1.5, 2, 2.5, 3], patience=2, min_delta=0.5) is None
    assert last_step([1, 1.25, 1.5, 1.75], patience=3, min_delta=1) == 4
    assert last_step([3, 2, 2, 2], patience=2, best="min") == 4
    assert last_step([float("nan")] * 3, patience=3) == 3
    assert last_step([float("inf"), 1.0, 2.0], patience=2) is None
    # Test phases that do not compute the score do not count.
    assert last_step([None, None, 2, 1, None, 1, 1, 1], patience=3) == 7
    with pytest.raises(mt.RunError, match=r"did not call trainer\.evaluate"):
        last_step([None] * 3, patience=3)


@pytest.mark.slow
def test_law_l9_process_0_decides_for_all(tmp_path):
    # The lie: each process decides alone, and one waits for the other without end.
    alone = early_stopping_program.run(tmp_path / "alone", devices=2)
    assert alone.startswith("early stopping after step 6: far has not improved in the last 2 test")
    program = early_stopping_program.__file__
    assert run_processes(program, 2, str(tmp_path / "both")).strip() == alone


@pytest.mark.slow
def test_what_early_stopping_needs_is_said():
    trainer = mt.Trainer(losses, optax.sgd(0.1), early_stopping=mt.EarlyStopping("hits"))
    with pytest.raises(mt.ArgumentError, match=r"early_stopping='hits' needs a test phase: pass"):
        trainer.fit(PARAMS, batches, steps=2)
    with pytest.raises(mt.RunError, match=r"early_stopping='hits': .* no such score. It has: far"):
        fit(trainer, resume=False)
    for options in ({"patience": 0}, {"patience": 1.5}, {"min_delta": -1}, {"best": "most"}):
        with pytest.raises(mt.ArgumentError, match=next(iter(options))):
            mt.EarlyStopping("loss", **options)


@pytest.mark.slow
def test_a_run_that_stopped_at_its_last_step_says_so_again(tmp_path):
    """Lie: resumed, it has just ended."""
    x = np.ones(2, np.float32)
    trainer = mt.Trainer(
        lambda w, x: w * x, optax.sgd(0.1), devices=1, run_dir=tmp_path, hooks=[],
        early_stopping=mt.EarlyStopping("x", patience=1),
    )  # fmt: skip
    phase = lambda state: trainer.evaluate(lambda w, x: {"x": x}, state, x, global_batch=2)
    for resume in (False, True):
        state = trainer.fit(
            np.float32(0), lambda first: iter([x, x]), steps=2, resume=resume,
            evaluate=phase, evaluate_every=1,
        )  # fmt: skip
        assert (trainer.stopped or "").startswith("early stopping after step 2")
    # The rule is for test phases of a run: these scores are another matter.
    trainer.evaluate(lambda w, x: {"other": x}, state, x, global_batch=2)

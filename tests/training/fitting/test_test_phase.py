"""Test phases: they change nothing that is trained, and the best state is kept."""

import os
import signal
from types import SimpleNamespace

import numpy as np
import optax
import pytest

import multitower as mt
from trainers import DATA, PARAMS, batches, make_trainer, scores


@pytest.mark.slow
def test_a_test_phase_that_fails_loses_no_step(tmp_path, undisturbed):
    def broken(state):
        raise RuntimeError("no such file")

    trainer = make_trainer(1, run_dir=tmp_path)
    with pytest.raises(RuntimeError, match="no such file") as caught:
        trainer.fit(PARAMS, batches, steps=60, evaluate=broken, evaluate_every=40)
    assert "The state after step 40 is saved" in caught.value.__notes__[0]
    state = make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=60, resume=True)
    assert mt.fingerprint(state) == undisturbed


def test_phases_alternate_and_the_best_state_is_kept(tmp_path, undisturbed):
    # The lies: a test phase that changes what is trained; "best" that is merely the last.
    told, of = [], set()

    def note(progress):
        told.append((progress.phase, progress.step))
        of.add(progress.num_steps)

    trainer = make_trainer(
        1,
        run_dir=tmp_path,
        keep_best="loss",
        best="min",
        hooks=[note],
    )
    # One test set after another is harder: so the first of them has the best score.
    tests = iter([{"x": DATA["x"], "y": DATA["y"] + far} for far in (5.0, 0.0, 9.0)])
    states = []

    def evaluate(state):
        states.append(mt.fingerprint(state))
        trainer.evaluate(scores, state, next(tests), global_batch=64)

    state = trainer.fit(PARAMS, batches, steps=60, evaluate=evaluate, evaluate_every=20)
    assert mt.fingerprint(state) == undisturbed
    assert [step for phase, step in told if phase == "test"] == [20, 40, 60]
    assert of == {60}  # the lie: every test phase is that of the last step
    assert told.index(("test", 20)) == told.index(("train", 20)) + 1
    assert trainer.best is not None
    assert trainer.best[0] == 40
    assert mt.fingerprint(trainer.restore(PARAMS, best=True)) == states[1]
    assert mt.fingerprint(trainer.restore(PARAMS)) == states[2]


@pytest.mark.parametrize("option", ["keep_best", "early_stopping"])
def test_the_highest_loss_is_no_silent_best(option, tmp_path):
    # The lie: "best" that is the worst, because the default is meant for scores like accuracy.
    def trainer(score, best):
        rule = mt.EarlyStopping(score, best=best) if option == "early_stopping" else score
        return make_trainer(1, run_dir=tmp_path, best=best, **{option: rule})

    with pytest.warns(mt.MultitowerWarning, match=rf"{option}='test_loss'.*best='min'") as seen:
        trainer("test_loss", "max")
    assert seen[0].filename == make_trainer.__code__.co_filename
    trainer("test_loss", "min")
    trainer("accuracy", "max")
    trainer("neg_log_loss", "max")


@pytest.mark.parametrize("stopped", [2, 4])
def test_a_run_that_is_stopped_before_a_test_phase_makes_it_when_it_goes_on(tmp_path, stopped):
    # The lie: the same fingerprint, and a best state that an undisturbed run would not have kept;
    # after its last step a run has nothing left to do.
    tested = []

    def stop(progress):  # hooks hear of a step one step late
        if progress.phase == "train" and progress.step == stopped - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    trainer = make_trainer(1, run_dir=tmp_path, hooks=[stop])
    options = {"steps": 4, "evaluate_every": 2, "evaluate": lambda s: tested.append(int(s.step))}
    with pytest.raises(mt.Interrupted, match=f"stopped after step {stopped} of 4"):
        trainer.fit(PARAMS, batches, **options)
    assert tested == list(range(2, stopped, 2))
    trainer.fit(PARAMS, batches, resume=True, **options)
    assert tested == [2, 4]


@pytest.mark.slow
def test_a_finished_run_makes_no_test_phase_again(tmp_path):
    # The lies: one test phase more in the metrics at every start of a finished program; and a
    # phase that was cut short and is taken for made.
    tested, bad = [], []

    def evaluate(state):
        tested.append(int(state.step))
        if bad:
            raise RuntimeError(bad.pop())

    def fit(steps, every=2):
        trainer = make_trainer(1, run_dir=tmp_path)
        given = {"evaluate": evaluate, "evaluate_every": every, "resume": True}
        tested.clear()
        return trainer.fit(PARAMS, batches, steps=steps, **given).step, [*tested]

    bad.append("the plug is pulled")
    with pytest.raises(RuntimeError, match="plug"):
        fit(2)
    assert fit(2) == (2, [2])
    assert fit(2) == (2, [])
    assert fit(4) == (4, [4])
    assert fit(4) == (4, [])
    note = tmp_path / "checkpoints" / "4" / "tested.json"
    note.write_text(note.read_text()[:-1])  # a kill in the midst of writing it
    assert fit(4) == (4, [4])
    assert fit(4) == (4, [])
    assert fit(5) == (5, [])
    assert fit(5, every=5) == (5, [5])


def test_the_rate_of_training_does_not_count_test_phases(monkeypatch):
    # The lie: a run that gets slower the more often it is tested. A step takes a second here, and
    # a test phase a thousand, on a clock of our own: a busy machine changes nothing.
    now, rates = [0.0], []
    clock = SimpleNamespace(perf_counter=lambda: now[0])
    monkeypatch.setattr("multitower.training.progress.time", clock)

    def note(progress):
        rates.append(progress.examples_per_s)
        now[0] += 1

    def evaluate(_):
        now[0] += 1000

    trainer = make_trainer(1, hooks=[note])
    trainer.fit(PARAMS, batches, steps=6, evaluate=evaluate, evaluate_every=2)
    assert rates == [None, *[32.0] * 5]


@pytest.mark.slow
def test_the_best_state_of_an_earlier_run_is_not_taken_for_one_of_this_run(tmp_path):
    # The lie: trainer.best of a run that ended before its first checkpoint, with other settings.
    def fit(**options):
        trainer = make_trainer(1, run_dir=tmp_path, keep_best="loss", best="min", hooks=[stop])
        evaluate = lambda state: trainer.evaluate(scores, state, DATA, global_batch=100)
        evaluate(trainer.step.init(PARAMS))  # a first state belongs to any run
        trainer.fit(PARAMS, batches, steps=4, evaluate=evaluate, evaluate_every=2, **options)
        return trainer.best

    def stop(progress):
        if progress.step == 3 and not stopped:
            stopped.append(progress.step)
            raise KeyboardInterrupt

    stopped = []
    with pytest.raises(KeyboardInterrupt):
        fit()
    with pytest.raises(mt.RunError, match=r"best holds the best state .* of step 2: pass resume="):
        fit()
    assert fit(resume=True)[0] == 4


def test_what_keep_best_needs_is_said(tmp_path):
    with pytest.raises(mt.ArgumentError, match="needs a run_dir"):
        make_trainer(1, keep_best="loss")
    with pytest.raises(mt.ArgumentError, match="say 'max' or 'min'"):
        make_trainer(1, best="highest")
    with pytest.raises(mt.ArgumentError, match="keep_best=3: say the name of a score"):
        make_trainer(1, run_dir=tmp_path, keep_best=3)
    for path in ("", 3):  # "" is an empty variable; to Python it is the working directory
        with pytest.raises(mt.ArgumentError, match=f"run_dir={path!r}: say a directory"):
            make_trainer(1, run_dir=path)
    trainer = make_trainer(1, run_dir=tmp_path, keep_best="f1")
    with pytest.raises(mt.ArgumentError, match="pass evaluate="):
        trainer.fit(PARAMS, batches, steps=1, evaluate_every=1)
    with pytest.warns(mt.MultitowerWarning, match=r"keep_best='f1'.*no state is kept unless"):
        state = trainer.fit(PARAMS, batches, steps=1, evaluate=print)  # evaluate_every is missing
    with pytest.raises(mt.RunError, match="has no such score"):
        trainer.evaluate(scores, state, DATA, global_batch=64)


@pytest.mark.slow
def test_a_test_phase_that_is_not_made_or_keeps_nothing_is_said_once(tmp_path):
    """Lies: `evaluate=` that is never called; a run that ends, and its best state is missing."""
    trainer = make_trainer(1, run_dir=tmp_path / "best", keep_best="loss", best="min", hooks=[])
    given = {"steps": 2, "evaluate": lambda state: {"loss": 1.0}}
    with pytest.warns(mt.MultitowerWarning) as seen:
        trainer.fit(PARAMS, batches, evaluate_every=1, **given)
    assert len(seen) == 1
    assert "keep_best='loss': the test phase did not call trainer.evaluate" in str(seen[0].message)
    trainer = make_trainer(1, hooks=[])
    with pytest.warns(mt.MultitowerWarning, match="without evaluate_every=: this fit makes no"):
        trainer.fit(PARAMS, batches, **given)
    trainer.fit(PARAMS, batches, evaluate_every=0, **given)
    with pytest.warns(mt.MultitowerWarning, match="from step 0 to step 2 and has no"):
        trainer.fit(PARAMS, batches, evaluate_every=3, **given)


@pytest.mark.slow
def test_scores_see_the_model_state():
    # The lie: an evaluation with the statistics of the first step.
    def loss(w, x, *, model_state):
        return (w * x) ** 2, {}, model_state + 1

    trainer = mt.Trainer(loss, optax.sgd(0.0), devices=2)
    rows = np.ones(4, np.float32)
    batches = lambda first: iter([rows] * 10)
    state = trainer.fit(np.float32(1), batches, steps=3, model_state=np.float32(0))
    metrics = lambda w, x, *, model_state: {"state": 0 * x + model_state}
    assert trainer.evaluate(metrics, state, rows, global_batch=4) == {"state": 3.0}

"""Trainer: a run that stops anywhere goes on as if it had not; what is not finite is named."""

import inspect
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.data.batches import make_batches
from multitower.steps.state.replicas import check_replicas
from multitower.training.fitting.interruption import noted_signals

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(100, 5)).astype(np.float32),
    "y": RNG.normal(size=100).astype(np.float32),
}
PARAMS = {"w": np.zeros(5, np.float32)}


def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batches(first):
    return make_batches(DATA, global_batch=32, seed=0, first=first)


def make_trainer(num_devices, **options):
    return mt.Trainer(
        losses,
        optax.adam(0.01),
        towers=4,
        devices=num_devices,
        global_batch=32,
        ema_decay=0.9,
        **options,
    )


@pytest.fixture(scope="module")
def undisturbed():
    """The fingerprint of 60 steps that nobody stopped."""
    return mt.fingerprint(make_trainer(2).fit(PARAMS, batches, steps=60))


@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)]
)
def test_trap_a_resume_on_another_permutation_of_the_data(tmp_path, number, undisturbed):
    """accelerate#2823, and lightning#9123: refused on another device count; laws L4 and L5.

    A signal finishes the step, saves, and says how to resume.
    """
    seen = []

    def stop_at_20(progress):
        seen.append(progress.step)
        if progress.step == 20:
            os.kill(os.getpid(), number)

    before = signal.getsignal(number)
    with pytest.raises(mt.Interrupted, match=r"step 21 of 60, which is saved in .*resume=True"):
        make_trainer(2, run_dir=tmp_path, hooks=[stop_at_20]).fit(PARAMS, batches, steps=60)
    assert signal.getsignal(number) == before
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[stop_at_20])
    state = trainer.fit(PARAMS, batches, steps=60, resume=True)
    assert mt.fingerprint(state) == undisturbed
    assert seen == list(range(1, 61))  # every step told once


def test_a_signal_that_is_ignored_stops_no_run():
    # The lie: a background job of a script, for which Ctrl-C is not meant, stops at it.
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        hook = lambda progress: os.kill(os.getpid(), signal.SIGINT)
        assert make_trainer(1, hooks=[hook]).fit(PARAMS, batches, steps=2).step == 2
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_second_signal_of_another_kind_acts_at_once():
    # The lie: Ctrl-C after a SIGTERM waits for the end of a step that never ends.
    with noted_signals() as caught:
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert caught == [signal.SIGTERM]


def test_a_handler_that_python_did_not_install_stays(monkeypatch):
    """Lie: a run inside of a program in C that fails at its end, when all work is done."""
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with noted_signals() as caught:
        monkeypatch.undo()
        assert signal.getsignal(signal.SIGTERM) == before
        assert caught == []


@pytest.mark.slow
def test_a_worker_that_a_loader_forked_can_be_stopped():
    """Lie: it notes the signal as the run does, and the loader waits for its end for ever."""
    child = """
import os, signal, sys, time
from multitower.training.fitting.interruption import noted_signals
with noted_signals() as caught:
    worker = os.fork()
    if not worker:
        time.sleep(60)
        os._exit(0)
    time.sleep(0.2)
    os.kill(worker, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == -signal.SIGTERM
    assert not caught
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", child], check=True, timeout=40)


@pytest.mark.slow
@pytest.mark.parametrize("inside", [True, False])
def test_a_signal_in_a_run_with_a_run_in_its_test_phase(tmp_path, inside):
    # The lies: ValueError in place of Interrupted; or the outer run's steps are lost.
    def stop(progress):
        if progress.phase == "train" and progress.step == (2 if inside else 6):
            os.kill(os.getpid(), signal.SIGTERM)

    probe = make_trainer(1, hooks=[stop] if inside else [])
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[] if inside else [stop])
    test = lambda state: probe.fit(PARAMS, batches, steps=4)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(mt.Interrupted, match="3 of 4" if inside else "7 of 9") as caught:
        trainer.fit(PARAMS, batches, steps=9, evaluate=test, evaluate_every=4)
    assert signal.getsignal(signal.SIGTERM) == before
    assert mt.Checkpoints(tmp_path / "checkpoints").steps() == ([4] if inside else [7])
    assert ("step 4 is saved" in "".join(getattr(caught.value, "__notes__", ""))) == inside


def test_a_test_phase_that_fails_loses_no_step(tmp_path, undisturbed):
    def broken(state):
        raise RuntimeError("no such file")

    trainer = make_trainer(1, run_dir=tmp_path)
    with pytest.raises(RuntimeError, match="no such file") as caught:
        trainer.fit(PARAMS, batches, steps=60, evaluate=broken, evaluate_every=40)
    assert "The state after step 40 is saved" in caught.value.__notes__[0]
    state = make_trainer(2, run_dir=tmp_path).fit(PARAMS, batches, steps=60, resume=True)
    assert mt.fingerprint(state) == undisturbed


@pytest.mark.slow
def test_a_second_fit_has_the_batch_size_of_its_own_batches():
    """Lies: other bits, because towers are as large as in an earlier fit; or no larger batch."""

    def fitted(*sizes):
        trainer = mt.Trainer(losses, optax.sgd(0.1), towers=4, devices=1, sync_every=2, hooks=[])
        for size in sizes:
            some = lambda first, size=size: make_batches(DATA, global_batch=size, seed=0)
            state = trainer.fit(PARAMS, some, steps=2)
        return mt.fingerprint(state)

    alone = fitted(6)
    assert fitted(12, 6) == alone
    assert fitted(4, 6) == alone


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


def poisoned(first):
    """The batches with an infinite number in row 9, tower 1, of step 7."""
    for number, batch in enumerate(batches(first), start=first + 1):
        if number == 7:
            batch["x"][9] = np.inf
        yield batch


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


def test_law_l9_stop_names_step_tower_and_parameter_and_keeps_the_good_checkpoint(tmp_path):
    # The lie: one tower's NaN goes unnoticed, or is saved.
    trainer = make_trainer(2, run_dir=tmp_path, checkpoint_every=1)
    named = r"step 7 of 20: .* tower .* is 1 of 4; .*params\['w'\]"
    with pytest.raises(mt.NonFiniteError, match=named):
        trainer.fit(PARAMS, poisoned, steps=20)
    told = []
    trainer = make_trainer(2, run_dir=tmp_path, hooks=[lambda progress: told.append(progress.step)])
    state = trainer.fit(PARAMS, batches, steps=8, resume=True)
    assert told == [7, 8]  # from the beginning it would come to the same bits
    assert mt.fingerprint(state) == mt.fingerprint(make_trainer(1).fit(PARAMS, batches, steps=8))


def test_trap_a_nan_on_one_tower_splits_the_others():
    """lightning#5243; law L9: nor does the optimizer count the skipped step."""
    prints = []
    for num_devices in (1, 2):
        skipped = []

        def note(progress, skipped=skipped):
            skipped.extend([progress.step] * bool(progress.metrics["skipped"]))

        trainer = make_trainer(num_devices, on_nonfinite="skip", hooks=[note])
        state = trainer.fit(PARAMS, poisoned, steps=12)
        assert skipped == [7]
        assert int(state.step) == 12
        assert int(state.opt_state[0].count) == 11
        assert np.isfinite(state.params["w"]).all()
        prints.append(mt.fingerprint(state))
    assert prints[0] == prints[1]

    def without_step_7(first):
        return (batch for number, batch in enumerate(batches(first), start=1) if number != 7)

    # As if there had never been such a batch.
    plain = trainer.fit(PARAMS, without_step_7, steps=11)
    found, expected = ((s.params, s.opt_state, s.ema_params) for s in (state, plain))
    assert mt.fingerprint(found) == mt.fingerprint(expected)


def bad_loss(params, batch):
    return losses(params, batch) + jnp.where(batch["x"][:, 0] == 77, jnp.nan, 0.0)


def bad_gradient(params, batch):
    # Zero is a finite number, and the slope there is infinity times zero.
    return losses(params, batch) + jnp.sqrt(
        jnp.where(batch["x"][:, 0] == 77, 0 * params["w"][0], 1.0)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "told", "untold"),
    [(bad_loss, "tower .* is 1 of 4", "params"), (bad_gradient, r"params\['w'\]", "tower")],
)
def test_a_loss_and_a_gradient_are_looked_at_each_for_itself(loss, told, untold):
    # The lie: one of the two is looked at, and the other is never bad alone in a test; or the
    # first parameter is named, whichever it is.
    params = {"fine": jnp.ones(2), **PARAMS}

    def marked(first):
        for number, batch in enumerate(batches(first), start=first + 1):
            batch["x"][9, 0] = 77 if number == 2 else 0
            yield batch

    options = {"towers": 4, "devices": 1}
    with pytest.raises(mt.NonFiniteError, match=f"step 2 of 4: .*{told}") as error:
        mt.Trainer(loss, optax.sgd(0.01), **options).fit(params, marked, steps=4)
    assert untold not in str(error.value)
    skipped = []
    note = lambda progress: skipped.append(progress.metrics["skipped"])
    trainer = mt.Trainer(loss, optax.sgd(0.01), on_nonfinite="skip", hooks=[note], **options)
    state = trainer.fit(params, marked, steps=3)
    assert skipped == [0, 1, 0]
    assert np.isfinite(state.params["w"]).all()


def test_hooks_hear_of_towers_and_evaluations():
    told = []
    trainer = make_trainer(1, hooks=told.append)  # one alone
    state = trainer.fit(PARAMS, batches, steps=3)
    batch = next(batches(0))
    first = told[0]
    np.testing.assert_allclose(
        first.tower_losses, (batch["y"] ** 2).reshape(4, 8).mean(1), rtol=1e-5
    )
    assert first.metrics["loss"] == pytest.approx(np.mean(batch["y"] ** 2), rel=1e-5)
    scores = trainer.evaluate(lambda p, b: {"loss": losses(p, b)}, state, DATA, global_batch=33)
    assert (told[-1].phase, told[-1].step, told[-1].metrics) == ("test", 3, scores)
    average = DATA["x"] @ np.asarray(state.ema_params["w"])
    assert scores["loss"] == pytest.approx(np.mean((average - DATA["y"]) ** 2), rel=1e-5)


def test_a_hook_that_is_a_list_too_is_a_hook():
    # The lie: a hook that is taken for an empty list of hooks.
    class History(list):
        def __call__(self, progress):
            self.append(progress.step)

    history = History()
    make_trainer(1, hooks=history).fit(PARAMS, batches, steps=2)
    assert history == [1, 2]


def test_batches_that_run_out_are_an_error():
    def three(first):
        return (batch for batch, _ in zip(batches(first), range(3), strict=False))

    with pytest.raises(mt.RunError, match=r"after step 3 of 5.*while True: yield from"):
        make_trainer(1).fit(PARAMS, three, steps=5)
    for found in (None, len, DATA):  # a forgotten return, a forgotten call, one batch
        said = rf"batches\(0\) returned .* \({type(found).__name__}\): it must return an iterator"
        with pytest.raises(mt.ArgumentError, match=said):
            make_trainer(1).fit(PARAMS, lambda first, found=found: found, steps=5)
    with pytest.raises(mt.ArgumentError, match=r"batches is list: give a function, batches.first"):
        make_trainer(1).fit(PARAMS, [DATA], steps=5)


@pytest.mark.parametrize("fails", [False, True])
def test_batches_that_end_or_fail_lose_no_step(tmp_path, fails, undisturbed):
    """Lie: the steps since the last checkpoint are lost, because the loader failed."""

    def until_50(first):
        for number, batch in enumerate(batches(first), first):
            if number == 50:
                break
            yield batch
        if fails:
            raise OSError("the disk of the data is gone")

    trainer = make_trainer(2, run_dir=tmp_path, checkpoint_every=20)
    with pytest.raises(OSError if fails else mt.RunError) as error:
        trainer.fit(PARAMS, until_50, steps=60)
    said = [str(error.value), *getattr(error.value, "__notes__", [])]
    assert f"The state after step 50 is saved in {tmp_path / 'checkpoints'}." in said[-1]
    seen = []
    again = make_trainer(1, run_dir=tmp_path, hooks=[lambda progress: seen.append(progress.step)])
    assert mt.fingerprint(again.fit(PARAMS, batches, steps=60, resume=True)) == undisturbed
    assert seen == list(range(51, 61))


def test_a_run_stays_where_it_is_if_the_working_directory_changes(tmp_path, monkeypatch):
    """Lie: the best state, or all checkpoints, in a second directory that no resume finds."""
    monkeypatch.chdir(tmp_path)
    trainer = make_trainer(1, run_dir="run")
    trainer.fit(PARAMS, batches, steps=1)
    monkeypatch.chdir("/")
    assert trainer.restore(PARAMS).step == 1


def test_fewer_steps_than_the_run_has_made(tmp_path):
    """Lie: a finished run of a checkpoint that is of another one."""
    make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=3)
    with pytest.raises(mt.RunError, match=r"steps=2, and the run in .* has made 3"):
        make_trainer(1, run_dir=tmp_path).fit(PARAMS, batches, steps=2, resume=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_nonfinite": "ignore"}, "say 'stop' or 'skip'"),
        ({"checkpoint_every": 0}, "checkpoint_every=0: it must be a whole number, 1 or more"),
        ({"checkpoint_every": 2.5}, "checkpoint_every=2.5: it must be a whole number"),
        ({"keep_last": 0}, "keep_last=0: it must be a whole number, 1 or more"),
        ({"keep_last": "2"}, "keep_last='2': it must be a whole number"),
        ({"check_replicas_every": -1}, "check_replicas_every=-1: it must be a whole number, 0"),
        ({"hooks": mt.EarlyStopping("loss")}, "pass it as early_stopping=EarlyStopping"),
        ({"hooks": [None]}, "hooks has None: a hook is a function"),
        ({"towers": True}, "towers=True: it must be a whole number"),
        ({"checkpoint_every": True}, "checkpoint_every=True: it must be a whole number"),
        ({"profile": (1, "2"), "run_dir": "x"}, "profile=.* the first and the last step"),
        ({"callbacks": [print]}, "Trainer has no argument 'callbacks'.*are hooks="),
    ],
)
def test_options_that_make_no_sense(options, message):
    with pytest.raises((mt.ArgumentError, mt.DeviceError, mt.RunError), match=message):
        mt.Trainer(losses, optax.sgd(0.1), **options)


@pytest.mark.slow
def test_numbers_of_numpy_are_numbers_and_the_same_run(tmp_path):
    """Lies: eight towers that are no number; a setting that JSON refuses at the first save."""
    numbers = {"towers": 4, "global_batch": 32, "ema_decay": 0.5, "stages": 2, "remat": False}
    deep = lambda w, batch: mt.cut(batch["x"] @ w["w"]) ** 2
    make = lambda options: mt.Trainer(deep, optax.sgd(0.1), run_dir=tmp_path, devices=1, **options)
    of_numpy = make({name: np.asarray(value)[()] for name, value in numbers.items()})
    of_numpy.fit(PARAMS, batches, steps=np.int32(1))
    assert make(numbers).fit(PARAMS, batches, steps=2, resume=True).step == 2


FITS = [
    ({"steps": 2.5}, "steps=2.5: it must be a whole number"),
    ({"steps": "3"}, "steps='3': it must be a whole number"),
    ({"steps": True}, "steps=True: it must be a whole number"),
    ({"steps": None, "epochs": "1"}, "epochs='1': it must be a number above 0"),
    ({"steps": None, "epochs": 1, "steps_per_epoch": "2"}, "steps_per_epoch='2': it must be a num"),
    ({"steps_per_epoch": "2"}, "steps_per_epoch='2': it must be a number above 0"),
    ({"about": {"rate": np.float32(0.1)}}, "float32 is not JSON serializable.*float"),
    ({"about": ["rate"]}, "it is not a dict"),
    ({"evaluate": len, "evaluate_every": 2.5}, "evaluate_every=2.5: it must be a whole number"),
    ({"evaluate": {"accuracy": 1.0}, "evaluate_every": 2}, "pass evaluate=, a function"),
]


@pytest.mark.parametrize(("arguments", "message"), FITS)
def test_what_a_run_could_not_save_or_test_is_told_before_it(arguments, message, tmp_path):
    """Lies: steps that are lost at the first save; a last step that is not saved."""
    heard = []
    trainer = make_trainer(1, run_dir=tmp_path, hooks=heard.append)
    with pytest.raises((mt.ArgumentError, mt.RunError), match=message):
        trainer.fit(PARAMS, batches, **{"steps": 3, **arguments})
    assert not heard
    assert make_trainer(1).fit(PARAMS, batches, steps=3.0).step == 3  # a whole number, such as 1e5


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_device_with_other_bits_is_named(towers):
    # The lie: replicas that drift apart unnoticed.
    step = mt.train_step(losses, optax.adam(0.01), towers=towers, devices=3)
    state, _ = step(step.init(PARAMS), next(batches(0)))
    check_replicas(state)
    shards = [np.array(shard.data) for shard in state.params["w"].addressable_shards]
    shards[2][3] = np.nextafter(shards[2][3], np.float32(9))
    devices = [shard.device for shard in state.params["w"].addressable_shards]
    arrays = [jax.device_put(s, d) for s, d in zip(shards, devices, strict=True)]
    like = state.params["w"]
    broken = jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
    with pytest.raises(mt.StateError, match=r"cpu:2 holds .* state\.params\['w'\] than cpu:0"):
        check_replicas(state.replace(params={"w": broken}))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (jnp.complex64([1 + 2j]), jnp.complex64([1 + 3j])),
        (jnp.complex64([1 + 2j]), jnp.complex64([2 + 1j])),
        (jnp.bfloat16([1, 2]), jnp.bfloat16([2, 1])),
        (jnp.array([True, False]), jnp.array([False, True])),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=["complex", "complex, exchanged", "bfloat16", "bool", "key"],
)
def test_other_bits_of_every_kind_are_found(first, second):
    # The lies: a sum that takes the real part alone, or in which numbers may change places.
    state = mt.train_step(losses, optax.sgd(0.1), devices=2).init(PARAMS)
    like = state.params["w"].sharding
    arrays = [jax.device_put(one, d) for one, d in zip((first, second), mt.devices(2), strict=True)]
    broken = jax.make_array_from_single_device_arrays(first.shape, like, arrays)
    with pytest.raises(mt.StateError, match=r"cpu:1 holds .* state\.params than cpu:0"):
        check_replicas(state.replace(params=broken))
    check_replicas(state.replace(params=jax.device_put(first, like)))


def scores(params, batch):
    return {"loss": losses(params, batch)}


def test_phases_alternate_and_the_best_state_is_kept(tmp_path, undisturbed):
    # The lies: a test phase that changes what is trained; "best" that is merely the last.
    told, of = [], set()

    def note(progress):
        told.append((progress.phase, progress.step))
        of.add(progress.num_steps)

    trainer = make_trainer(
        2,
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
    assert seen[0].filename == __file__
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


def test_a_signal_in_the_last_test_phase_is_heard(tmp_path):
    # The lie: Ctrl-C ends the first of many runs, and the next one begins.
    tested = []

    def evaluate(state):
        tested.append(int(state.step))
        os.kill(os.getpid(), signal.SIGINT)

    trainer = make_trainer(1, run_dir=tmp_path)
    given = {"steps": 2, "evaluate": evaluate, "evaluate_every": 2, "resume": True}
    with pytest.raises(mt.Interrupted, match="SIGINT: stopped after step 2 of 2, which is saved"):
        trainer.fit(PARAMS, batches, **given)
    assert trainer.fit(PARAMS, batches, **given).step == 2
    assert tested == [2]


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


@pytest.mark.parametrize("option", [{"checkpoint_every": 2}, {"keep_last": 5}])
def test_what_needs_a_run_dir_is_said(option, tmp_path):
    """Lie: a long run that was to be saved every two steps, and leaves nothing."""
    with pytest.warns(mt.MultitowerWarning, match=r"\w+=\d has no effect: .*need a run_dir"):
        make_trainer(1, **option)
    make_trainer(1, run_dir=tmp_path, **option)


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


def test_the_devices_are_compared_when_it_is_due(monkeypatch, tmp_path):
    # The lie: check_replicas is never called, or not before a save.
    from multitower.training.fitting import loop

    seen = []
    monkeypatch.setattr(loop, "check_replicas", lambda state: seen.append(int(state.step)))
    trainer = mt.Trainer(
        lambda w, x: (w - x) ** 2,
        optax.sgd(0.1),
        devices=2,
        run_dir=tmp_path,
        checkpoint_every=5,
        check_replicas_every=3,
    )
    rows = np.ones(4, np.float32)
    trainer.fit(np.float32(0), lambda first: iter([rows] * 10), steps=8)
    assert seen == [1, 3, 5, 6, 8]


def test_every_option_of_a_step_arrives_there(monkeypatch):
    # The lie: an option that is checked, compared at a resume, and dropped.
    given = {}
    monkeypatch.setattr(
        "multitower.training.trainer.train_step", lambda *_, **options: given.update(options)
    )
    chosen = {
        "devices": 2, "towers": 4, "global_batch": 8, "ema_decay": 0.5, "model_state_from": "first",
        "clip_norm": 1.0, "reduction": "sum", "shard_update": True, "shard_params": True,
        "stages": 2, "layout": (1, 2), "compute_dtype": jnp.bfloat16, "steps_per_call": 3,
        "updates": "asynchronous", "max_staleness": 1, "rotation": (0, 1), "stale_scale": abs,
        "sync_every": 2, "outer_optimizer": optax.sgd(1.0), "local_state": "average",
        "extra_metrics": ["gradient_norm"], "remat": False, "momentum_correction": True,
        "interleave": True,
    }  # fmt: skip
    optimizer = optax.sgd(0.1)
    mt.Trainer(losses, optimizer, on_nonfinite="skip", **chosen)
    assert given == {**chosen, "diagnostics": True, "skip_nonfinite": True}
    mt.Trainer(losses, optimizer)
    assert given["skip_nonfinite"] is False
    both = set(inspect.signature(mt.Trainer).parameters)
    both &= set(inspect.signature(mt.train_step).parameters)
    assert both == {"loss_fn", "optimizer", *chosen}  # none is forgotten here


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


def test_the_model_is_what_is_scored():
    """Lie: the raw parameters go out into the world, and the scores are those of their average."""
    trainer = mt.Trainer(losses, optax.sgd(0.5), devices=2, ema_decay=0.5)
    state = trainer.fit(PARAMS, batches, steps=3)
    assert mt.fingerprint(trainer.model(state)) == mt.fingerprint(state.ema_params)
    assert mt.fingerprint(trainer.step.model(state)) == mt.fingerprint(state.params)
    assert mt.fingerprint(trainer.model(state, ema=True)) == mt.fingerprint(state.ema_params)
    assert mt.fingerprint(trainer.model(state, ema=False)) == mt.fingerprint(state.params)
    plain = mt.Trainer(losses, optax.sgd(0.5), devices=2)
    state = plain.fit(PARAMS, batches, steps=3)
    assert mt.fingerprint(plain.model(state)) == mt.fingerprint(state.params)
    # The average and the parameters by name.
    assert mt.fingerprint(plain.model(state, ema=False)) == mt.fingerprint(state.params)
    with pytest.raises(mt.ArgumentError, match=r"ema=True\): this state has no moving average"):
        plain.model(state, ema=True)


def test_complex_metrics_are_refused_by_name():
    def loss(w, batch):
        return (w - batch["x"]) ** 2, {"phase": {"factor": batch["x"] * 1j}}

    trainer = mt.Trainer(loss, optax.sgd(0.1), towers=2, devices=2, hooks=[])
    with pytest.raises(mt.OutputError, match=r"metric 'phase/factor' is complex.*\.real"):
        trainer.fit(jnp.float32(0), lambda _: iter([{"x": np.ones(4, np.float32)}] * 2), steps=1)

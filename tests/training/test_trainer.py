"""Trainer: what it is told arrives, what is not finite is named, and hooks hear of every step."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.data.batches import make_batches
from multitower.steps.state.replicas import check_replicas
from trainers import DATA, PARAMS, batches, losses, make_trainer


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


def poisoned(first):
    """The batches with an infinite number in row 9, tower 1, of step 7."""
    for number, batch in enumerate(batches(first), start=first + 1):
        if number == 7:
            batch["x"][9] = np.inf
        yield batch


def test_law_l9_stop_names_step_tower_and_parameter_and_keeps_the_good_checkpoint(tmp_path):
    # The lie: one tower's NaN goes unnoticed, or is saved.
    trainer = make_trainer(2, run_dir=tmp_path, checkpoint_every=1)
    named = r"step 7 of 20: .* tower .* is 1 of 4; .*params\['w'\]"
    with pytest.raises(mt.NonFiniteError, match=named):
        trainer.fit(PARAMS, poisoned, steps=20)
    told = []
    trainer = make_trainer(1, run_dir=tmp_path, hooks=[lambda progress: told.append(progress.step)])
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
        assert int(state.opt_state[1].count) == 11
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


@pytest.mark.slow
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


def test_a_whole_number_of_steps_may_be_a_float():
    assert make_trainer(1).fit(PARAMS, batches, steps=3.0).step == 3  # such as 1e5


@pytest.mark.parametrize(
    ("towers", "devices"), [pytest.param(None, 3, marks=pytest.mark.slow), (4, 2)]
)
def test_a_device_with_other_bits_is_named(towers, devices):
    # The lie: replicas that drift apart unnoticed.
    step = mt.train_step(losses, optax.sgd(0.01, momentum=0.9), towers=towers, devices=devices)
    state, _ = step(step.init(PARAMS), next(batches(0)))
    check_replicas(state)
    shards = [np.array(shard.data) for shard in state.params["w"].addressable_shards]
    shards[-1][3] = np.nextafter(shards[-1][3], np.float32(9))
    places = [shard.device for shard in state.params["w"].addressable_shards]
    arrays = [jax.device_put(s, d) for s, d in zip(shards, places, strict=True)]
    like = state.params["w"]
    broken = jax.make_array_from_single_device_arrays(like.shape, like.sharding, arrays)
    named = rf"cpu:{devices - 1} holds .* state\.params\['w'\] than cpu:0"
    with pytest.raises(mt.StateError, match=named):
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


@pytest.mark.slow
def test_the_model_is_what_is_scored():
    """Lie: the raw parameters go out into the world, and the scores are those of their average."""
    trainer = mt.Trainer(losses, optax.sgd(0.5), devices=1, ema_decay=0.5)
    state = trainer.fit(PARAMS, batches, steps=3)
    assert mt.fingerprint(trainer.model(state)) == mt.fingerprint(state.ema_params)
    assert mt.fingerprint(trainer.step.model(state)) == mt.fingerprint(state.params)
    assert mt.fingerprint(trainer.model(state, ema=True)) == mt.fingerprint(state.ema_params)
    assert mt.fingerprint(trainer.model(state, ema=False)) == mt.fingerprint(state.params)
    plain = mt.Trainer(losses, optax.sgd(0.5), devices=1)
    state = plain.fit(PARAMS, batches, steps=3)
    assert mt.fingerprint(plain.model(state)) == mt.fingerprint(state.params)
    # The average and the parameters by name.
    assert mt.fingerprint(plain.model(state, ema=False)) == mt.fingerprint(state.params)
    with pytest.raises(mt.ArgumentError, match=r"ema=True\): this state has no moving average"):
        plain.model(state, ema=True)


@pytest.mark.slow
def test_complex_metrics_are_refused_by_name():
    def loss(w, batch):
        return (w - batch["x"]) ** 2, {"phase": {"factor": batch["x"] * 1j}}

    trainer = mt.Trainer(loss, optax.sgd(0.1), towers=2, devices=1, hooks=[])
    with pytest.raises(mt.OutputError, match=r"metric 'phase/factor' is complex.*\.real"):
        trainer.fit(jnp.float32(0), lambda _: iter([{"x": np.ones(4, np.float32)}] * 2), steps=1)

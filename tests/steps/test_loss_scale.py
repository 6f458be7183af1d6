"""compute_dtype=float16: a loss scale of powers of two, decided once for all towers.

The lies: an update from gradients that overflowed; towers that decide apart; gradients, norms or
losses that still carry the scale; a scale that a resume forgets.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.precision import next_scale

FIRST = 2.0**15
DRAW = np.random.default_rng(0)
PARAMS = {"w": np.array([0.5, -0.25, 0.75], np.float32)}
TOWERS = 4
ROWS = 8


def batch_of(size):
    """A batch in which the gradient of tower 1 is about so large; those of the others are small."""
    x = DRAW.uniform(0.1, 0.3, size=(ROWS, 3)).astype(np.float32)
    x[2:4] = 1
    y = np.zeros(ROWS, np.float32)
    y[2:4] = -size / 2
    return {"x": x, "y": y}


GOOD, BAD = batch_of(2), batch_of(30)
# The first BAD overflows with the first scale, and the second one fits into half of it.
BATCHES = [GOOD, BAD, BAD, GOOD, GOOD, GOOD]
SCALES = [FIRST, FIRST, FIRST / 2, FIRST / 2, FIRST / 2, FIRST]
CLIP, LR, MOMENTUM, DECAY = 1.5, 0.125, 0.5, 0.75


@jax.custom_vjp
def rounded(x):
    return x


# Compilers may leave out the cast of a gradient to float16 and back; not this rounding.
rounded.defvjp(lambda x: (x, None), lambda _, g: (jax.lax.reduce_precision(g, 5, 10),))


def losses(params, batch):
    w = rounded(params["w"].astype(jnp.float32))
    return 0.5 * (batch["x"].astype(jnp.float32) @ w - batch["y"]) ** 2


def ratio_losses(params, batch):
    found = losses(params, batch)
    return mt.ratio(found, jnp.ones_like(found))


def replay(towers=TOWERS):
    """The same in NumPy, in float64 but for the casts; its metrics, parameters and average."""
    w, trace = PARAMS["w"].astype(float), np.zeros(3)
    average, scale, told = w, FIRST, []
    for number, batch in enumerate(BATCHES):
        x = batch["x"].astype(np.float16).astype(float)
        off = x @ w.astype(np.float16).astype(float) - batch["y"]
        parts = (off[:, None] * x * scale / ROWS).reshape(towers, -1, 3).sum(1)
        with np.errstate(over="ignore"):
            gradient = parts.astype(np.float16).astype(float).sum(0) / scale
        good = np.isfinite(gradient).all()
        norm = np.sqrt((gradient**2).sum())
        told.append((0.5 * (off**2).mean(), scale, float(not good), norm))
        if not good:
            scale /= 2
            continue
        trace = MOMENTUM * trace + gradient * min(1, CLIP / norm)
        w = w - LR * trace
        average = DECAY * average + (1 - DECAY) * w
        scale *= 2 if number == 4 else 1
    return told, w, average


def train(loss=losses, **options):
    step = mt.train_step(
        loss,
        optax.sgd(LR, momentum=MOMENTUM),
        compute_dtype=jnp.float16,
        clip_norm=CLIP,
        ema_decay=DECAY,
        extra_metrics=["gradient_norm"],
        **options,
    )
    state, told = step.init(PARAMS), []
    for number, batch in enumerate(BATCHES):
        if number == 3:
            assert int(state.loss_scale["good_steps"]) == 1
            state.loss_scale["good_steps"] = 1998  # two steps before it grows
        state, metrics = step(state, batch)
        told.append(metrics)
    return state, told


def check(state, told, towers):
    expected, w, average = replay(towers)
    for metrics, values in zip(told, expected, strict=True):
        names = ("loss", "loss_scale", "skipped", "gradient_norm")
        found = [float(metrics[name]) for name in names]
        np.testing.assert_allclose(found, values, rtol=2e-3)
    assert [float(metrics["loss_scale"]) for metrics in told] == SCALES
    assert [float(metrics["skipped"]) for metrics in told] == [0, 1, 0, 0, 0, 0]
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-3)
    np.testing.assert_allclose(state.ema_params["w"], average, rtol=1e-3)
    assert {name: leaf.item() for name, leaf in state.loss_scale.items()} == {
        "scale": FIRST,
        "good_steps": 1,
    }
    assert state.params["w"].dtype == jnp.float32
    assert int(state.step) == len(BATCHES)


@pytest.mark.parametrize("counts", [(1,), pytest.param((1, 2), marks=pytest.mark.slow)], ids=str)
def test_same_bits_on_any_number_of_devices_and_those_of_a_replay(counts):
    prints = set()
    for devices in counts:
        state, told = train(devices=devices, towers=TOWERS)
        check(state, told, TOWERS)
        prints.add(mt.fingerprint((state, told)))
    assert len(prints) == 1


@pytest.mark.slow
def test_fast_steps_and_a_ratio():
    check(*train(ratio_losses, devices=2), 2)


@pytest.mark.slow
def test_the_scale_stays_out_of_a_sum():
    step = mt.train_step(
        losses, optax.sgd(1.0), compute_dtype="float16", reduction="sum", devices=1, towers=2
    )
    x = GOOD["x"].astype(np.float16).astype(float)
    off = x @ PARAMS["w"] - GOOD["y"]
    state = step.init(PARAMS)
    for skipped in (1, 1, 0):  # 4 * 2**14 is out of range
        state, metrics = step(state, GOOD)
        np.testing.assert_allclose(metrics["loss"], 0.5 * (off**2).sum(), rtol=1e-4)
        assert metrics["skipped"] == skipped
    moved = PARAMS["w"] - np.asarray(state.params["w"])
    np.testing.assert_allclose(moved, off @ x, rtol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("option", ["shard_update", "shard_params"])
def test_split_over_devices(option):
    wide = {"w": np.linspace(-1, 1, 8192, dtype=np.float32)}
    loss = lambda params, x: (x.astype(jnp.float32) @ params["w"].astype(jnp.float32)) ** 2
    rows = 0.01 * DRAW.normal(size=(4, 8192)).astype(np.float32)
    found = []
    for options in ({}, {option: True}):
        step = mt.train_step(loss, optax.sgd(1e-6), compute_dtype=jnp.float16, devices=2, **options)
        state = step.init(wide)
        for factor in (1, jnp.nan, 1):
            state, metrics = step(state, rows * np.float32(factor))
        found.append((state.params["w"], state.loss_scale, metrics))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), *found)
    assert found[1][1]["scale"] == FIRST / 2


@pytest.mark.slow
def test_several_steps_a_call():
    step = mt.train_step(
        losses, optax.sgd(LR), compute_dtype=jnp.float16, devices=2, steps_per_call=4
    )
    state, metrics = step(step.init(PARAMS), BATCHES[:4])
    assert metrics["loss_scale"].tolist() == SCALES[:4]
    assert metrics["skipped"].tolist() == [0, 1, 0, 0]
    assert state.loss_scale["scale"] == FIRST / 2


def trainer_of(loss=losses, **options):
    return mt.Trainer(
        loss, optax.sgd(LR), towers=TOWERS, compute_dtype=jnp.float16, hooks=[], **options
    )


def batches(first):
    return itertools.islice(BATCHES, first, None)


@pytest.mark.slow
def test_a_run_goes_on_after_an_overflow_and_resumes_with_its_scale(tmp_path):
    whole = trainer_of(devices=1).fit(PARAMS, batches, steps=4)
    assert whole.loss_scale["scale"] == FIRST / 2
    trainer_of(devices=2, run_dir=tmp_path).fit(PARAMS, batches, steps=2)
    resumed = trainer_of(devices=1, run_dir=tmp_path).fit(PARAMS, batches, steps=4, resume=True)
    assert mt.fingerprint(resumed) == mt.fingerprint(whole)
    other = mt.Trainer(losses, optax.sgd(LR), towers=TOWERS, devices=1, run_dir=tmp_path, hooks=[])
    with pytest.raises(mt.CheckpointError, match="compute_dtype: float16 keeps a loss scale"):
        other.fit(PARAMS, batches, steps=5, resume=True)


@pytest.mark.slow
def test_a_gradient_that_no_scale_mends_ends_the_run():
    # The lie: a run that skips every step until it is done.
    def loss(params, batch):
        at_zero = jnp.sqrt(0 * params["w"][0].astype(jnp.float32))
        return losses(params, batch) + at_zero

    with pytest.raises(mt.NonFiniteError, match="step 16"):
        trainer_of(loss, devices=1).fit(PARAMS, lambda first: itertools.repeat(GOOD), steps=30)


@pytest.mark.slow
def test_states_of_other_steps():
    narrow = mt.train_step(losses, optax.sgd(LR), compute_dtype=jnp.float16, devices=1)
    plain = mt.train_step(losses, optax.sgd(LR), devices=1)
    state, _ = narrow(plain.init(PARAMS), GOOD)
    assert state.loss_scale["scale"] == FIRST
    state, metrics = plain(state, GOOD)
    assert state.loss_scale is None
    assert "loss_scale" not in metrics


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"towers": 4, "stages": 2}, "stages="),
        ({"towers": 4, "sync_every": 2}, "sync_every="),
        ({"towers": 4, "updates": "asynchronous"}, "updates='asynchronous'"),
        ({"towers": 4, "shard_update": True}, "shard_update=True with towers="),
    ],
)
def test_what_it_does_not_go_together_with(options, named):
    with pytest.raises(mt.ArgumentError) as error:
        mt.train_step(losses, optax.sgd(LR), compute_dtype=jnp.float16, **options)
    assert f"float16 and {named} exclude each other" in str(error.value)
    assert f"or leave {named} out" in str(error.value)


def test_a_metric_of_its_name_is_refused():
    step = mt.train_step(lambda w, x: (w * x, {"loss_scale": x}), optax.sgd(1.0), devices=1)
    with pytest.raises(mt.OutputError, match="my_loss_scale"):
        step(step.init(np.float32(1)), np.ones(2, np.float32))


@pytest.mark.slow
def test_a_plan_leaves_out_what_would_be_refused():
    plan = mt.plan(
        losses, optax.sgd(LR), PARAMS, GOOD, devices=2, towers=2, compute_dtype=jnp.float16
    )
    options = [set(layout.options) for layout in plan.layouts]
    assert {"devices", "towers"} in options
    assert not any("stages" in one or {"towers", "shard_update"} <= one for one in options)


def test_the_scale_stays_in_its_range():
    # Zero gradients would let it grow out of float32, and a NaN in the data let it become zero.
    for scale, good, expected in ((1.0, False, 1.0), (2.0**64, True, 2.0**64)):
        given = {"scale": np.float32(scale), "good_steps": np.int32(1999)}
        found = next_scale(given, jnp.bool_(good))
        assert (float(found["scale"]), int(found["good_steps"])) == (expected, 0)

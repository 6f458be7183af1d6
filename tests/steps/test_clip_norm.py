"""clip_norm: the mean gradient has at most this global norm, in every way to run.

The lies: a norm of a tower's gradient, of a block, or leaf by leaf; other bits on other devices.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.optimizing.clipping import clipped, leaf_squares

WAYS = {
    "fast": {"devices": 2},
    "same bits": {"devices": 1, "towers": 4},  # law L3 says that more devices are the same
    "shard_update": {"devices": 2, "towers": 4, "shard_update": True},
}
# Blocks of the update, which compile most, are held against NumPy every day, below.
fast_every_day = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[] if way == "fast" else [pytest.mark.slow])
        for way, options in WAYS.items()
    ],
    ids=WAYS,
)
fast_and_same_bits = pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, marks=[pytest.mark.slow] if way == "shard_update" else [])
        for way, options in WAYS.items()
    ],
    ids=WAYS,
)
BATCHES = [np.random.default_rng(n).normal(size=(n, 5)).astype(np.float32) for n in (12, 7, 12)]
LIMIT = 2.2  # of three steps, one is below it


def losses(params, x):
    return (x @ params["w"] + params["b"]) ** 2


def params_of(dtype=np.float32):
    return {"w": np.linspace(-1, 1, 5).astype(dtype), "b": np.asarray(0.5, dtype)}


def train(limit, options, optimizer=None, params=None, batches=BATCHES):
    optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(losses, optimizer, clip_norm=limit, global_batch=12, **options)
    state = step.init(params or params_of())
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def numpy_sgd(limit, batches=BATCHES):
    """Momentum SGD with clipping, in float64; and how often it bites."""
    w, b, tw, tb, bitten = np.linspace(-1, 1, 5), 0.5, 0.0, 0.0, 0
    for batch in batches:
        x = batch.astype(float)
        wrong = 2 * (x @ w + b)
        gw, gb = (wrong[:, None] * x).mean(0), wrong.mean()
        norm = np.sqrt((gw**2).sum() + gb**2)
        factor = min(1, limit / norm)
        bitten += factor < 1
        tw, tb = 0.9 * tw + factor * gw, 0.9 * tb + factor * gb
        w, b = w - 0.1 * tw, b - 0.1 * tb
    return w, b, bitten


# A trainer's towers are held against the same, below.
@fast_every_day
def test_it_is_the_norm_of_the_mean_gradient_over_all_leaves(options):
    state, _ = train(LIMIT, options)
    w, b, bitten = numpy_sgd(LIMIT)
    assert bitten == 2
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5, atol=1e-6)


@functools.cache
def parameters_with_optax():
    chained = optax.chain(optax.clip_by_global_norm(LIMIT), optax.adam(0.1))
    state, _ = train(None, {"devices": 1}, chained)
    return jax.device_get(state.params)


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_it_equals_optax(options):
    state, _ = train(LIMIT, options, optax.adam(0.1))
    expected = parameters_with_optax()
    for one, two in zip(*map(jax.tree.leaves, (state.params, expected)), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("sharded", "dtype"),
    [
        pytest.param(True, jnp.bfloat16, marks=pytest.mark.slow),
        (False, jnp.bfloat16),
        pytest.param(True, np.float32, marks=pytest.mark.slow),
    ],
    ids=["sharded, bfloat16", "whole, bfloat16", "sharded"],
)
def test_law_l3_the_same_bits_on_any_number_of_devices(sharded, dtype):
    found = []
    optimizer = optax.adamw(0.1) if sharded else None  # momentum: whole updates compile every day
    for devices in (1, 2):
        options = {"devices": devices, "towers": 3, "shard_update": sharded}
        state, metrics = train(LIMIT, options, optimizer, params_of(dtype))
        found.append(mt.fingerprint((state, metrics)))
    assert len(set(found)) == 1


def test_short_floats_are_squared_and_added_in_float32():
    """Lies: 1001 ones whose squares add up to 1000; clipped gradients of a longer dtype."""
    gradients = {"w": jnp.ones(1001, jnp.bfloat16)}
    squares = leaf_squares(gradients)
    assert (squares.dtype, squares.tolist()) == (np.float32, [1001])
    found = clipped(gradients, squares, 1.0)["w"]
    assert found.dtype == jnp.bfloat16
    np.testing.assert_array_equal(found, np.full(1001, 1001**-0.5, jnp.bfloat16))


def test_short_floats_are_rounded_once():
    """Lie: a factor of 16 bits, so that a gradient is rounded twice."""
    gradient = jnp.arange(1, 65, dtype=jnp.bfloat16)
    squares = leaf_squares(gradient)
    wanted = (gradient.astype(np.float32) * (1 / jnp.sqrt(squares[0]))).astype(jnp.bfloat16)
    np.testing.assert_array_equal(clipped(gradient, squares, 1.0), wanted)


@pytest.mark.slow
def test_large_leaves_in_buffers_of_their_own():
    """Lie: squares of the small leaves alone."""
    params = {"w": np.ones((300, 300), np.float32), "b": np.zeros(3, np.float32)}
    fun = lambda p, x: x * (p["w"].sum() + p["b"].sum())
    for options in WAYS.values():
        step = mt.train_step(fun, optax.sgd(1.0), clip_norm=1.0, **options)
        state, _ = step(step.init(params), np.full(12, 7, np.float32))
        moved = 1 / np.sqrt(90003)
        np.testing.assert_allclose(state.params["w"], 1 - moved, rtol=1e-6)
        np.testing.assert_allclose(state.params["b"], -moved, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("options", [WAYS["fast"], WAYS["same bits"]], ids=["fast", "same bits"])
def test_with_skip_nonfinite(options):
    bad = BATCHES[0].copy()
    bad[0] = np.inf
    batches = [BATCHES[0], bad, BATCHES[2]]
    state, metrics = train(LIMIT, {**options, "skip_nonfinite": True}, batches=batches)
    w, b, _ = numpy_sgd(LIMIT, [BATCHES[0], BATCHES[2]])
    np.testing.assert_allclose(state.params["w"], w, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["b"], b, rtol=1e-5, atol=1e-6)
    assert int(state.step) == 3
    assert metrics["skipped"] == 0


@fast_every_day
def test_what_is_not_finite_is_not_hidden(options):
    """Lie: a norm of infinity makes every gradient zero, and the run looks fine."""
    bad = BATCHES[0].copy()
    bad[0] = np.inf
    state, _ = train(LIMIT, options, batches=[bad])
    assert not all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.params))


@fast_and_same_bits
def test_a_norm_of_zero_is_no_division_by_zero(options):
    state, _ = train(LIMIT, options, batches=[np.zeros((12, 5), np.float32)], params={
        "w": np.ones(5, np.float32), "b": np.float32(0)
    })  # fmt: skip
    np.testing.assert_array_equal(state.params["w"], np.ones(5))


@fast_every_day
def test_complex_parameters(options):
    """Lie: a move of the right length in another direction, as by a norm of the real part."""
    first, rows = np.complex64(3 + 4j), np.linspace(-1, 2, 12, dtype=np.float32)
    gradient = 2 * np.conj(first) * (rows**2).mean()  # of |p x|^2, as JAX has it
    step = mt.train_step(lambda p, x: jnp.abs(p * x) ** 2, optax.sgd(1.0), clip_norm=0.5, **options)
    state, _ = step(step.init(first), rows)
    np.testing.assert_allclose(state.params, first - 0.5 * gradient / np.abs(gradient), rtol=1e-5)


@pytest.mark.parametrize("wrong", [0, -1.0, True, "1", float("inf"), float("nan")])
def test_what_is_no_norm_is_refused(wrong):
    with pytest.raises(mt.ArgumentError, match=r"clip_norm=.* must be a number above 0"):
        mt.train_step(losses, optax.sgd(0.1), clip_norm=wrong)


@pytest.mark.parametrize("as_array", [jnp.float32, np.float32, np.asarray])
def test_the_norm_and_the_decay_may_be_arrays_of_one_number(as_array):
    found = []
    for of in (as_array, float):
        options = {"clip_norm": of(2.25), "ema_decay": of(0.5), "devices": 1}
        step = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), **options)
        found.append(step(step.init(np.float32(1)), np.full(2, 7, np.float32))[0])
    assert mt.fingerprint(found[0]) == mt.fingerprint(found[1])
    np.testing.assert_allclose(found[0].params, 1 - 0.1 * 2.25, rtol=1e-6)
    np.testing.assert_allclose(found[0].ema_params, 1 - 0.1 * 2.25 / 2, rtol=1e-6)


@pytest.mark.slow
def test_the_trainer_clips_too():
    def batches(first):
        return iter(BATCHES[first:])

    trainer = mt.Trainer(
        losses, optax.sgd(0.1, momentum=0.9), towers=4, devices=1, global_batch=12, clip_norm=LIMIT
    )
    state = trainer.fit(params_of(), batches, steps=3)
    np.testing.assert_allclose(state.params["w"], numpy_sgd(LIMIT)[0], rtol=1e-5, atol=1e-6)

"""Backward rules that are not linear: a tower differentiates its share of the mean over all rows.

The lie: a tower differentiates the mean over its own rows, whose cotangents are T times too large;
a rule that clips or rounds them then gives gradients that depend on the number of towers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from slow import slow_but_for

BOUND = 0.03  # between the cotangents of all rows, some of which are larger


@jax.custom_vjp
def clipped(x):
    return x


clipped.defvjp(lambda x: (x, None), lambda _, g: (jnp.clip(g, -BOUND, BOUND),))


@jax.custom_vjp
def rounded(x):
    return x


rounded.defvjp(lambda x: (x, None), lambda _, g: (jnp.round(g * 8) / 8,))

RULES = {"clipped": clipped, "rounded": rounded}


def loss_with(rule):
    def losses(w, x):
        return rule(x @ w) ** 2

    return losses


def rows(num_rows):
    return np.random.default_rng(3).normal(size=(num_rows, 3)).astype(np.float32)


W = np.array([0.5, -1.0, 2.0], np.float32)
WAYS = {
    "fast": {"devices": 3},
    "same bits": {"devices": 2, "towers": 4},
    "same bits, uneven": {"devices": 2, "towers": 3},
}


def expected(rule, x, w=W):
    """By hand: the rule is for the cotangents of `x @ w`, of which all rows' mean has these."""
    cotangents = 2 * (x @ w) / len(x)
    by_rule = {
        "clipped": np.clip(cotangents, -BOUND, BOUND),
        "rounded": np.round(cotangents * 8) / 8,
    }[rule]
    assert not np.allclose(by_rule @ x, cotangents @ x, rtol=0.02)  # the rule must bite
    return by_rule @ x


@pytest.mark.parametrize(
    ("rule", "way", "num_rows"),
    [
        ("clipped", "fast", 24),
        pytest.param("rounded", "fast", 22, marks=pytest.mark.slow),
        pytest.param("clipped", "same bits", 21, marks=pytest.mark.slow),
        ("rounded", "same bits", 24),
        ("clipped", "same bits, uneven", 22),
    ],
)
def test_gradients_are_those_of_the_mean_over_all_rows(rule, way, num_rows):
    x = rows(num_rows)
    value, gradients = mt.value_and_grad(loss_with(RULES[rule]), **WAYS[way])(W, x)
    np.testing.assert_allclose(gradients, expected(rule, x), rtol=1e-5)
    np.testing.assert_allclose(value, np.mean((x @ W) ** 2), rtol=1e-5)
    alone = mt.grad(loss_with(RULES[rule]), **WAYS[way])(W, x)
    np.testing.assert_array_equal(alone, gradients)


@pytest.mark.parametrize("way", slow_but_for(["same bits, uneven"], WAYS))
def test_gradients_of_a_scalar_loss(way):
    x = rows(24)
    scalar = lambda w, x: loss_with(rounded)(w, x).mean()
    gradients = mt.grad(scalar, **WAYS[way])(W, x)
    np.testing.assert_allclose(gradients, expected("rounded", x), rtol=1e-5)


@pytest.mark.parametrize("rule", ["clipped", pytest.param("rounded", marks=pytest.mark.slow)])
def test_inside_jit(rule):
    x = rows(21)
    gradients = jax.jit(mt.grad(loss_with(RULES[rule]), devices=2, towers=4))(W, x)
    np.testing.assert_allclose(gradients, expected(rule, x), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rule", "way", "sharded"),
    [
        ("clipped", "fast", False),
        ("rounded", "same bits", False),
        ("clipped", "same bits", True),
        ("clipped", "same bits, uneven", False),
        ("rounded", "same bits, uneven", True),
    ],
)
def test_a_training_step(rule, way, sharded):
    options = {**WAYS[way], "shard_update": sharded}
    step = mt.train_step(loss_with(RULES[rule]), optax.sgd(1.0), global_batch=24, **options)
    state = step.init(W)
    for num_rows in (24, 21):
        before = np.asarray(state.params)
        x = rows(num_rows)
        state, _ = step(state, x)
        found = before - np.asarray(state.params)
        np.testing.assert_allclose(found, expected(rule, x, before), rtol=1e-5, atol=2e-6)


@pytest.mark.slow
def test_a_scalar_loss_in_a_training_step():
    x = rows(24)
    for way in WAYS.values():
        step = mt.train_step(lambda w, x: loss_with(clipped)(w, x).mean(), optax.sgd(1.0), **way)
        state, _ = step(step.init(W), x)
        np.testing.assert_allclose(state.params, W - expected("clipped", x), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
def test_same_bits_on_any_number_of_devices(dtype):
    x, w = rows(21), W.astype(dtype)

    def losses(w, x):
        return clipped(x.astype(dtype) @ w) ** 2

    found = []
    for devices in (1, 2, 3):
        step = mt.train_step(losses, optax.sgd(0.1), devices=devices, towers=8)
        state, metrics = step(step.init(w), x)
        both = mt.value_and_grad(losses, devices=devices, towers=8)(w, x)
        found.append(mt.fingerprint((state, metrics, both)))
    assert len(set(found)) == 1


def test_a_16_bit_mean_does_not_overflow():
    """Lie: the sum over rows in the loss's own dtype, infinite where the mean is not."""
    x = np.full(64, 4096, np.float16)
    for way in ({"devices": 2}, WAYS["same bits"]):
        value, gradient = mt.value_and_grad(lambda w, x: w * x, **way)(np.float16(1), x)
        assert (value.item(), gradient.item()) == (4096, 4096)
        assert value.dtype == jnp.float16

"""Parameters and metrics of 16 or 8 bits: where they are kept, and added up, in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from linear_steps import RAGGED, losses, params_of
from multitower.steps.step import _widened


@pytest.mark.slow
def test_ema_of_16_bit_parameters_is_kept_in_32():
    step = mt.train_step(losses, optax.sgd(0.05), devices=1, towers=1, ema_decay=0.999)
    state = step.init(jax.tree.map(lambda p: np.asarray(p, jnp.bfloat16), params_of()))
    state, _ = step(state, RAGGED[0])
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.ema_params["w"].dtype == jnp.float32
    assert (np.asarray(state.ema_params["w"]) != np.asarray(state.params["w"], np.float32)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 2.0, "ema_decay": 0.9},
        {"shard_update": True},
        {"stages": 1},
        {"sync_every": 2},
    ],
)
def test_parameters_and_metrics_of_eight_bits(options):
    # The lie: they work in a plain step, and with these options a TypePromotionError of JAX comes
    # out of the library, because 8-bit floats have no common dtype with float32.
    def loss(params, x):
        small = params["small"].astype(jnp.float32)
        return (x @ params["w"] + small) ** 2, {"first": x[:, 0].astype(jnp.float8_e5m2)}

    first = {"w": jnp.ones(3), "small": jnp.float32(1).astype(jnp.float8_e4m3fn)}
    rows = np.full((7, 3), 0.5, np.float32)
    prints = set[str]()
    for devices in (1, 2):
        step = mt.train_step(loss, optax.sgd(0.1), towers=2, devices=devices, **options)
        state = step.init(first)
        for _ in range(2):
            state, metrics = step(state, rows)
        assert state.params["small"].dtype == jnp.float8_e4m3fn
        assert float(state.params["small"]) < 1
        assert float(metrics["first"]) == 0.5
        prints.add(mt.fingerprint((state, metrics)))
    assert len(prints) == 1


@pytest.mark.parametrize(
    "options",
    [{}, {"towers": 4}, pytest.param({"towers": 4, "shard_update": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_16_bit_parameters_train_as_by_hand(options):
    """Lie: the same bits everywhere, of a gradient that lost some. (All numbers here are exact.)"""
    step = mt.train_step(
        lambda w, x: w.astype(jnp.float32) * x,
        optax.sgd(0.125),
        devices=2,
        ema_decay=0.5,
        **options,
    )
    state = step.init(jnp.bfloat16(1))
    state, _ = step(state, np.arange(8, dtype=np.float32))  # a mean of 3.5
    state, metrics = step(state, np.array([1, 2, 3, 4, 5], np.float32))  # and of 3
    assert float(metrics["loss"]) == 0.5625 * 3
    assert float(state.params) == 1 - 0.125 * 3.5 - 0.125 * 3
    assert float(state.ema_params) == 0.5 * (0.5 * 1 + 0.5 * 0.5625) + 0.5 * 0.1875
    assert (state.params.dtype, state.ema_params.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"towers": 4}, {"towers": 4, "stages": 1}],
    ids=["fast", "same bits", "stages"],
)
def test_a_mean_in_float16_of_large_numbers(options):
    """Lie: the sum over towers, which float16 cannot hold, is float16 before it is a mean."""

    def loss(w, x, *, model_state):
        mean = (60000 * x).mean().astype(jnp.float16)
        return (w * x) ** 2, {"mean": mean}, mean + 0 * model_state

    step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
    state = step.init(jnp.float32(1), model_state=jnp.float16(0))
    state, metrics = step(state, np.ones(8, np.float32))
    assert state.model_state.dtype == jnp.float16
    assert (float(state.model_state), float(metrics["mean"])) == (60000, 60000)


def test_an_average_that_begins_as_16_bit_parameters_moves():
    """Lie: in bfloat16 a thousandth of the way is none, and the average stands still."""
    step = mt.train_step(lambda w, x: -w * x, optax.sgd(0.1), devices=2, ema_decay=0.999)
    state = step.init(jnp.bfloat16(1.4)).replace(ema_params=jnp.bfloat16(1.4))
    for _ in range(3):
        state, _ = step(state, np.ones(4, np.float32))
    assert state.ema_params.dtype == np.float32
    assert float(state.ema_params) > float(jnp.bfloat16(1.4))


def test_an_average_on_the_host_stays_there_until_it_is_placed():
    """Lie: widening leaves that are wide puts a model larger than a device on the first one."""
    on_host = np.ones(3, np.float32)
    assert _widened(on_host) is on_host
    assert isinstance(_widened(on_host.astype(jnp.bfloat16)), np.ndarray)

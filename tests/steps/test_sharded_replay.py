"""shard_update against NumPy in float64: the side that shares no code with it.

Compared with itself on other numbers of devices, an update that divides by the towers, counts the
average one step late or sorts leaves as text would agree with itself.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multitower as mt

NUM_LEAVES = 12  # more than ten: as text, [10] comes before [2]
RATE, BETA = 0.05, 0.9
BATCHES = [
    np.random.default_rng(rows).normal(size=(rows, NUM_LEAVES)).astype(np.float32)
    for rows in (12, 7, 1, 12)
]


def params_of():
    """Leaves of sizes that fill no block, each with values of its own."""
    rng = np.random.default_rng(0)
    return [rng.normal(size=(number + 1,)).astype(np.float32) for number in range(NUM_LEAVES)]


def losses(params, x):
    weights = jnp.stack([leaf.mean() for leaf in params])
    return (x @ weights - 1) ** 2


def decay(count):
    return count / (count + 1.0)  # 1/2 after the first update, 2/3 after the second


def replay(batches=BATCHES):
    """Parameters, momentum and moving average, step by step."""
    params = [leaf.astype(float) for leaf in params_of()]
    trace = [np.zeros_like(leaf) for leaf in params]
    average = [leaf.copy() for leaf in params]
    for count, batch in enumerate(batches, start=1):
        x = batch.astype(float)
        wrong = 2 * (x @ np.array([leaf.mean() for leaf in params]) - 1) / len(x)
        for number, leaf in enumerate(params):
            gradient = np.full_like(leaf, (wrong @ x[:, number]) / leaf.size)
            trace[number] = BETA * trace[number] + gradient
            leaf -= RATE * trace[number]
            average[number] += (1 - decay(count)) * (leaf - average[number])
    return params, trace, average


def make(devices=3, **options):
    return mt.train_step(
        losses, optax.sgd(RATE, momentum=BETA), devices=devices, towers=4, global_batch=12,
        ema_decay=decay, shard_update=True, **options,
    )  # fmt: skip


def assert_close(found, expected):
    assert len(found) == NUM_LEAVES
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-6, err_msg=f"leaf {number}")


@pytest.mark.slow
def test_ragged_batches_momentum_and_average():
    step = make(3)
    state = step.init(params_of())
    for number, batch in enumerate(BATCHES, start=1):
        state, metrics = step(state, batch)
        params, trace, average = replay(BATCHES[:number])
        assert_close(state.params, params)
        assert_close(state.opt_state[0].trace, trace)
        assert_close(state.ema_params, average)
    before = np.array([leaf.mean() for leaf in replay(BATCHES[:-1])[0]])
    np.testing.assert_allclose(metrics["loss"], ((BATCHES[-1] @ before - 1) ** 2).mean(), rtol=1e-4)


@pytest.mark.slow
def test_a_state_that_was_taken_apart_again_goes_on():
    """Lie: blocks that are cut in another order than they are joined."""
    step = make(3)
    state = step.init(params_of())
    for batch in BATCHES[:2]:
        state, _ = step(state, batch)
    other = make(2)
    state = jax.tree.map(jnp.asarray, state)  # whole, and no maker's any more
    for batch in BATCHES[2:]:
        state, _ = other(state, batch)
    params, trace, average = replay()
    assert_close(state.params, params)
    assert_close(state.opt_state[0].trace, trace)
    assert_close(state.ema_params, average)


@pytest.mark.slow
def test_a_batch_that_lies_on_two_devices():
    """Lie: a tower gets the first rows of the block that its rows are in."""
    mesh = Mesh(np.array(mt.devices(2)), ("rows",))
    batch = jax.device_put(BATCHES[0], NamedSharding(mesh, PartitionSpec("rows")))
    step = make(4)
    state, _ = step(step.init(params_of()), batch)
    assert_close(state.params, replay(BATCHES[:1])[0])


@pytest.mark.slow
def test_one_step_for_two_models():
    """Lies: the second model in the blocks of the first one; metrics that no sum can take."""
    step = mt.train_step(
        lambda w, x: ((w * x[:, None]) ** 2).sum(1), optax.sgd(0.1, momentum=0.9),
        devices=2, towers=2, shard_update=True, diagnostics=True,
    )  # fmt: skip
    for size, rows in ((3, np.ones(4, np.float32)), (6, np.ones(1, np.float32))):
        state, metrics = step(step.init(np.ones(size, np.float32)), rows)
        np.testing.assert_allclose(state.params, np.full(size, 0.8), rtol=1e-6)
        np.testing.assert_allclose(state.opt_state[0].trace, np.full(size, 2.0), rtol=1e-6)
        np.testing.assert_allclose(metrics["tower_losses"], [size, size * (len(rows) > 1)])
        assert int(state.step) == 1
        assert {one for value in metrics.values() for one in value.devices()} == {mt.devices(1)[0]}
    small = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), state.opt_state)
    with pytest.raises(mt.OutputError, match=r"opt_state\[0\].trace is bfloat16.* become float32"):
        step(state.replace(opt_state=small), rows)


PAYLOAD = np.uint32(0x7FC12345).view(np.float32)  # a NaN that is told from others


@pytest.mark.slow
def test_nans_are_made_equal_in_the_update():
    """Which of two NaNs an addition passes on is the compiler's choice: no bits may hang on it."""

    @jax.custom_vjp
    def spoilt(w):
        return w

    spoilt.defvjp(lambda w: (w, None), lambda _, g: (jnp.full_like(g, PAYLOAD),))
    for options in ({"shard_update": True}, {}):
        step = mt.train_step(
            lambda w, x: x * spoilt(w).sum(), optax.sgd(1.0), devices=2, towers=4, **options
        )
        state, _ = step(step.init(np.ones(6, np.float32)), np.ones(8, np.float32))
        bits = np.asarray(state.params).view(np.uint32)
        np.testing.assert_array_equal(bits & 0x7FFFFFFF, 0x7FC00000)

"""What a step is given: batches on the host and on devices, keys, numbers, buffers that change."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from linear_steps import (
    RAGGED,
    batch_of,
    both_ways,
    fast_every_day,
    losses,
    params_of,
    same_bits_every_day,
    train,
    where,
)
from tower_keys import tower_key
from trees import Pair, assert_close


@same_bits_every_day
def test_what_is_given_to_init_is_never_overwritten(towers):
    """Lie: the first step deletes the user's own parameters."""
    momentum = optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(losses, momentum, devices=1, towers=towers and 1, ema_decay=0.9)
    params = jax.tree.map(jnp.asarray, params_of())
    for _ in range(2):
        state = step.init(params)
        state, _ = step(state, RAGGED[0])
    assert_close(params, params_of())
    np.testing.assert_array_equal(params["w"], params_of()["w"])


def test_trap_parameters_that_change_right_after_init():
    """JAX copies late, and an array of JAX may lie in NumPy's memory."""
    for _ in range(8):
        weights = np.ones((1024, 1024), np.float32)
        params = jax.device_put(weights, may_alias=True)
        state = mt.train_step(losses, optax.sgd(0.1), devices=1).init({"w": params})
        weights[:] = 7
        assert float(state.params["w"].max()) == 1


@both_ways
def test_trap_a_batch_that_changes_after_shard(towers):
    """JAX goes on reading the host's memory; see test_feeding."""
    batch = batch_of(8)
    expected = batch["x"].copy()
    placed = mt.shard(batch, devices=2, towers=towers)
    for leaf in batch.values():
        leaf[:] = np.nan
    np.testing.assert_array_equal(np.asarray(placed["x"]), expected)


@same_bits_every_day
def test_trap_a_host_batch_that_changes_right_after_the_step(towers):
    """Steps are asynchronous; a loader that reuses its buffer would corrupt them."""
    step = mt.train_step(losses, optax.sgd(0.01), **where(towers))
    buffer = batch_of(400)
    state = step.init(params_of())
    found = []
    for seed in range(3):
        for name, rows in batch_of(400, seed).items():
            buffer[name][:] = rows
        state, metrics = step(state, buffer)
        for rows in buffer.values():
            rows[:] = np.nan
        found.append(metrics["loss"])
    assert np.isfinite([float(value) for value in found]).all()


@same_bits_every_day
def test_sharded_batches_give_the_same_as_host_batches(towers):
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=towers, global_batch=12)

    def run(prepare):
        state, history = train(step, step.init(params_of()), map(prepare, RAGGED))
        return mt.fingerprint((state, history))

    options = dict(devices=2, towers=towers, global_batch=12)
    plain = run(lambda batch: batch)
    assert run(lambda batch: mt.shard(batch, **options)) == plain
    ready = iter(mt.prefetch(RAGGED, **options))
    assert run(lambda batch: next(ready)) == plain


@fast_every_day
def test_dataclasses_that_check_their_arrays(towers):
    """Lie: kinds of leaves, or shardings, are put where a user's class expects arrays."""

    def loss(params, batch, *, model_state):
        new = Pair(model_state.x + batch.x.mean(), model_state.y)
        return (params.x * batch.x - params.y * batch.y) ** 2, {}, new

    pair = lambda: Pair(jnp.float32(1), jnp.float32(2))
    rows = np.arange(8, dtype=np.float32)
    step = mt.train_step(loss, optax.sgd(0.01), devices=2, towers=towers)
    state = step.init(pair(), model_state=pair())
    state, metrics = step(state, Pair(rows, rows))
    assert_close((metrics["loss"], state.model_state.x), ((rows**2).mean(), 1 + rows.mean()))


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4])
def test_rows_of_typed_keys(towers):
    """Also when they were cut for other devices."""

    def losses(w, batch):
        return w * jax.vmap(jax.random.uniform)(batch["key"]) * batch["x"]

    keys = jax.random.split(jax.random.key(0), 8)
    batch = {"key": keys, "x": np.arange(1, 9, dtype=np.float32)}  # other rows' keys would show
    expected = jax.jit(jax.grad(lambda w: losses(w, batch).mean()))(1.0)
    step = mt.train_step(losses, optax.sgd(1.0), towers=towers, devices=2)
    given = [batch]
    if towers:
        given += [mt.shard(batch, towers=towers, devices=d) for d in (1, 3)]
    for rows in given:
        state, _ = step(step.init(np.float32(1)), rows)
        np.testing.assert_allclose(state.params, 1 - expected, rtol=1e-5)


@pytest.mark.slow
def test_values_in_a_batch_that_are_no_rows():
    """Python numbers, 0-d arrays and keys in a batch: whole on every tower, keys folded.

    Lie: the number of the first step for ever, or one key for all; alike on all devices.
    """

    def loss(params, batch):
        draw = jax.random.uniform(batch["key"], ())
        return losses(params, batch) * batch["factor"] + draw, {"draw": draw * jnp.ones(4)}

    found = []
    for devices in (1, 2):
        step = mt.train_step(loss, optax.sgd(0.1), devices=devices, towers=4)
        state = step.init(params_of())
        for number in range(2):
            extra = {"factor": 0.5 + number, "key": jax.random.key(number)}
            before = jax.tree.map(np.asarray, state.params)
            state, metrics = step(state, batch_of(8) | extra)
        found.append(mt.fingerprint((state, metrics)))
    assert found[0] == found[1]
    keys = [tower_key(jax.random.key(1), tower) for tower in range(4)]
    draw = np.mean([jax.random.uniform(key, ()) for key in keys])
    assert_close(metrics["draw"], np.full(4, draw))
    assert_close(metrics["loss"], 1.5 * losses(before, batch_of(8)).mean() + draw)

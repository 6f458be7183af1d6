"""Flax Linen: TrainState, batch_stats, dropout; the loss closes over the state, as in its docs.

The reference runs every tower by hand, with JAX alone.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import multitower as mt
from first_weights import spread_in_flax
from tower_keys import tower_key
from trees import assert_close

# The statistics of a tower's own rows are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*with statistics of their own tower's rows")

X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)  # two batches of 16 rows


class Net(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        x = nn.Dense(6, use_bias=False, kernel_init=spread_in_flax)(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.5)(x)
        x = nn.Dropout(0.5, deterministic=not train)(jnp.tanh(x))
        return nn.Dense(1, use_bias=False, kernel_init=spread_in_flax)(x)[:, 0]


@jax.jit
def first_variables():
    return Net().init(jax.random.key(0), X[0], train=False)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: Any


def train(value_and_grad, jit, make_key=jax.random.key):
    """The documented loop, with the batch and the key as arguments of the loss."""
    net = Net()
    variables = first_variables()
    state = TrainState.create(apply_fn=net.apply, tx=optax.sgd(0.1), key=make_key(1), **variables)

    def train_step(state, x):
        def loss_fn(params, x, key):
            y, updates = state.apply_fn(
                {"params": params, "batch_stats": state.batch_stats},
                x,
                train=True,
                rngs={"dropout": key},
                mutable=["batch_stats"],
            )
            return jnp.mean((y - x.sum(-1)) ** 2), (y, updates)

        key = jax.random.fold_in(state.key, state.step)
        run = value_and_grad(loss_fn, has_aux=True)
        (_, (y, updates)), grads = run(state.params, x, key)
        return state.apply_gradients(grads=grads, batch_stats=updates["batch_stats"]), y

    train_step = jax.jit(train_step) if jit else train_step
    for x in X:
        state, y = train_step(state, x)
    return state.params, state.batch_stats, y


def towers_by_hand(num_towers):
    """jax.value_and_grad, tower by tower: own rows, own keys, everything averaged."""

    def value_and_grad(fun, has_aux):
        def run(params, x, key):
            one = jax.value_and_grad(fun, has_aux=has_aux)
            towers = [
                one(params, rows, tower_key(key, tower))
                for tower, rows in enumerate(jnp.split(x, num_towers))
            ]
            ys = [y for (_, (y, _)), _ in towers]
            mean = jax.tree.map(
                lambda *leaves: sum(leaves) / num_towers,
                *[(loss, updates, grads) for (loss, (_, updates)), grads in towers],
            )
            loss, updates, grads = mean
            return (loss, (jnp.concatenate(ys), updates)), grads

        return run

    return value_and_grad


@pytest.fixture(scope="module")
def two_towers():
    return train(towers_by_hand(2), jit=True)


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_law_l2_dropout_and_batch_norm_as_by_hand(two_towers, make_key):
    """Lie: half a legacy key for each tower; one mask for all; statistics of one tower only."""
    found = train(lambda f, **kw: mt.value_and_grad(f, devices=2, **kw), True, make_key)
    assert_close(found, two_towers)  # both kinds of keys give the same numbers


@pytest.mark.slow
def test_a_loss_of_the_parameters_alone():
    """As in Flax's own examples: `loss_fn(params)`, around the batch, the state and the key."""
    net = nn.Dense(2)
    params = jax.jit(net.init)(jax.random.key(0), X[0])
    state = train_state.TrainState.create(apply_fn=net.apply, params=params, tx=optax.sgd(0.1))

    def train_step(value_and_grad, state, x, y, key):
        def loss_fn(params):
            noise = jax.random.normal(key, (2,))
            return optax.l2_loss(state.apply_fn(params, x), y).mean(), noise

        (loss, noise), grads = value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads).params, loss, noise

    def parallel(fun, **options):
        return mt.value_and_grad(fun, in_axes={"x": 0, "y": 0}, devices=2, **options)

    key = jax.random.PRNGKey(0)
    run = jax.jit(train_step, static_argnums=0)
    *expected, noise = run(jax.value_and_grad, state, X[0], X[1][:, :2], key)
    *found, own_noise = run(parallel, state, X[0], X[1][:, :2], key)
    assert_close(found, expected)
    assert (noise != own_noise).all()  # the mean over two towers with noise of their own


@pytest.mark.slow
def test_law_l3_same_bits_without_jit(two_towers):
    """The loss is a new function at every step, around another state."""
    one, two = (
        train(lambda f, d=d, **kw: mt.value_and_grad(f, devices=d, towers=2, **kw), jit=False)
        for d in (1, 2)
    )
    assert mt.fingerprint(one) == mt.fingerprint(two)
    assert_close(one, two_towers)


def test_train_step_takes_params_and_batch_stats(two_towers):
    """The whole step: batch_stats are model state. Lie: the same on all devices, and wrong."""
    net = Net()

    def losses(params, x, *, rng, model_state):
        variables = {"params": params, "batch_stats": model_state}
        y, updates = net.apply(
            variables, x, train=True, rngs={"dropout": rng}, mutable=["batch_stats"]
        )
        return (y - x.sum(-1)) ** 2, {}, updates["batch_stats"]

    variables = first_variables()
    step = mt.train_step(losses, optax.sgd(0.1), devices=1, towers=2)
    state = step.init(
        variables["params"], model_state=variables["batch_stats"], rng=jax.random.key(1)
    )
    for x in X:
        state, _ = step(state, x)
    assert_close((state.params, state.model_state), two_towers[:2], rtol=1e-4, atol=1e-5)

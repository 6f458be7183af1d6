"""Haiku: `transform_with_state`, whose state counts, and keys of `hk.PRNGSequence`.

The reference runs every tower by hand, with JAX alone.
"""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from first_weights import spread
from tower_keys import tower_key
from trees import assert_close

# The statistics of a tower's own rows are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*with statistics of their own tower's rows")

X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)  # two batches of 16 rows


def forward(x):
    x = hk.Linear(6, with_bias=False, w_init=spread)(x)
    x = hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.5)(x, is_training=True)
    x = hk.dropout(hk.next_rng_key(), 0.5, jnp.tanh(x))
    return hk.Linear(1, with_bias=False, w_init=spread)(x)[:, 0]


NET = hk.transform_with_state(forward)


def loss_fn(params, state, key, x):
    y, state = NET.apply(params, state, key, x)
    return jnp.mean((y - x.sum(-1)) ** 2), state


def train(value_and_grad, jit):
    """The documented loop; in_axes says what every tower gets whole."""
    optimizer = optax.sgd(0.1)

    def train_step(params, state, opt_state, key, x):
        run = value_and_grad(loss_fn, has_aux=True)
        (_, state), grads = run(params, state, key, x)
        updates, opt_state = optimizer.update(grads, opt_state)
        return optax.apply_updates(params, updates), state, opt_state

    train_step = jax.jit(train_step) if jit else train_step
    keys = hk.PRNGSequence(0)  # legacy keys: uint32, shape (2,)
    params, state = jax.jit(NET.init)(next(keys), X[0])
    opt_state = optimizer.init(params)
    for x in X:
        params, state, opt_state = train_step(params, state, opt_state, next(keys), x)
    return params, state


def towers_by_hand(num_towers):
    """jax.value_and_grad, tower by tower: own rows, own keys, everything averaged."""

    def value_and_grad(fun, has_aux):
        def run(params, state, key, x):
            one = jax.value_and_grad(fun, has_aux=has_aux)
            towers = [
                one(params, state, tower_key(key, tower), rows)
                for tower, rows in enumerate(jnp.split(x, num_towers))
            ]
            mean = lambda *leaves: (sum(leaves) / num_towers).astype(leaves[0].dtype)
            return jax.tree.map(mean, *towers)

        return run

    return value_and_grad


def parallel(devices, towers=None):
    return lambda fun, has_aux: mt.value_and_grad(
        fun, has_aux=has_aux, in_axes=(None, None, 0, 0), devices=devices, towers=towers
    )


@pytest.fixture(scope="module")
def two_towers():
    return train(towers_by_hand(2), jit=True)


@pytest.mark.slow
def test_law_l2_dropout_and_batch_norm_as_by_hand(two_towers):
    """Lie: half a key for each tower, a counter that counts towers or is an error."""
    assert_close(train(parallel(2), jit=True), two_towers)


@pytest.mark.slow
def test_law_l3_same_bits(two_towers):
    one, two = (train(parallel(devices, towers=2), jit=False) for devices in (1, 2))
    assert mt.fingerprint(one) == mt.fingerprint(two)
    assert_close(one, two_towers)


def test_train_step_takes_the_state():
    """The whole step: Haiku's state is model state, and its counters are those of one device.

    Lie: one mask for all towers, or statistics of one of them: no counter would show it.
    """

    def losses(params, x, *, rng, model_state):
        y, state = NET.apply(params, model_state, rng, x)
        return (y - x.sum(-1)) ** 2, {}, state

    params, model_state = jax.jit(NET.init)(jax.random.key(0), X[0])
    step = mt.train_step(losses, optax.sgd(0.1), devices=2)
    state = step.init(params, model_state=model_state, rng=jax.random.key(1))
    for x in X:
        state, _ = step(state, x)
    counters = [x for x in jax.tree.leaves(state.model_state) if x.dtype == jnp.int32]
    assert counters
    assert all(counter == 2 for counter in counters)
    run = jax.jit(towers_by_hand(2)(loss_fn, has_aux=True))
    for number, x in enumerate(X):
        key = jax.random.fold_in(jax.random.key(1), number)
        (_, model_state), gradients = run(params, model_state, key, x)
        params = jax.tree.map(
            lambda p, g: np.asarray(p) - np.float32(0.1) * np.asarray(g), params, gradients
        )
    assert_close((state.params, state.model_state), (params, model_state))

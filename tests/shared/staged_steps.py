"""Steps of a model in stages, and the same training without stages beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 8, 4)).astype(np.float32)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(3)]


def losses(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch**2).sum(1)


def make(loss=losses, optimizer=None, stages=3, devices=3, towers=4, **options):
    return mt.train_step(
        loss,
        optimizer or optax.adam(0.05),
        devices=devices,
        towers=towers,
        stages=stages,
        **options,
    )


def train(step, params=WEIGHTS, batches=X, **extras):
    state = step.init(params, **extras)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def check(
    loss=losses, optimizer=None, params=WEIGHTS, batches=X, extras=None, rtol=2e-4, **options
):
    """The same training with and without stages; returns what the one with stages gave."""
    found = train(make(loss, optimizer, **options), params, batches, **(extras or {}))
    options["stages"] = None
    expected = train(make(loss, optimizer, **options), params, batches, **(extras or {}))
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for (path, a), b in zip(flat, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 50, err_msg=name)
    return found

"""A model in stages whose towers meet: in the last stage, in every stage, and several times in one.

The references: the same step without stages, and a loop of optax on one device, with the loss of
the whole batch, which needs no towers.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import OutputError

RNG = np.random.default_rng(0)
ROWS = RNG.normal(size=(3, 8, 4)).astype(np.float32)
BATCHES = RNG.normal(size=(3, 10, 4)).astype(np.float32)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(3)]


def contrastive(params, batch):
    """InfoNCE over the rows of all towers: it meets in the last stage alone."""
    h = batch
    for w in params:
        h = mt.cut(h + jnp.tanh(h @ w))
    h = h / jnp.linalg.norm(h, axis=1, keepdims=True)
    rows = mt.row_index(h)
    similar = h @ mt.all_rows(h).T / 0.1
    return jax.nn.logsumexp(similar, axis=1) - similar[jnp.arange(len(rows)), rows ^ 1]


def normalized(params, batch):
    """Synchronised BatchNorm in front of every layer: it meets in every stage, twice."""
    h = batch
    for w in params:
        mean = _mean(h)
        variance = _mean((h - mean) ** 2)
        h = mt.cut(h + jnp.tanh((h - mean) / jnp.sqrt(variance + 1e-3) @ w))
    return (h**2).sum(1), {"largest": _largest(jax.lax.stop_gradient(h))}


def _mean(h):
    return _everywhere(jax.lax.pmean, h.mean(0))


def _largest(h):
    return _everywhere(jax.lax.pmax, h.max())


def _everywhere(collective, value):
    try:
        return collective(value, "towers")
    except NameError:  # outside of towers
        return value


def make(loss, optimizer=None, **options):
    given = {"towers": 4, "stages": 2, "devices": 1, **options}
    return mt.train_step(loss, optimizer or optax.adam(0.05), **given)


def train(step, params=WEIGHTS, batches=ROWS):
    state = step.init(params)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def close(found, expected, rtol=2e-4):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 50)


def by_hand(loss, params=WEIGHTS, batches=ROWS):
    """The training of the whole batch on one device."""
    optimizer = optax.adam(0.05)
    opt_state = optimizer.init(params)
    mean = lambda params, batch: jnp.mean(jax.tree.leaves(loss(params, batch))[0])
    for batch in batches:
        gradients = jax.grad(mean)(params, batch)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    return params


@pytest.mark.parametrize("loss", [contrastive, normalized])
def test_it_is_the_training_of_the_whole_batch(loss):
    # The lies: a negative of another tower that gets no gradient, a mean of means.
    one = train(make(loss))
    close(one[0].params, by_hand(loss))
    assert mt.fingerprint(train(make(loss, devices=2))) == mt.fingerprint(one)


@pytest.mark.slow
@pytest.mark.parametrize("loss", [contrastive, normalized])
@pytest.mark.parametrize("stages", [1, 2, 3])
def test_law_l3_on_any_layout(loss, stages):
    # The lies: totals added in the order in which replicas are done; a replica that gets none.
    expected = train(make(loss, stages=None, towers=5), batches=BATCHES)
    one = train(make(loss, stages=stages, towers=5), batches=BATCHES)
    close(one, expected)
    layouts = [(2, {"layout": (2, 1)}), (4, {"layout": (2, min(stages, 2)), "interleave": True})]
    for devices, options in [*layouts, (stages, {}), (1, {"remat": False})]:
        step = make(loss, stages=stages, towers=5, devices=devices, **options)
        found = train(step, batches=BATCHES)
        if options == {"remat": False}:
            close(found, one)
        else:
            assert mt.fingerprint(found) == mt.fingerprint(one), (devices, options)

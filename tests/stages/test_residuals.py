"""Stages that keep what their backward pass needs: how much that is, and that it is enough."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core

import multitower as mt
from multitower.stages.chain import make_chain, shapes_of
from multitower.stages.passes.residuals import keep_residuals

PARAMS = [
    np.linspace(-1, 1, 16, dtype=np.float32).reshape(4, 4),
    np.linspace(0, 1, 16, dtype=np.float32).reshape(4, 4),
    np.arange(4, dtype=np.float32),
]
ROWS = np.sin(np.arange(12, dtype=np.float32)).reshape(3, 4)


def loss(first, second, scale, rows, *_):
    h = jnp.tanh(rows @ (2 * jnp.tanh(first)))
    h = mt.cut(jnp.exp(h * scale) * np.float32([1, 2, 3, 4]))
    return (jnp.tanh(h @ second) ** 2).sum(), h.mean()


def num_of_each(fn, *args):
    """How often every kind of equation comes, however deep."""
    found = Counter()

    def descend(jaxpr):
        for equation in jaxpr.eqns:
            found[equation.primitive.name] += 1
            for inner in core.jaxprs_in_params(equation.params):
                descend(inner)

    descend(jax.make_jaxpr(fn)(*args).jaxpr)
    return found


@pytest.fixture(scope="module")
def stage():
    """The first of two stages, and its chain."""
    chain = make_chain(jax.make_jaxpr(loss)(*PARAMS, ROWS), len(PARAMS), 2)
    return chain.stages[0], chain


def test_what_is_kept_is_enough_and_nothing_is_computed_again(stage):
    # The lie: "kept", and the forward pass is in the backward program all the same.
    stage, chain = stage
    kept = keep_residuals(stage, shapes_of(chain.avals, stage.inputs), chain.params)
    given = dict(zip(chain.inputs, [*PARAMS, ROWS], strict=True))
    values = [given[number] for number in stage.inputs]
    made = kept.forward(values)
    for found, expected in zip(made, stage.forward(values), strict=False):
        np.testing.assert_array_equal(found, expected)
    held, cotangents = kept.take(values, made), [[jnp.ones((3, 4))]]
    assert [(x.shape, x.dtype) for x in kept.shapes] == [(x.shape, x.dtype) for x in held]
    backward = lambda held: kept.backward(held, cotangents, chain.params)
    found, expected = backward(held), stage.backward(values, cotangents, chain.params)
    assert found.gradients.keys() == expected.gradients.keys()
    assert found.results.keys() == expected.results.keys()
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)
    again = num_of_each(lambda *v: stage.backward(v, cotangents, chain.params), *values)
    once = num_of_each(backward, held)
    assert (again["exp"], once["exp"]) == (1, 0)
    assert again["dot_general"] - once["dot_general"] == 1
    assert once["tanh"] == 1  # of a parameter


def test_what_depends_on_parameters_alone_is_not_kept_for_every_tower(stage):
    # The lie: a copy of the weights for each tower that is on its way.
    stage, chain = stage
    kept = keep_residuals(stage, shapes_of(chain.avals, stage.inputs), chain.params)
    of_tower = [
        (name, shape.shape)
        for name, shape in zip(kept.names, kept.shapes, strict=True)
        if name not in chain.params
    ]
    assert {shape for _, shape in of_tower} <= {(3, 4), ()}
    assert sum(name == chain.inputs[3] for name, _ in of_tower) == 1  # the rows, as they arrived
    assert len(kept.forward.outputs) == len(set(kept.forward.outputs))

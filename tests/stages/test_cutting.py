"""Which step belongs to which stage: a function of the traced program alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multitower.engines.segments import is_call
from multitower.errors import ArgumentError
from multitower.stages.chain import make_chain
from multitower.stages.marks import cut
from multitower.stages.work import work_of

X = np.ones((5, 4), np.float32)


def weights(*dims):
    return [np.ones(dims[i : i + 2], np.float32) for i in range(len(dims) - 1)]


def chain_of(loss, params, stages, x=X):
    """The stages of a loss, each of which has what it needs when its turn comes."""
    tower = lambda *leaves: loss(leaves[:-1], leaves[-1])
    chain = make_chain(jax.make_jaxpr(tower)(*params, x), len(params), stages)
    known = {*chain.inputs}
    for stage in chain.stages:
        assert known >= {*stage.inputs}
        known.update(stage.sent)
    return chain


def shapes_sent(chain):
    return [[chain.avals[n].shape for n in stage.sent] for stage in chain.stages]


def in_turn(params, x):
    for w in params:
        x = jnp.tanh(x @ w)
    return x.sum()


@pytest.mark.parametrize("dims", [(4, 8, 2, 8, 4), (4, 8, 2, 8, 8)])
def test_a_model_is_cut_where_few_bytes_cross(dims):
    # The lies: equal work on both sides, and the widest activations sent; or these before tanh.
    chain = chain_of(in_turn, weights(*dims), 2)
    assert shapes_sent(chain) == [[(5, 2)], []]


def test_leaves_that_are_cut_together_are_of_one_stage():
    # The lie: the stage of the first leaf, so that another one is sent before it is made.
    def loss(params, x):
        early = cut(x @ params[0])
        x, late = cut((x, early @ params[1]))
        return (late @ params[2] + x).sum()

    assert chain_of(loss, weights(4, 4, 4, 4), 3).homes == (0, 1, 2)


def test_a_mark_on_a_constant_is_of_the_first_stage():
    def loss(params, x):
        return (cut(jnp.float32(2.0)) * cut(x @ params[0]) @ params[1]).sum()

    assert chain_of(loss, weights(4, 4, 4), 2).homes == (0, 1)


def test_what_no_product_needs_is_made_in_the_first_stage_that_uses_it():
    # The lie: in the stage of the use that the program has first.
    def loss(params, x):
        table = jnp.sin(params[2])
        late = cut(x @ params[0]) * table
        return ((late + cut(x * table)) @ params[1]).sum()

    assert chain_of(loss, [*weights(4, 4, 4), np.ones(4, np.float32)], 2).homes == (0, 1, 0)


def test_a_weight_that_is_cast_and_turned_is_sent_as_it_is():
    # The lie: every cast or transposed copy of a weight sent to the next stage, for every tower.
    def loss(params, x):
        w = params[0].T.astype(jnp.float32)
        return (cut(x @ w) @ w).sum()

    chain = chain_of(loss, [np.ones((4, 4), np.float16)], 2)
    assert shapes_sent(chain) == [[(5, 4)], []]
    assert chain.users(chain.inputs[0]) == [0, 1]


@pytest.mark.parametrize(("layers", "num_calls"), [(2, 3), (6, 0)])
def test_a_checkpoint_is_opened_if_it_is_larger_than_a_stage(layers, num_calls):
    # The lies: a part of a checkpoint in every stage that the user meant for one; no cut at all.
    def loss(params, x):
        for at in range(0, 6, layers):
            part = lambda p, x: functools.reduce(lambda h, w: jnp.tanh(h @ w), p, x)
            x = jax.checkpoint(part)(params[at : at + layers], x)
        return x.sum()

    chain = chain_of(loss, weights(*[4] * 7), 3)
    steps = [step for stage in chain.stages for step in stage.segment.steps]
    assert sum(is_call(step.equation) for step in steps) == num_calls
    assert chain.homes == (0, 0, 1, 1, 2, 2)


@pytest.mark.parametrize(
    ("dims", "said"),
    [((4, 4, 4, 400), "has 3 equations .* 87 %"), ((4, 4, 4), "has 2 equations")],
    ids=["one has most of the work", "fewer than stages"],
)
def test_products_that_do_not_make_stages_of_equal_work_are_refused(dims, said):
    with pytest.raises(ArgumentError, match=said):
        chain_of(in_turn, weights(*dims), 3)


IMAGES = np.ones((2, 6, 6, 3), np.float32)
KERNEL = np.ones((3, 3, 3, 8), np.float32)
CHANNELS = ("NHWC", "HWIO", "NHWC")


@pytest.mark.parametrize(
    ("fn", "work"),
    [
        (lambda x: x.T @ x, 2 * 4 * 4 * 5),
        (jnp.tanh, 20),
        (lambda x: jax.lax.scan(lambda h, _: (h * h, None), x, None, length=7)[0], 7 * 20),
        (lambda x: jax.lax.switch(2, [jnp.sin, lambda x: jnp.sin(jnp.cos(x)), jnp.cos], x), 40),
        (
            lambda _: jax.lax.conv_general_dilated(
                IMAGES, KERNEL, (1, 1), "VALID", dimension_numbers=CHANNELS
            ),
            2 * (2 * 4 * 4 * 8) * (3 * 3 * 3),
        ),
    ],
    ids=["product", "elements", "loop", "branches", "convolution"],
)
def test_the_work_of_an_equation_is_that_of_its_operations(fn, work):
    # The lies: a loop that counts once, all branches that count, a kernel that counts in part.
    assert max(map(work_of, jax.make_jaxpr(fn)(X).eqns)) == work

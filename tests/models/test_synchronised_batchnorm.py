"""BatchNorm over the rows of all towers: `axis_name="towers"` of every framework.

The lies: statistics of a tower's rows alone; a variance that is a mean of variances; gradients
that do not know of the other towers' rows (torchgpipe#35).
"""

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import multitower as mt
from first_weights import spread_in_flax

ROWS, COLUMNS, TOWERS = 16, 3, 4
X = np.random.default_rng(0).normal(size=(ROWS, COLUMNS)).astype(np.float32)
X *= np.arange(1, 1 + ROWS)[:, None] / 8  # the towers' own statistics are far apart
Y = X.sum(1)
WAYS = {"fast": {"devices": 4}, "same bits": {"devices": 1, "towers": TOWERS}}
# Exchanges with the same bits know no framework: of one they are tried every day.
same_bits_every_day = pytest.mark.parametrize(
    "way", [pytest.param("fast", marks=pytest.mark.slow), "same bits"]
)
fast_every_day = pytest.mark.parametrize(
    "way", ["fast", pytest.param("same bits", marks=pytest.mark.slow)]
)


def assert_close(found, wanted):
    def compare(a, b):
        size = np.abs(b).max(initial=1.0)  # rounding is that of the largest number
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5 * size)

    jax.tree.map(compare, found, wanted)


class NNXNet(nnx.Module):
    def __init__(self, axis_name):
        rngs = nnx.Rngs(0)
        self.first = nnx.Linear(COLUMNS, 4, kernel_init=spread_in_flax, rngs=rngs)
        self.norm = nnx.BatchNorm(4, axis_name=axis_name, rngs=rngs)

    def __call__(self, x):
        return self.norm(jnp.tanh(self.first(x))) @ np.arange(4, dtype=np.float32)


@same_bits_every_day
def test_flax_nnx(way):
    def loss(net, x, y):
        return (net(x) - y) ** 2

    whole = NNXNet(None)
    wanted = nnx.jit(nnx.grad(lambda net, x, y: loss(net, x, y).mean()))(whole, X, Y)
    net = NNXNet("towers")
    found = mt.grad(loss, **WAYS[way])(net, X, Y)
    assert_close(jax.tree.leaves(found), jax.tree.leaves(wanted))
    assert_close(net.norm.mean[...], whole.norm.mean[...])
    assert_close(net.norm.var[...], whole.norm.var[...])


class LinenNet(linen.Module):
    axis_name: str | None = None

    @linen.compact
    def __call__(self, x):
        x = jnp.tanh(linen.Dense(4)(x))
        x = linen.BatchNorm(use_running_average=False, axis_name=self.axis_name)(x)
        return x @ jnp.arange(4.0)


def stepped(way, loss, params, model_state):
    """The state after one step, for a loss(params, batch, model_state)."""
    step = mt.train_step(loss, optax.sgd(0.1), **WAYS[way])
    state, _ = step(step.init(params, model_state=model_state), (X, Y))
    return state


@pytest.mark.slow
@fast_every_day
def test_flax_linen(way):
    def loss_of(net):
        def loss(params, batch, *, model_state):
            x, y = batch
            out, new = net.apply(
                {"params": params, "batch_stats": model_state}, x, mutable=["batch_stats"]
            )
            return (out - y) ** 2, {}, new["batch_stats"]

        return loss

    variables = LinenNet().init(jax.random.key(0), X)
    params, statistics = variables["params"], variables["batch_stats"]

    def whole(params):
        losses, _, new = loss_of(LinenNet())(params, (X, Y), model_state=statistics)
        return losses.mean(), new

    gradients, after = jax.grad(whole, has_aux=True)(params)
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    state = stepped(way, loss_of(LinenNet("towers")), params, statistics)
    assert_close(state.params, wanted)
    assert_close(state.model_state, after)


@pytest.mark.slow
@fast_every_day
def test_haiku(way):
    def net_of(axis):
        def net(x):
            x = jnp.tanh(hk.Linear(4)(x))
            norm = hk.BatchNorm(
                create_scale=True, create_offset=True, decay_rate=0.9, cross_replica_axis=axis
            )
            return norm(x, is_training=True) @ jnp.arange(4.0)

        return hk.transform_with_state(net)

    def loss_of(axis):
        def loss(params, batch, *, model_state):
            out, new = net_of(axis).apply(params, model_state, None, batch[0])
            return (out - batch[1]) ** 2, {}, new

        return loss

    params, statistics = net_of(None).init(jax.random.key(0), X)

    def whole(params):
        losses, _, new = loss_of(None)(params, (X, Y), model_state=statistics)
        return losses.mean(), new

    gradients, after = jax.grad(whole, has_aux=True)(params)
    wanted = jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients)
    state = stepped(way, loss_of("towers"), params, statistics)
    assert_close(state.params, wanted)
    assert_close(state.model_state, after)


class EquinoxNet(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm

    def __init__(self, axis_name):
        self.first = eqx.nn.Linear(COLUMNS, 4, key=jax.random.key(0))
        self.norm = eqx.nn.BatchNorm(4, axis_name=axis_name, mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(jnp.tanh(self.first(x)), state)
        return x @ jnp.arange(4.0), state


@pytest.mark.slow
@fast_every_day
def test_equinox(way):
    """A vmap over the rows of a tower, and the axis of towers beside its own."""

    def loss(net, state, x, y):
        run = jax.vmap(net, in_axes=(0, None), out_axes=(0, None), axis_name="rows")
        out, state = run(x, state)
        return (out - y) ** 2, state

    whole, first = eqx.nn.make_with_state(EquinoxNet)("rows")

    @eqx.filter_grad(has_aux=True)
    def gradient(net):
        losses, state = loss(net, first, X, Y)
        return losses.mean(), state

    wanted, after = gradient(whole)
    net, state = eqx.nn.make_with_state(EquinoxNet)(("rows", "towers"))
    run = mt.grad(loss, has_aux=True, in_axes=(None, None, 0, 0), **WAYS[way])
    found, found_after = run(net, state, X, Y)
    floats = lambda tree: jax.tree.leaves(eqx.filter(tree, eqx.is_inexact_array))
    assert_close(floats(found), floats(wanted))
    assert_close(floats(found_after), floats(after))

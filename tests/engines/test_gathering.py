"""Parameters in shards: the same values and gradients, gathered where they are used and no more."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend import core
from jax.sharding import PartitionSpec

import multitower as mt
from multitower.engines.gathering import Shard, value_and_grad
from multitower.towers.placement import AXIS, contiguous

DRAW = np.random.default_rng(0)
LEAVES = {
    "in": DRAW.normal(size=(4, 6)),
    "layers": DRAW.normal(size=(4, 6, 6)) / 3,
    "shifts": DRAW.normal(size=(4, 6)) / 3,
    "table": DRAW.normal(size=(8, 6)),
    "out": DRAW.normal(size=(6, 2)),
    "unused": DRAW.normal(size=(4, 4)),
    "bias": DRAW.normal(size=5),  # whole
}
PARAMS = {name: leaf.astype(np.float32) for name, leaf in LEAVES.items()}
# Of "shifts" no device has a part of every layer.
AXES = {"in": 1, "layers": 2, "shifts": 0, "table": 0, "out": 0, "unused": 0, "bias": None}
ROWS = DRAW.normal(size=(4, 4)).astype(np.float32)


@jax.custom_vjp
def doubled(x):
    return 2 * x


doubled.defvjp(lambda x: (2 * x, None), lambda _, g: (2 * g,))


def losses(params, rows):
    """All that a leaf may meet on its way: calls, loops, casts, rules, two uses, and none."""
    h = rows.astype(jnp.bfloat16) @ params["in"].astype(jnp.bfloat16)
    h = h.astype(jnp.float32) + params["table"][jnp.argmax(rows, 1)]
    layer = jax.checkpoint(lambda h, w: jnp.tanh(h @ w.T))
    stack = (params["layers"], params["shifts"])
    h, _ = jax.lax.scan(lambda h, one: (layer(h, one[0]) + one[1], None), h, stack)
    h = jax.jit(lambda h, w: h @ w)(h, doubled(params["out"]))
    loss = (h**2).sum(1) + 0.1 * (params["bias"] ** 2).sum()
    return loss.sum() + (h @ params["out"].T @ params["table"].T).sum(), {"h": h}


def on_devices(num_devices, loss=losses, params=PARAMS, *, copies=False):
    """Loss, aux and gradients of all rows, from devices that hold shards; as a function."""
    axes = {name: AXES[name] for name in params}
    spec = lambda axis: PartitionSpec(*[None] * (axis or 0), None if axis is None else AXIS)
    specs = {name: spec(axis) for name, axis in axes.items()}

    def shard(leaf, axis):
        if axis is None:
            return leaf
        if not copies:
            return Shard(leaf, None, axis, leaf.dtype)
        shape = [n // (num_devices if i == axis else 1) for i, n in enumerate(leaf.shape)]
        return Shard(jnp.zeros(shape, leaf.dtype), leaf, axis, leaf.dtype)

    def on_device(params, rows):
        tree = {name: shard(params[name], axis) for name, axis in axes.items()}
        (total, aux), gradients = value_and_grad(lambda whole: loss(whole, rows), tree)
        whole = {name for name, axis in axes.items() if axis is None}
        gradients = {
            name: jax.lax.psum(leaf, AXIS) if name in whole else leaf
            for name, leaf in gradients.items()
        }
        return jax.lax.psum(total, AXIS), aux, gradients

    return jax.shard_map(
        on_device,
        mesh=contiguous(mt.devices(num_devices), num_devices).mesh,
        in_specs=(PartitionSpec() if copies else specs, PartitionSpec(AXIS)),
        out_specs=(PartitionSpec(), PartitionSpec(AXIS), specs),
        check_vma=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "copies", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["shards", "copies"]
)
def test_values_and_gradients_are_those_of_whole_leaves(copies):
    # The lies: a gradient of one device; one that is N times too big; a part of another device.
    (total, aux), gradients = jax.jit(jax.value_and_grad(losses, has_aux=True))(PARAMS, ROWS)
    found = jax.jit(on_devices(2, copies=copies))(PARAMS, ROWS)
    np.testing.assert_allclose(found[0], total, rtol=2e-3)  # the first product has 16 bits
    np.testing.assert_allclose(found[1]["h"], aux["h"], rtol=2e-2, atol=2e-3)
    for name, gradient in gradients.items():
        assert found[2][name].dtype == gradient.dtype
        np.testing.assert_allclose(found[2][name], gradient, rtol=2e-2, atol=2e-2, err_msg=name)


def collectives(fn, *args):
    """How many collectives of each kind a program writes down, loops once, with their results."""
    text = str(jax.make_jaxpr(fn)(*args))
    return Counter(re.findall(r":(\w+\[[\d,]*\]) = (all_gather|reduce_scatter|psum\w*)\[", text))


def only(name, loss):
    return on_devices(2, lambda p, rows: (loss(p[name], rows), ()), {name: PARAMS[name]})


def test_a_leaf_is_gathered_where_it_is_used_and_again_in_the_backward_pass():
    # The lies: what was gathered is kept until the backward pass, and the model is whole after
    # all; a compiler that joins both gathers, as that of JAX 0.10 does if it can.
    loss = lambda p, rows: (((jnp.tanh(rows @ p["in"]) @ p["out"]) ** 2).sum(), ())
    params = {name: PARAMS[name] for name in ("in", "out")}
    program = jax.jit(on_devices(2, loss, params)).lower(params, ROWS).compile().as_text()
    found = re.findall(r"= (\w+\[[\d,]*\])\S* (all-gather|reduce-scatter)(?:-start)?\(", program)
    assert Counter(found) == {
        ("f32[4,6]", "all-gather"): 1,  # its gradient does not need it
        ("f32[4,3]", "reduce-scatter"): 1,
        ("f32[6,2]", "all-gather"): 2,
        ("f32[3,2]", "reduce-scatter"): 1,
    }


def test_a_leaf_that_is_used_in_two_places_is_sent_once():
    # The lie: a tied table, or a weight in a Python loop, that is sent again at every use.
    tied = only("table", lambda w, rows: (jnp.tanh(rows @ w[:4]) @ w.T).sum())
    assert collectives(tied, {"table": PARAMS["table"]}, ROWS) == {
        ("f32[8,6]", "all_gather"): 1,
        ("f32[4,6]", "reduce_scatter"): 1,
        ("f32[]", "psum"): 1,
    }


def test_trap_gathers_as_often_as_there_are_accumulated_batches():
    """marin#6321: gradients accumulated in a loop, whose every turn gathers all parameters."""

    def accumulated(w, rows):
        turn = lambda total, row: (total + jnp.tanh(row @ w).sum(), None)
        return jax.lax.scan(turn, 0.0, jnp.tile(rows, (4, 1)))[0]

    loop, params = only("in", accumulated), {"in": PARAMS["in"]}
    found = collectives(loop, params, ROWS)
    assert 1 <= found[("f32[4,6]", "all_gather")] <= 2
    assert found[("f32[4,3]", "reduce_scatter")] == 1

    def loops(jaxpr):
        for equation in jaxpr.eqns:
            if equation.primitive.name == "scan":
                yield str(equation.params["jaxpr"])
            for inner in core.jaxprs_in_params(equation.params):
                yield from loops(inner)

    texts = list(loops(jax.make_jaxpr(loop)(params, ROWS).jaxpr))
    assert len(texts) >= 2
    assert not any("all_gather" in text or "reduce_scatter" in text for text in texts)


def test_a_loop_gathers_one_layer_at_a_time():
    # The lie: all layers in front of the loop.
    turn = lambda h, w: (jnp.tanh(h @ w), None)
    loop = only("layers", lambda w, rows: jax.lax.scan(turn, jnp.ones((2, 6)), w)[0].sum())
    assert collectives(loop, {"layers": PARAMS["layers"]}, ROWS) == {
        ("f32[6,6]", "all_gather"): 2,
        ("f32[6,3]", "reduce_scatter"): 1,
        ("f32[]", "psum"): 1,
    }


def twice(h, w):
    return jnp.tanh(h @ w) @ w[:, ::-1]


def turned(h, w):
    w = w.T
    return jnp.tanh(h @ w) @ w


def loop_in_a_loop(h, w):
    return jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), h, jnp.ones((3, 6)))[0]


@pytest.mark.slow
@pytest.mark.parametrize("layer", [twice, jax.jit(twice), turned, loop_in_a_loop])
def test_a_loop_that_uses_a_layer_twice_keeps_none(layer):
    # The lie: one gather in a turn, and the whole stack kept for the backward pass.
    turn = lambda h, w: (layer(h, w), None)
    loss = lambda w, rows: (jax.lax.scan(turn, rows[:, :1] + jnp.ones(6), w)[0] ** 2).sum()
    loop, given = only("layers", loss), {"layers": PARAMS["layers"]}
    found = collectives(loop, given, ROWS)
    assert found[("f32[6,6]", "all_gather")] == 2
    assert found[("f32[6,3]", "reduce_scatter")] == 1
    (outer,) = jax.make_jaxpr(loop)(given, ROWS).eqns
    assert "f32[4,6,6]" not in str(outer.params["jaxpr"])
    gradients = jax.jit(jax.grad(loss))(given["layers"], ROWS)
    np.testing.assert_allclose(
        jax.jit(loop)(given, ROWS)[2]["layers"], gradients, rtol=1e-3, atol=1e-5
    )


def test_16_bits_are_sent_and_gradients_are_added_in_32():
    # The lies: a cast behind the exchange, which sends twice as much; sums of 16-bit gradients.
    half = only("in", lambda w, rows: (rows.astype(jnp.bfloat16) @ w.astype(jnp.bfloat16)).sum())
    found = collectives(half, {"in": PARAMS["in"]}, ROWS)
    assert found[("bf16[4,6]", "all_gather")] >= 1
    assert not found[("f32[4,6]", "all_gather")]
    assert found[("f32[4,3]", "reduce_scatter")] == 1


def test_a_copy_is_never_gathered_and_its_gradient_leaves_the_loop_in_parts():
    # The lie: the gradients of all layers whole, and only then cut.
    turn = lambda h, w: (jnp.tanh(h @ w), None)
    loss = lambda p, rows: (jax.lax.scan(turn, jnp.ones((2, 6)), p["layers"])[0].sum(), ())
    loop = on_devices(2, loss, {"layers": PARAMS["layers"]}, copies=True)
    assert collectives(loop, {"layers": PARAMS["layers"]}, ROWS) == {
        ("f32[6,3]", "reduce_scatter"): 1,
        ("f32[]", "psum"): 1,
    }

"""Packing: a tree as few buffers, and back, without a lost bit."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from multitower.engines.packing import SMALL, pack, slices, unpack


def a_tree():
    rng = np.random.default_rng(0)
    arrays = {  # made by NumPy, which compiles nothing
        "scalar": np.float32(0.1),
        "large": rng.normal(size=(SMALL + 1,)).astype(np.float32),
        "matrix": rng.normal(size=(3, 5)).astype(np.float32),
        "halves": rng.normal(size=7).astype(np.float16),
        "brains": rng.normal(size=(2, 2)).astype(jnp.bfloat16),
        "large brain": rng.normal(size=(SMALL // 2, 3)).astype(jnp.bfloat16),
        "whole": np.arange(4, dtype=np.int32),
        "flags": np.array([True, False]),
        "complex": np.array([1 + 2j], np.complex64),
        "empty": np.zeros((0, 3), np.float32),
    }
    return jax.tree.map(jnp.asarray, arrays) | {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(7), (2, 3)),
        "rbg": jax.random.key(7, impl="rbg"),
        "nothing": None,
    }


@pytest.mark.parametrize(
    "jit", [jax.jit, pytest.param(lambda fun: fun, marks=pytest.mark.slow)], ids=["jit", "eager"]
)
def test_unpack_of_pack_is_the_tree(jit):
    tree = a_tree()
    found = jit(lambda t: unpack(pack(t)))(tree)
    assert jax.tree.structure(found) == jax.tree.structure(tree)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), found) == jax.tree.map(
        lambda x: (x.shape, x.dtype), tree
    )
    assert mt.fingerprint(found) == mt.fingerprint(tree)


def test_small_leaves_share_a_buffer_and_large_ones_are_not_copied():
    """Lie: one message per leaf (slow on the host), or megabytes moved to join them."""
    packed = pack(a_tree())
    assert len(packed.buffers) == 6  # float32, int32, uint32 and complex64, two large ones
    tree = {"large": a_tree()["large"]}
    assert pack(tree).buffers[0] is tree["large"]


def test_16_bit_floats_are_added_in_32():
    """Lie: 256 + 1 stays 256 on the way through the tree."""
    assert {str(b.dtype) for b in pack({"b": jnp.ones(3, jnp.bfloat16)}).buffers} == {"float32"}


def test_a_tree_without_leaves():
    assert pack({}).buffers == ()
    assert unpack(pack({"a": None})) == {"a": None}


def test_a_leaf_that_fills_its_buffer_keeps_its_shape():
    """Lie: a column comes back as a row, as its buffer has as many elements."""
    column = jnp.arange(5.0).reshape(5, 1)
    assert unpack(pack([column]))[0].shape == (5, 1)


def test_64_bit_floats_stay_as_they_are():
    with jax.enable_x64(True):
        (buffer,) = pack([jnp.ones(3, jnp.float64)]).buffers
        assert buffer.dtype == jnp.float64


# Four of three elements, one of five, none at the end.
PLACES = [(0, 3), (3, 6), (6, 11), (11, 14), (14, 17), (17, 17)]


def test_slices_are_those_of_the_vector():
    vector = np.arange(17.0, dtype=np.float32)
    found = jax.jit(lambda v: slices(v, PLACES))(vector)
    for piece, (start, end) in zip(found, PLACES, strict=True):
        np.testing.assert_array_equal(piece, vector[start:end])


def test_places_are_hidden_where_many_have_one_size():
    # The lie: a hundred layers, and a kernel for each of them.
    program = str(jax.make_jaxpr(lambda v: slices(v, PLACES))(jnp.zeros(17)))
    assert program.count("= dynamic_slice") == 4
    assert "optimization_barrier" in program


def test_many_slices_of_one_size_share_a_kernel():
    """Lie: a hundred layers, and a kernel to compile for each of them."""
    vector = jnp.zeros(17)
    program = jax.jit(lambda v: [jnp.sin(x) for x in slices(v, PLACES)]).lower(vector).compile()
    begins = re.findall(r"dynamic-slice\(%\S+ %(\w+)", program.as_text())
    assert len(begins) == 4
    assert not any(begin.startswith("constant") for begin in begins)


def test_slices_without_elements():
    assert [x.shape for x in slices(jnp.zeros(0), [(0, 0)] * 5)] == [(0,)] * 5

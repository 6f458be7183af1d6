"""fingerprint: equal for equal bits, and for nothing else."""

import hashlib

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import multitower as mt


def test_it_is_the_documented_hash():
    """The recipe is a promise: fingerprints are compared over years and machines."""
    x = np.array([[1, 2]], "<f4")
    expected = hashlib.sha256(b"float32(1, 2)" + x.tobytes()).hexdigest()
    assert mt.fingerprint({"x": x}) == expected
    assert mt.fingerprint([x.astype(">f4")]) == expected
    assert mt.fingerprint(np.asfortranarray(x)) == expected


def test_where_and_how_arrays_lie_does_not_matter():
    x = np.arange(8, dtype=np.float32)
    placed = [
        jnp.asarray(x),
        jax.device_put(x, mt.devices("cpu:3")[0]),
        mt.shard(x, devices=4),
        mt.shard(x, devices=3),
        mt.shard(x, devices=2, towers=4),
        [x],
    ]
    assert {mt.fingerprint(p) for p in placed} == {mt.fingerprint(x)}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (np.zeros(2, "f"), -np.zeros(2, "f")),
        (np.zeros(2, "f"), np.zeros(2, "i")),
        (np.zeros(2, "f"), np.zeros((1, 2), "f")),
        (np.zeros(2, "f"), np.zeros(2, ml_dtypes.bfloat16)),
        ([np.zeros(1, "f"), np.zeros(1, "f")], np.zeros(2, "f")),
        (np.array([np.nan]), np.array([-np.nan])),
        ((1, 2), (2, 1)),
        (jax.random.key(0), jax.random.key(1)),
    ],
    ids=str,
)
def test_other_bits_dtypes_shapes_or_orders_differ(one, other):
    assert mt.fingerprint(one) != mt.fingerprint(other)


def test_a_single_bit_of_a_large_tree_shows():
    tree = {"a": np.zeros(100_000, "f"), "b": np.ones(3)}
    before = mt.fingerprint(tree)
    tree["a"].view(np.uint32)[77_777] ^= 1
    assert mt.fingerprint(tree) != before

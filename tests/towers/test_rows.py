"""Rows: which leaves are cut, along which axis, into which towers."""

from typing import Any, NamedTuple

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.experimental import sparse

import multitower as mt
from multitower.towers.rows import (
    Tower,
    axes_of_leaves,
    key_of_tower,
    pad_rows,
    real_rows,
    take_apart,
)
from tower_keys import tower_key


@given(num_rows=st.integers(1, 50), num_towers=st.integers(1, 12), spare=st.integers(0, 20))
def test_real_rows_of_all_towers_are_all_rows(num_rows, num_towers, spare):
    """Lie: padding that counts, or rows that do not."""
    tower_rows = -(-(num_rows + spare) // num_towers)
    # Each tower's number is worked out alone: one program for all numbers of towers.
    counts = np.asarray(real_rows(np.arange(12), tower_rows, np.int32(num_rows)))[:num_towers]
    assert counts.sum() == num_rows
    assert (np.diff(counts) <= 0).all()
    assert counts.max() <= tower_rows


def test_padding_is_made_of_real_rows():
    """Lie: zeros, which a logarithm or a norm turns into NaN."""
    np.testing.assert_array_equal(pad_rows(np.array([5, 6, 7]), 8), [5, 6, 7, 5, 6, 7, 5, 6])
    same = np.arange(4)
    assert pad_rows(same, 4) is same


def test_a_tree_taken_apart_and_rebuilt_for_a_tower():
    tree = {
        "rows": np.arange(6).reshape(2, 3),
        "whole": np.ones(5),
        "number": 3,
        "key": jax.random.key(0),
        "nothing": None,
    }
    axes = {"rows": 1, "whole": None, "number": 0, "key": 0, "nothing": 0}
    parts = take_apart(tree, axes, name="batch")
    assert parts.num_rows == 3
    assert len(parts.shared) == 3
    back = parts.split.rebuild(
        parts.shared, parts.rows, Tower(np.int32(4), np.int32(3), np.int32(19))
    )
    np.testing.assert_array_equal(back["rows"], tree["rows"])
    assert back["whole"] is tree["whole"]
    assert back["number"] == 3
    assert back["key"] == tower_key(tree["key"], 4)
    assert back["nothing"] is None


def test_axes_are_prefixes_as_in_vmap():
    """Lie: None in the tree is taken for an axis, and all axes after it slip by one."""
    tree = ({"a": 1, "b": None, "c": (2, 3)}, 4)
    assert axes_of_leaves(0, tree, "in_axes") == [0, 0, 0, 0]
    assert axes_of_leaves(({"a": 1, "b": None, "c": None}, -1), tree, "in_axes") == [
        1,
        None,
        None,
        -1,
    ]
    assert axes_of_leaves((None, 2), tree, "in_axes") == [None, None, None, 2]
    assert axes_of_leaves(None, tree, "in_axes") == [None] * 4
    for axes in (True, ({"a": 1, "b": None, "c": True}, 4)):  # as if it said whether to cut
        with pytest.raises(mt.ArgumentError, match="in_axes holds True: use an int, or None"):
            axes_of_leaves(axes, tree, "in_axes")


def test_a_legacy_key_among_rows():
    """Lie: it is cut in two, or rows that look like it are taken for a key."""
    key = jax.random.PRNGKey(0)
    parts = take_apart((key, np.ones((3, 2))), 0, name="batch")
    back, _ = parts.split.rebuild(
        parts.shared, parts.rows, Tower(np.int32(4), np.int32(3), np.int32(19))
    )
    np.testing.assert_array_equal(back, tower_key(key, 4))
    assert take_apart(key, 0, name="batch").num_rows == 2
    assert take_apart((key, np.ones(2)), 0, name="batch").split.kinds == ("key", 0)
    assert take_apart((key, np.ones(3)), (None, 0), name="batch").split.kinds == ("shared", 0)
    assert take_apart((np.asarray(key), np.ones(3)), 0, name="batch").split.kinds == ("key", 0)
    assert take_apart((key, np.ones((2, 3))), -1, name="batch").split.kinds == ("key", 1)


def test_labels_of_two_rows_are_no_legacy_key():
    """Lie: the last batch of an epoch has two rows, and its NumPy labels are a key."""
    labels = np.array([3, 1], np.uint32)
    assert take_apart((labels, np.ones(2)), 0, name="batch").split.kinds == (0, 0)
    assert take_apart((labels, np.float32(2)), 0, name="batch").num_rows == 2


@pytest.mark.parametrize("towers", [None, 2])
@pytest.mark.parametrize("devices", [1, 2, 3])
def test_labels_of_two_rows_are_no_legacy_key_on_devices_either(devices, towers):
    """Lie: `prefetch` makes a `jax.Array` of the labels, and the step takes that for a key."""
    devices = min(devices, towers or 3)
    key = jax.random.PRNGKey(0)
    batch = {"x": np.ones(2), "y": np.array([3, 1], np.uint32), "key": key}
    there = mt.shard(batch, devices=devices, towers=towers)
    kinds = dict(zip(sorted(batch), take_apart(there, 0, name="batch").split.kinds, strict=True))
    assert kinds == {"x": 0, "y": 0, "key": "key"}


def test_half_a_legacy_key_is_never_a_key():
    """Next to two rows it is a key as well; it used to be cut, and JAX refused the halves."""
    noise = mt.make_parallel(lambda key, x: jax.random.uniform(key, x.shape), devices=2)
    assert len(set(np.asarray(noise(jax.random.PRNGKey(0), np.ones(2))).tolist())) == 2


def test_each_of_several_keys_is_the_towers():
    """Lie: an array of keys stays the same in every tower, or all of it becomes one key."""
    keys = jax.random.split(jax.random.key(0), (2, 3))
    there = key_of_tower(keys, Tower(np.int32(4), np.int32(3), np.int32(19)))
    assert there.shape == (2, 3)
    assert there[1, 2] == tower_key(keys[1, 2], 4)
    first = key_of_tower(keys[0, 0], Tower(np.int32(0), np.int32(3), np.int32(19)))
    assert first == keys[0, 0]


@pytest.mark.parametrize("counts", [(0, 3), (3, 0)])
def test_no_rows_are_another_number_than_some(counts):
    """Lie: an empty array first, and the rows of the next ones are the batch's."""
    tree = tuple(np.ones((count, 2)) for count in counts)
    with pytest.raises(mt.BatchError, match=r"rows and .* need the same number"):
        take_apart(tree, 0, name="batch")


class Graphs(NamedTuple):
    """The fields of jraph's GraphsTuple."""

    nodes: Any
    edges: Any
    senders: Any
    receivers: Any
    globals: Any
    n_node: Any
    n_edge: Any


def test_a_batch_of_graphs_is_no_batch_of_rows():
    """Lie: its nodes and edges were weights that every tower needs whole."""
    nodes, edges, each = np.ones((9, 2)), np.ones(12, int), np.ones(4, int)
    graphs = Graphs(nodes, edges, edges, edges, each, each, each)
    loss = lambda w, graphs: (graphs.nodes @ w).mean()
    for arguments in ((graphs,), ({"graphs": graphs, "y": each},)):
        with pytest.raises(mt.BatchError, match=r"a batch of graphs.*Pad every graph.*jax.vmap"):
            mt.value_and_grad(loss, devices=2)(np.ones(2), *arguments)


@pytest.mark.parametrize("ends", [("senders", "receivers"), ("edge_index",)])
def test_edges_in_a_dict_or_as_arguments_are_no_rows_either(ends):
    """Lie: edges are cut out alone, and every tower gets all of them beside its own nodes."""
    arrays = {"nodes": np.ones((9, 2)), **dict.fromkeys(ends, np.ones(12, int))}
    with pytest.raises(mt.BatchError, match=r"several graphs are in one.*Pad every graph"):
        mt.value_and_grad(lambda w, batch: batch["nodes"] @ w, devices=2)(np.ones(2), arrays)
    by_ends = {1: lambda w, nodes, edge_index: w, 2: lambda w, nodes, senders, receivers: w}
    with pytest.raises(mt.BatchError, match=r"several graphs are in one.*Pad every graph"):
        mt.value_and_grad(by_ends[len(ends)], devices=2)(1.0, *arrays.values())
    with pytest.raises(mt.BatchError) as told:  # one end alone is something else
        take_apart({"nodes": np.ones(9), "senders": np.ones(12)}, 0, name="batch")
    assert "graph" not in str(told.value)


def test_several_keys_for_every_tower_are_one_that_is_split():
    """Lie: they are to be shared, and then all towers draw the same numbers."""
    keys = jax.random.split(jax.random.key(0), 3)
    loss = lambda w, x, keys: w * x
    with pytest.raises(mt.BatchError, match=r"keys: pass one key.*jax.random.split\(key, 3\)"):
        mt.value_and_grad(loss, devices=2)(1.0, np.ones(8), keys)
    with pytest.raises(mt.BatchError, match="same number of rows") as told:  # a key of its own
        take_apart((np.ones(8), keys[0], np.ones(3)), 0, name="batch")
    assert "split" not in str(told.value).partition("rows.")[2]


@pytest.mark.slow
def test_a_sparse_array_is_no_batch_of_rows():
    """Lie: its entries are rows, if by chance there are as many as rows, or weights."""
    x = np.eye(4, dtype=np.float32)
    whole, by_row = sparse.BCOO.fromdense(x), sparse.BCOO.fromdense(x, n_batch=1)
    loss = lambda w, x, y: (x @ w - y) ** 2
    w, y = np.ones(4, np.float32), np.zeros(4, np.float32)
    for array in (whole, by_row, sparse.BCSR.fromdense(x)):
        with pytest.raises(mt.ArgumentError, match=r"sparse array.*None for it in in_axes"):
            mt.value_and_grad(loss, devices=2)(w, array, y)

    def made_inside(w, data, indices, y):
        return loss(w, sparse.BCOO((data, indices), shape=(len(data), 4)), y)

    found = mt.value_and_grad(made_inside, devices=2)(w, by_row.data, by_row.indices, y)
    np.testing.assert_allclose(found[0], 1)
    whole_loss = lambda w, whole, x, y: loss(whole @ w, x, y)
    found = mt.value_and_grad(whole_loss, in_axes=(None, None, 0, 0), devices=2)(w, whole, x, y)
    np.testing.assert_allclose(found[0], 1)

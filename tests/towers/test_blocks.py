"""Blocks of a tree: every tower's part, of equal size, and the tree that they make together."""

import jax
import jax.numpy as jnp
import numpy as np

import multitower as mt
from multitower.towers.blocks import BlockLayout

TREE = {
    "half": np.arange(6, dtype=np.float32).reshape(2, 3).astype(jnp.bfloat16),
    "large": np.arange(70_000, dtype=np.float32),
    "number": np.float32(7),
    "small": np.arange(8, dtype=np.float32),
}


def test_the_blocks_of_all_towers_are_the_tree():
    # The lies: bfloat16 that comes back as float32; a block that is padded for nothing.
    layout = BlockLayout.of(TREE, 4)

    @jax.jit
    def by_blocks(tree):
        blocks = [layout.block(tree, jnp.int32(tower)) for tower in range(4)]
        rows = [layout.to_rows(layout.of_rows(layout.to_rows(block))) for block in blocks]
        return layout.whole([jnp.stack(each) for each in zip(*rows, strict=True)]), blocks[0]

    tree, block = by_blocks(TREE)
    assert mt.fingerprint(tree) == mt.fingerprint(TREE)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), block)
    assert shapes == layout.shapes_of_block()
    assert block["small"].size == 2
    assert block["large"].size == 17_500


def test_gradients_of_short_floats_are_cut_as_long_ones():
    # The lies: sums over towers in bfloat16; small leaves that are sent one by one.
    layout = BlockLayout.of(TREE, 4)
    buffers = jax.jit(layout.cut)(TREE)
    assert [(buffer.shape, buffer.dtype) for buffer in buffers] == [
        ((4, 2), np.float32), ((4, 17_500), np.float32), ((4, 1 + 2), np.float32),
    ]  # fmt: skip
    whole = jax.jit(layout.whole)(buffers)
    for found, expected in zip(jax.tree.leaves(whole), jax.tree.leaves(TREE), strict=True):
        np.testing.assert_array_equal(found, expected)

"""Blocks: a tree of arrays cut into equal pieces, one for every tower.

Every leaf is flattened, padded with zeros and cut into as many blocks as there are towers. Small
leaves share a buffer, as in `packing`. The cut depends only on the shapes and the number of towers,
so the owner of a block can do its part of an update on any device.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from multitower.towers.leaves import wide_dtype

_SMALL = 64 * 1024  # elements; a leaf of up to this size is copied into a shared buffer


class Place(NamedTuple):
    """Where a leaf's block lies: which buffer, from which element on, and how many elements."""

    buffer: int
    start: int
    size: int


@dataclass(frozen=True)
class BlockLayout:
    """How the leaves of a tree are cut.

    Attributes:
        num_towers: the number of towers, and of blocks.
        treedef: the structure of the tree.
        shapes: the shape of each leaf.
        dtypes: the dtype of each leaf.
        places: where each leaf lies in the buffers.
    """

    num_towers: int
    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[Any, ...]
    places: tuple[Place, ...]

    @classmethod
    def of(cls, tree: Any, num_towers: int) -> "BlockLayout":
        """The layout of a tree of arrays, or of `ShapeDtypeStruct`s, for a number of towers."""
        leaves, treedef = jax.tree.flatten(tree)
        ends: list[int] = []
        shared: dict[Any, int] = {}
        places: list[Place] = []
        for leaf in leaves:
            size = -(-math.prod(leaf.shape) // num_towers)
            large = math.prod(leaf.shape) > _SMALL
            buffer = len(ends) if large else shared.setdefault(leaf.dtype, len(ends))
            if buffer == len(ends):
                ends.append(0)
            places.append(Place(buffer, ends[buffer], size))
            ends[buffer] += size
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        return cls(num_towers, treedef, shapes, tuple(x.dtype for x in leaves), tuple(places))

    def cut(self, tree: Any) -> list[jax.Array]:
        """The buffers of a tree, each of shape (towers, n) and of at least float32."""
        wide = [wide_dtype(leaf.dtype) for leaf in jax.tree.leaves(tree)]
        cut = [
            self._padded(leaf, place).reshape(self.num_towers, place.size).astype(dtype)
            for leaf, place, dtype in zip(jax.tree.leaves(tree), self.places, wide, strict=True)
        ]
        return self._buffers(cut, axis=1)

    def whole(self, buffers: Sequence[jax.Array]) -> Any:
        """The tree, from buffers of shape (towers, n); it has their dtypes."""
        leaves: list[jax.Array] = []
        for (buffer, start, size), shape in zip(self.places, self.shapes, strict=True):
            flat = buffers[buffer][:, start : start + size].reshape(-1)
            leaves.append(flat[: math.prod(shape)].reshape(shape))
        return jax.tree.unflatten(self.treedef, leaves)

    def block(self, tree: Any, tower: jax.Array) -> Any:
        """A tower's block: the same tree, with the tower's part of each leaf, shape (size,)."""
        leaves = [
            lax.dynamic_slice_in_dim(self._padded(leaf, place), tower * place.size, place.size)
            for leaf, place in zip(jax.tree.leaves(tree), self.places, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def of_rows(self, rows: Sequence[jax.Array]) -> Any:
        """A tower's block of a tree, from its row of every buffer."""
        leaves = [rows[buffer][start : start + size] for buffer, start, size in self.places]
        return jax.tree.unflatten(self.treedef, leaves)

    def to_rows(self, block: Any) -> list[jax.Array]:
        """A tower's row of every buffer, from its block of a tree."""
        return self._buffers(jax.tree.leaves(block), axis=0)

    def shapes_of_block(self) -> Any:
        """A tower's block, as a tree of `jax.ShapeDtypeStruct`s."""
        leaves = [
            jax.ShapeDtypeStruct((place.size,), dtype)
            for place, dtype in zip(self.places, self.dtypes, strict=True)
        ]
        return jax.tree.unflatten(self.treedef, leaves)

    def _padded(self, leaf: jax.Array, place: Place) -> jax.Array:
        flat = leaf.reshape(-1)
        padding = place.size * self.num_towers - flat.size
        return jnp.pad(flat, (0, padding)) if padding else flat

    def _buffers(self, leaves: Sequence[jax.Array], axis: int) -> list[jax.Array]:
        by_buffer: dict[int, list[jax.Array]] = {}
        for leaf, place in zip(leaves, self.places, strict=True):
            by_buffer.setdefault(place.buffer, []).append(leaf)
        return [jnp.concatenate(by_buffer[b], axis) for b in sorted(by_buffer)]

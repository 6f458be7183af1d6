"""Bundles: the many small leaves of a state in one vector for each dtype, between programs.

Every array that enters or leaves a program costs the host microseconds, on every device. So between
the programs of a step small leaves travel together, and programs take them apart and lay them
together again: they only move data there, so no bit changes.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp

from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.packing import slices
from multitower.towers.rows import Tower

SMALL = 1024  # elements; copying larger leaves costs a CPU more than handling them saves
FEWEST = 8  # leaves of one dtype that are worth a vector

_Vectors = list[jax.Array]


@dataclass(frozen=True)
class Layout:
    """Which leaves of a tree travel together; decided by shapes and dtypes alone, and hashable.

    Attributes:
        treedef: of the tree.
        shapes: of all leaves.
        together: for each vector the numbers of its leaves.
        alone: the numbers of all others.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    together: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> "Layout":
        """Of a tree of arrays or their shapes."""
        leaves, treedef = jax.tree.flatten(tree)
        by_dtype: dict[Any, list[int]] = {}
        for number, leaf in enumerate(leaves):
            if leaf.size <= SMALL and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
                by_dtype.setdefault(leaf.dtype, []).append(number)
        together = tuple(tuple(found) for found in by_dtype.values() if len(found) >= FEWEST)
        alone = set(range(len(leaves))).difference(*together)
        shapes = tuple(tuple(leaf.shape) for leaf in leaves)
        return cls(treedef, shapes, together, tuple(sorted(alone)))


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Bundle:
    """A tree whose small leaves lie in vectors."""

    vectors: _Vectors
    alone: list[Any]
    layout: Layout = field(metadata={"static": True})


def bundled_job(job: Job) -> Job:
    """The same job with a state that may be a bundle; it leaves the next one in the same layout."""

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        return job.tower(shared._replace(state=opened(shared.state)), rows, here)

    def finish(state: Any, means: Any, sums: Any) -> Any:
        new, metrics = job.finish(opened(state), means, sums)
        return _laid(new, state.layout, _join) if isinstance(state, Bundle) else new, metrics

    return Job(tower, finish)


def bundled(copies: Sequence[Any]) -> list[Any]:
    """Copies of one tree, each on a device, with small leaves together; as they are, if few are.

    Arrays are not overwritten. All copies share one layout: programs compare it at every call.
    """
    layout = Layout.of(copies[0])
    return [_laid(copy, layout, _joined) for copy in copies] if layout.together else [*copies]


def opened(tree: Any) -> Any:
    """The tree in a bundle, inside a program; anything else as it is."""
    return _unbundled(tree, _cut)


def shown(tree: Any) -> Any:
    """The same outside of a program: small leaves are copies, others the bundle's own arrays."""
    return _unbundled(tree, _cut_out)


def _laid(tree: Any, layout: Layout, join: Callable[[Any], _Vectors]) -> Bundle:
    leaves = jax.tree.leaves(tree)
    vectors = join([[leaves[number] for number in numbers] for numbers in layout.together])
    return Bundle(vectors, [leaves[number] for number in layout.alone], layout)


def _unbundled(tree: Any, cut: Callable[[_Vectors, Any], list[_Vectors]]) -> Any:
    if not isinstance(tree, Bundle):
        return tree
    layout = tree.layout
    shapes = tuple(tuple(layout.shapes[n] for n in numbers) for numbers in layout.together)
    found = dict(zip(layout.alone, tree.alone, strict=True))
    for numbers, leaves in zip(layout.together, cut(tree.vectors, shapes), strict=True):
        found.update(zip(numbers, leaves, strict=True))
    return jax.tree.unflatten(layout.treedef, [found[n] for n in range(len(found))])


def _join(groups: Sequence[Sequence[Any]]) -> _Vectors:
    return [jnp.concatenate([leaf.reshape(-1) for leaf in leaves]) for leaves in groups]


def _cut(vectors: _Vectors, shapes: Sequence[Sequence[tuple[int, ...]]]) -> list[_Vectors]:
    found: list[_Vectors] = []
    for vector, own in zip(vectors, shapes, strict=True):
        ends = list(itertools.accumulate(math.prod(shape) for shape in own))
        pieces = slices(vector, list(itertools.pairwise([0, *ends])))
        found.append([piece.reshape(shape) for piece, shape in zip(pieces, own, strict=True)])
    return found


_joined = jax.jit(_join)
_cut_out = jax.jit(_cut, static_argnums=1)

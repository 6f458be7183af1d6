"""Bundles: the many small leaves of a state in one vector for each dtype, between programs.

Every array that enters or leaves a program costs the host microseconds, on every device. So between
the programs of a step small leaves are packed into vectors. Programs unpack them and pack them
again, which only moves data, so no bit changes.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.packing import slices
from multitower.steps.state.changes import Changes
from multitower.steps.state.fields import Fields
from multitower.towers.rows import Tower

SMALL = 1024  # elements; copying a larger leaf costs a CPU more time than packing it saves
FEWEST = 8  # leaves of one dtype from which a vector pays off

_Vectors = list[jax.Array]
_Shapes = Sequence[Sequence[tuple[int, ...]]]


@dataclass(frozen=True)
class BundleLayout:
    """Which leaves of a tree are packed together. It depends on shapes and dtypes, and is hashable.

    Attributes:
        treedef: the structure of the tree.
        shapes: the shapes of all leaves.
        together: the numbers of the leaves in each vector.
        alone: the numbers of all other leaves.
    """

    treedef: Any
    shapes: tuple[tuple[int, ...], ...]
    together: tuple[tuple[int, ...], ...]
    alone: tuple[int, ...]

    @classmethod
    def of(cls, tree: Any) -> "BundleLayout":
        """The layout of a tree of arrays or `jax.ShapeDtypeStruct`."""
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
    """A tree whose small leaves are packed in vectors."""

    vectors: _Vectors
    alone: list[Any]
    layout: BundleLayout = field(metadata={"static": True})


def bundled_job(job: Job) -> Job:
    """The same job for a state that is a bundle or has some; the new state has the same layout."""

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        return job.tower(shared._replace(state=opened(shared.state)), rows, here)

    def finish(state: Any, means: Any, sums: Any) -> Any:
        new, metrics = job.finish(opened(state), means, sums)
        return laid_like(state, new), metrics

    return Job(tower, finish)


def bundled(copies: Sequence[Any]) -> list[Any]:
    """Bundles copies of one tree, each on its device; unchanged if few of its leaves are small.

    Arrays are not overwritten. All copies share one layout object, since it is compared at every
    call of a program.
    """
    layout = BundleLayout.of(copies[0])
    return [_laid(copy, layout, _joined) for copy in copies] if layout.together else [*copies]


def with_bundles(copies: Sequence[Any]) -> list[Any]:
    """Copies of one named tuple such as `Fields`, with each of its fields in a bundle if it pays.

    Where a step reads or replaces one field, the others stay packed.
    """
    fields = [bundled(field) for field in zip(*copies, strict=True)]
    return [type(copies[0])(*own) for own in zip(*fields, strict=True)]


def laid(tree: Any) -> Any:
    """`bundled` inside a program, for one tree."""
    layout = BundleLayout.of(tree)
    return _laid(tree, layout, _join) if layout.together else tree


def laid_like(old: Any, new: Any) -> Any:
    """The new tree in bundles where the old one is in them, inside a program."""
    if isinstance(old, Bundle):
        return _laid(new, old.layout, _join)
    return Fields(*map(laid_like, old, new)) if isinstance(old, Fields) else new


def opened(tree: Any) -> Any:
    """The tree in a bundle, inside a program; a tree that is not a bundle is returned unchanged.

    The fields of `Fields` may be bundles.
    """
    return _unbundled(tree, _cut)


def shown(tree: Any) -> Any:
    """`opened` outside of a program: small leaves are copies, others the bundle's own arrays."""
    return _unbundled(tree, _cut_out)


def shown_on_host(tree: Any) -> Any:
    """`shown` on the host, for NumPy arrays with a first axis for towers, which leaves get, too."""
    return _unbundled(tree, _cut_rows)


def first_alone(tree: Any) -> Any:
    """The first leaf of a tuple or list that may be in a bundle; None if it is in a vector."""
    if not isinstance(tree, Bundle):
        return tree[0]
    return tree.alone[0] if tree.layout.alone[:1] == (0,) else None


def with_leaves(bundle: Any, new: Mapping[int, Any]) -> Any:
    """The bundle with some leaves of its tree replaced, by number; arrays are not overwritten.

    Args:
        bundle: the bundle of one device, or a tree that is not a bundle.
        new: arrays on this device, of the shapes and dtypes of the leaves that they replace.
    """
    if not isinstance(bundle, Bundle):
        leaves, treedef = jax.tree.flatten(bundle)
        return treedef.unflatten(new.get(number, leaf) for number, leaf in enumerate(leaves))
    layout = bundle.layout
    alone = dict(zip(layout.alone, bundle.alone, strict=True))
    vectors = list(bundle.vectors)
    for place, numbers in enumerate(layout.together):
        start = 0
        for number in numbers:
            if number in new:
                vectors[place] = _put(vectors[place], new[number], start)
            start += math.prod(layout.shapes[number])
    alone |= {number: leaf for number, leaf in new.items() if number in alone}
    return Bundle(vectors, [*alone.values()], layout)


def with_changes_in(tree: Any, changes: Changes) -> Any:
    """A named tuple of `with_bundles` with these leaves replaced, by field and number."""
    new = {name: with_leaves(getattr(tree, name), leaves) for name, leaves in changes.items()}
    return tree._replace(**new)


def numbered(tree: Any, names: Sequence[str], changes: Changes) -> dict[int, Any]:
    """Changes of fields as `with_leaves` takes them for a whole named tuple, in a bundle or not.

    Args:
        tree: the named tuple, or its bundle.
        names: the names of its fields.
        changes: new leaves by field and number.
    """
    treedef = tree.layout.treedef if isinstance(tree, Bundle) else jax.tree.structure(tree)
    sizes = [child.num_leaves for child in treedef.children()]
    first = dict(zip(names, itertools.accumulate([0, *sizes]), strict=False))
    return {first[name] + n: leaf for name, own in changes.items() for n, leaf in own.items()}


def _laid(tree: Any, layout: BundleLayout, join: Callable[[Any], _Vectors]) -> Bundle:
    leaves = jax.tree.leaves(tree)
    vectors = join([[leaves[number] for number in numbers] for numbers in layout.together])
    return Bundle(vectors, [leaves[number] for number in layout.alone], layout)


def _unbundled(tree: Any, cut: Callable[[_Vectors, Any], list[_Vectors]]) -> Any:
    if isinstance(tree, Fields):
        return Fields(*[_unbundled(field, cut) for field in tree])
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


def _cut(vectors: _Vectors, shapes: _Shapes) -> list[_Vectors]:
    found: list[_Vectors] = []
    for vector, own in zip(vectors, shapes, strict=True):
        pieces = slices(vector, list(itertools.pairwise([0, *_ends(own)])))
        found.append([piece.reshape(shape) for piece, shape in zip(pieces, own, strict=True)])
    return found


def _cut_rows(vectors: Any, shapes: _Shapes) -> list[Any]:
    found: list[Any] = []
    for rows, own in zip(vectors, shapes, strict=True):
        pieces = zip(np.split(rows, _ends(own)[:-1], axis=1), own, strict=True)
        found.append([piece.reshape(len(rows), *shape) for piece, shape in pieces])
    return found


def _ends(shapes: Sequence[tuple[int, ...]]) -> list[int]:
    """Where each of these leaves ends in a vector."""
    return list(itertools.accumulate(math.prod(shape) for shape in shapes))


@jax.jit
def _put(vector: jax.Array, leaf: jax.Array, start: int) -> jax.Array:
    """One program for all leaves of a shape: users write now into these, now into those."""
    return jax.lax.dynamic_update_slice(vector, leaf.reshape(-1), (start,))


_joined = jax.jit(_join)
_cut_out = jax.jit(_cut, static_argnums=1)

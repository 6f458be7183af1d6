"""Arrays that are to be cut, but differ in their number of rows: finds which of them are not rows.

A second set of weights, a target network or a model state is an argument whose own arrays differ
in axis 0, and none of them holds rows. The error advises to share the whole argument. Advice to
share the weights without their biases, or to share the batch, would lead to the next error.
"""

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from multitower.errors import BatchError, listed
from multitower.towers.leaves import is_key
from multitower.towers.refusals import (
    Names,
    name_of,
    path_of,
    refuse_sparse_rows,
    taken_out_of,
)

_SHOWN = 3  # a message names at most so many arrays of an argument
_PAD_GRAPHS = (
    "an edge may point into another tower. Pad every graph to the same number of nodes and edges, "
    "stack the graphs on axis 0, and apply the model of one graph with jax.vmap."
)
_GRAPHS = (
    "a batch of graphs in one, like jraph's GraphsTuple, has no rows that can be cut: its arrays "
    f"hold the nodes and edges of all graphs, and {_PAD_GRAPHS}"
)
# What the two ends of edges are called.
_EDGES = ({"senders", "receivers"}, {"sender", "receiver"}, {"edge_index"})
_SLICES = (
    " If the arrays of a list are slices of one batch, pass jnp.concatenate(slices): multitower "
    "cuts the batch itself."
)


class _Argument(NamedTuple):
    """An argument of the function, or an entry of a batch.

    Attributes:
        path: its path in the tree.
        counts: the rows of each of its arrays that is to be cut, by the leaf's number in the tree.
        is_flat: whether these arrays lie in it directly, as in most batches.
    """

    path: tuple[Any, ...]
    counts: dict[int, int]
    is_flat: bool

    def rows(self) -> int | None:
        """The rows that all its arrays have; None if they differ."""
        found = set(self.counts.values())
        return found.pop() if len(found) == 1 else None

    def may_be_a_batch(self, num_rows: int) -> bool:
        """Whether most of its arrays have `num_rows` rows: a batch with something else in it."""
        fitting = sum(count == num_rows for count in self.counts.values())
        return self.is_flat and 2 * fitting > len(self.counts)


def rows_differ(tree: Any, name: str | Names, axes: Any, kinds: Sequence[Any]) -> BatchError:
    """The error for row counts that differ; it says what to share, or which axes to swap.

    Args:
        tree: what was to be cut.
        name: what the tree is called, or the names of its leaves.
        axes: the in_axes that were given for it.
        kinds: for each leaf its kind, as in `Split`; an int is the axis of its rows.

    Raises:
        ArgumentError: some of the arrays are inside a sparse array.
    """
    refuse_sparse_rows(tree, kinds)
    graphs = jax.tree.leaves(tree, is_leaf=_is_batch_of_graphs)
    if any(map(_is_batch_of_graphs, graphs)):
        return BatchError(_GRAPHS)
    # If no argument as a whole has other rows, entries are compared, such as those of a batch.
    start = 1 if isinstance(name, str) else 2  # a call is (args, kwargs, ...)
    deepest = max(len(path) for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0])
    levels = (_at(depth, tree, kinds) for depth in range(start, deepest + 1))
    found = (_arguments_differ(tree, name, axes, arguments) for arguments in levels)
    more = _or_turn(tree, name, kinds) + _or_split(tree, name, kinds) + _or_join(tree)
    return BatchError(f"{next(filter(None, found))}{more}{_or_pad_graphs(tree, name, kinds)}")


def _or_join(tree: Any) -> str:
    """Advice for a batch that is cut already, as by `split_and_load` of MXNet."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, list))
    return _SLICES if any(isinstance(node, list) and _are_slices(node) for node in nodes) else ""


def _are_slices(arrays: Sequence[Any]) -> bool:
    shapes = {getattr(array, "shape", ()) for array in arrays}
    return len(shapes) > 1 and () not in shapes and len({shape[1:] for shape in shapes}) == 1


def _or_split(tree: Any, name: str | Names, kinds: Sequence[Any]) -> str:
    """Advice for several keys that every tower needs, such as one for each sample it draws."""
    for number, (leaf, kind) in enumerate(zip(jax.tree.leaves(tree), kinds, strict=True)):
        if isinstance(kind, int) and is_key(leaf):
            return (
                f" If every tower draws from all keys of {path_of(tree, number, name)}: pass one "
                f"key and split it in the function, jax.random.split(key, {leaf.shape[kind]})."
            )
    return ""


def _or_pad_graphs(tree: Any, name: str | Names, kinds: Sequence[Any]) -> str:
    """Advice for the edges of several graphs in one, which are no rows of a batch."""
    flat = jax.tree_util.tree_flatten_with_path(tree)[0]
    each = zip(flat, kinds, strict=True)
    names = [name_of(path, name) for (path, _), kind in each if isinstance(kind, int)]
    words = {re.split(r"\W", name.rstrip("']"))[-1] for name in names}
    if not any(ends <= words for ends in _EDGES):
        return ""
    return f" If several graphs are in one, a row must be a whole graph: {_PAD_GRAPHS}"


def _is_batch_of_graphs(node: Any) -> bool:
    return all(hasattr(node, name) for name in ("n_node", "n_edge", "senders", "receivers"))


def _arguments_differ(
    tree: Any, name: str | Names, axes: Any, arguments: Sequence[_Argument]
) -> str | None:
    """Names the arguments that seem not to be rows, since others agree on a number of rows."""
    agreeing = [one for one in arguments if one.rows() is not None]
    if not agreeing:
        return None
    votes = Counter(one.rows() for one in agreeing)
    if len(votes) > 1:
        del votes[1]  # such as the states of BatchNorm, (1, features), of two networks
    ranked = votes.most_common()
    # If votes are equal, the larger number: a batch has more rows than most weights have inputs.
    num_rows = max(count for count, n in ranked if n == ranked[0][1] and count is not None)
    mixed = [one for one in arguments if one.rows() is None and one.may_be_a_batch(num_rows)]
    no_rows = [one for one in arguments if one.rows() != num_rows and one not in mixed]
    if not no_rows:
        return None
    other = next(one for one in agreeing if one.rows() == num_rows)
    return (
        f"{_has_rows(tree, name, no_rows)} and {path_of(tree, min(other.counts), name)} has "
        f"{num_rows}: all split arrays need the same number of rows. If every tower needs the "
        f"whole of {listed([name_of(one.path, name) for one in no_rows])}: "
        f"{_wholes(tree, name, axes, no_rows)}.{_or_else(tree, name, axes, arguments, no_rows)}"
        f"{_or_fold(tree, name, no_rows, other)}"
    )


def _at(depth: int, tree: Any, kinds: Sequence[Any]) -> list[_Argument]:
    found: dict[tuple[Any, ...], _Argument] = {}
    pairs = zip(jax.tree_util.tree_flatten_with_path(tree)[0], kinds, strict=True)
    for number, ((path, leaf), kind) in enumerate(pairs):
        if isinstance(kind, int):
            own = tuple(path[:depth])
            is_flat = len(path) <= depth + 1
            one = found.get(own, _Argument(own, {}, is_flat))
            counts = {**one.counts, number: int(leaf.shape[kind])}
            found[own] = _Argument(own, counts, one.is_flat and is_flat)
    return list(found.values())


def _has_rows(tree: Any, name: str | Names, no_rows: Sequence[_Argument]) -> str:
    """Such as `q['w'] has 8 rows, q['b'] has 32`: one array for each number of rows."""
    counts = [pair for one in no_rows for pair in one.counts.items()]
    of_count = {count: n for n, count in reversed(counts)}
    told = [(n, count) for count, n in of_count.items()]
    told.sort()
    texts = [f"{path_of(tree, n, name)} has {count}" for n, count in told[:_SHOWN]]
    return ", ".join([f"{texts[0]} rows", *texts[1:]])


def _wholes(tree: Any, name: str | Names, axes: Any, shared: Sequence[_Argument]) -> str:
    if isinstance(name, str):
        return taken_out_of(name)
    return name.whole([one.path for one in shared], tree, axes)


def _or_else(
    tree: Any,
    name: str | Names,
    axes: Any,
    arguments: Sequence[_Argument],
    no_rows: Sequence[_Argument],
) -> str:
    """The opposite advice, if either of two groups of arguments may be the batch."""
    others = [one for one in arguments if one not in no_rows]
    counts = {one.rows() for one in no_rows}
    if len(counts) > 1 or None in counts or isinstance(name, str):
        return ""
    names = listed([name_of(one.path, name) for one in others])
    return f" If of {names}: {_wholes(tree, name, axes, others)}."


def _or_fold(tree: Any, name: str | Names, no_rows: Sequence[_Argument], other: _Argument) -> str:
    """Advice for one array with several rows to each row of the others, as FixMatch has."""
    counts = [pair for one in no_rows for pair in one.counts.items()]
    (number, count), num_rows = counts[0], other.rows()
    if len(counts) > 1 or num_rows is None or count <= num_rows or count % num_rows:
        return ""
    where = path_of(tree, number, name)
    times = count // num_rows
    shape = ", ".join(map(str, (num_rows, times, *jax.tree.leaves(tree)[number].shape[1:])))
    return (
        f" If {times} rows of {where} belong to each row of "
        f"{path_of(tree, min(other.counts), name)}: pass {where}.reshape({shape})."
    )


def _or_turn(tree: Any, name: str | Names, kinds: Sequence[Any]) -> str:
    """Advice for a time-major batch, if all arrays could have their rows on axis 0 or 1."""
    if not isinstance(name, str):
        return ""
    shapes = {n: x.shape for n, x in enumerate(jax.tree.leaves(tree)) if kinds[n] == 0}
    everywhere = set[int].intersection(*({*shape[:2]} for shape in shapes.values()))
    turned = [
        n for n, shape in shapes.items() for rows in everywhere if shape[0] != rows == shape[1]
    ]
    if not turned:
        return ""
    where = path_of(tree, turned[0], name)
    others = " and likewise the other time-major arrays" if len(turned) > 1 else ""
    return f" If the rows of {where} are on axis 1: pass np.swapaxes({where}, 0, 1){others}."

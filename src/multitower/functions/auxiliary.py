"""What a loss returns beside the loss: rows, means, and model state.

With Haiku, Keras and Equinox, state is an argument that comes back in `aux` with new values.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.tree_util import treedef_is_leaf

from multitower.checks.equations import Numbering, number_values
from multitower.functions.calls import Leaves
from multitower.functions.outputs import check_arrays, find_row_leaves, refuse_ragged
from multitower.models.equinox import is_equinox_state
from multitower.models.state import as_leaf, only_first, weigh
from multitower.towers.leaves import Constant, is_legacy_key, row_shapes
from multitower.towers.rows import SHARED, Split, Tower


class Auxiliary(NamedTuple):
    """The leaves of `aux` by number, sorted by how they are combined over towers.

    Attributes:
        by_row: leaves with one entry per row, which are concatenated.
        averaged: floats, which are averaged.
        first: leaves that are taken from tower 0: counters and keys of a state for the next call,
            and what is the same in every tower.
    """

    by_row: Leaves
    averaged: dict[int, Any]
    first: dict[int, Any]


def sort_aux(
    aux: Any,
    aux_of: Callable[[list[Any], Tower], Any],
    rows: Sequence[Any],
    is_state: Callable[[Any], bool],
    here: Tower,
    *,
    ragged: tuple[int, int] | None,
) -> Auxiliary:
    """Sorts the leaves of `aux`.

    Args:
        aux: what the loss returned.
        aux_of: `aux_of(rows, tower)` returns the same for other rows or another tower.
        rows: the rows of this tower.
        is_state: whether a subtree of `aux` is a state for the next call.
        here: the tower.
        ragged: (rows of the batch, number of towers) if the rows do not fill the towers evenly.

    Raises:
        OutputError: a leaf that cannot be combined over towers; the message names it.
    """
    check_arrays(aux, "aux")
    aux = jax.tree.map(jnp.asarray, aux)
    paths, treedef = jax.tree_util.tree_flatten_with_path(aux)
    flat = [leaf for _, leaf in paths]
    in_state = _leaves_in(aux, is_state)
    known = in_state | _known(flat, aux_of, rows, here, floats=ragged is not None)
    is_row = find_row_leaves(lambda rows: aux_of(rows, here), rows, aux, "aux", skip=known)
    sorted_aux = Auxiliary(Leaves({}, treedef), {}, {})
    for number, leaf in enumerate(flat):
        if is_row[number]:
            sorted_aux.by_row.by_number[number] = leaf
        elif number not in known:
            if ragged:
                where = f"aux{jax.tree_util.keystr(paths[number][0])}"
                raise refuse_ragged(f"{where} is not per example", *ragged)
            sorted_aux.averaged[number] = leaf
        elif jnp.issubdtype(leaf.dtype, jnp.inexact):
            sorted_aux.averaged[number] = weigh(leaf, here, rows[0].shape[0])
        else:
            sorted_aux.first[number] = only_first(leaf, here)
    return sorted_aux


def join_aux(rows: Leaves, averaged: dict[int, Any], first: dict[int, Any]) -> Any:
    """Puts `aux` together from leaves that were combined over towers."""
    leaves = {**rows.by_number, **averaged, **{n: as_leaf(leaf) for n, leaf in first.items()}}
    return jax.tree.unflatten(rows.treedef, [leaves[n] for n in range(rows.treedef.num_leaves)])


def state_structures(split: Split, argnums: Collection[int]) -> dict[int, Any]:
    """The structures of arguments that may be a state, by position: trees that are shared.

    Such an argument is a state if a tree of its structure comes back in `aux`. A bare array does
    not count, because every array has its structure.
    """
    kinds = iter(split.kinds)
    found: dict[int, Any] = {}
    for number, treedef in enumerate(split.treedef.children()[0].children()):
        every = [next(kinds) for _ in range(treedef.num_leaves)]
        own = {kind for kind in every if not isinstance(kind, Constant)}
        if number not in argnums and own == {SHARED} and not treedef_is_leaf(treedef):
            found[number] = treedef
    return found


def shared_keys(split: Split, args: Sequence[Any]) -> list[int]:
    """The positions of arguments that are a single key and are shared, by `in_axes` None."""
    kinds = iter(split.kinds)
    found: list[int] = []
    for number, treedef in enumerate(split.treedef.children()[0].children()):
        own = [next(kinds) for _ in range(treedef.num_leaves)]
        if (
            own == [SHARED]
            and treedef_is_leaf(treedef)
            and looks_like_key(jnp.asarray(args[number]))
        ):
            found.append(number)
    return found


def subtrees_like(tree: Any, structures: Collection[Any]) -> set[Any]:
    """Those of the structures that occur in a tree."""
    subtrees = jax.tree.leaves(tree, is_leaf=lambda sub: jax.tree.structure(sub) in structures)
    return {jax.tree.structure(sub) for sub in subtrees} & set(structures)


def is_state_of(structures: Collection[Any]) -> Callable[[Any], bool]:
    """Returns a test: whether a subtree has one of the structures, or is Equinox's state."""
    known = set(structures)
    return lambda sub: is_equinox_state(sub) or jax.tree.structure(sub) in known


def split_state(aux: Any, is_state: Callable[[Any], bool]) -> tuple[Any, Any]:
    """`aux` with the leaves that belong to a state alone, and `aux` without them."""
    leaves, treedef = jax.tree.flatten(aux)
    inside = _leaves_in(aux, is_state)
    state = [leaf if number in inside else None for number, leaf in enumerate(leaves)]
    rest = [None if number in inside else leaf for number, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, state), jax.tree.unflatten(treedef, rest)


def looks_like_key(leaf: Any) -> bool:
    """Whether a leaf, or its shape and dtype, is a typed key, or may be a legacy one."""
    return jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) or is_legacy_key(leaf)


def _known(
    flat: Sequence[Any],
    aux_of: Callable[[list[Any], Tower], Any],
    rows: Sequence[Any],
    here: Tower,
    *,
    floats: bool,
) -> set[int]:
    """The numbers of the leaves for which tower 0 has the value that one device would have.

    Some have the same value in every tower and for any rows, such as a counter that the loss closes
    over. Others are keys that do not depend on rows: tower 0 made them from the key of one device.

    Args:
        flat: the leaves.
        aux_of: as for `sort_aux`.
        rows: as for `sort_aux`.
        here: as for `sort_aux`.
        floats: whether to look at floats; if all towers are full, their mean is the same.
    """
    num_rows = rows[0].shape[0]
    keys = {number for number, leaf in enumerate(flat) if looks_like_key(leaf)}
    numbers = keys | {
        number
        for number, leaf in enumerate(flat)
        if (floats or not jnp.issubdtype(leaf.dtype, jnp.inexact)) and leaf.shape[:1] != (num_rows,)
    }
    if not numbers:
        return numbers  # saves two traces
    of_nothing, of_the_tower = made_of_no_rows(aux_of, rows, here)
    return (numbers & of_nothing) | (keys & of_the_tower)


def made_of_no_rows(
    outputs_of: Callable[[list[Any], Tower], Any],
    rows: Sequence[Any],
    here: Tower,
) -> tuple[set[int], set[int]]:
    """The numbers of the leaves that are the same for any rows, and for any number of them.

    Args:
        outputs_of: a function of a tower's rows.
        rows: arrays or shapes with rows on axis 0.
        here: the tower.

    Returns:
        Those that are the same in every tower; and those that depend on nothing but the tower's
        number.
    """
    num_rows = rows[0].shape[0]
    try:
        programs = [
            jax.make_jaxpr(outputs_of)(row_shapes(rows, size), here)
            for size in (num_rows, num_rows + 1)
        ]
    except Exception:  # a number of rows is written into the function: nothing is known
        return set(), set()
    numbering: Numbering = {}

    def same(tower: int | None) -> set[int]:
        given = [*[None] * len(rows), tower, None, None]
        these, those = (number_values(program, numbering, given) for program in programs)
        if len(these) != len(those):
            return set()
        # A value that depends on the number of rows differs with one row more.
        return {n for n, one in enumerate(these) if one is not None and one == those[n]}

    return same(None), same(-1)  # -1: no other value has this number


def _leaves_in(tree: Any, is_state: Callable[[Any], bool]) -> set[int]:
    """The numbers of the leaves that belong to a state."""
    found: set[int] = set()
    number = 0
    for sub in jax.tree.leaves(tree, is_leaf=is_state):
        size = jax.tree.structure(sub).num_leaves
        if is_state(sub):
            found.update(range(number, number + size))
        number += size
    return found

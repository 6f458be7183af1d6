"""Rows: which leaves of the arguments are cut into towers, along which axis, how many rows.

A leaf is *split* (an array with an axis of rows), *shared* (a number, a 0-d array, or an array
whose axis is None), a *key* (a typed PRNG key, or one of `jax.random.PRNGKey`; each tower gets a
different one), or a *constant* (a flag, a string or a function; part of the program).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from multitower.errors import ArgumentError, BatchError
from multitower.towers.leaves import Constant, is_constant, is_key, is_legacy_key, is_traced
from multitower.towers.placement import AXIS
from multitower.towers.refusals import (
    Names,
    path_of,
    refuse_donated,
    refuse_explicit_axes,
    refuse_foreign_array,
    refuse_lists_for_rows,
    refuse_numbers_for_rows,
    refuse_sparse_rows,
    refuse_what_is_no_array,
    refuse_what_is_no_number,
)
from multitower.towers.unequal_rows import rows_differ

# Folded into the keys of towers; documented, so that a draw can be repeated by hand.
_TOWERS = 0x746F7772

SHARED = "shared"
KEY = "key"


class Tower(NamedTuple):
    """What a tower program knows about itself.

    Attributes:
        number: the number of the tower, from 0, int32, shape ().
        num_rows: how many of its rows are real, int32, shape (); the others are copies.
        all_rows: how many real rows all towers have, int32, shape ().
    """

    number: Any
    num_rows: Any
    all_rows: Any

    @classmethod
    def shapes(cls) -> "Tower":
        """Shapes and dtypes of its numbers, to trace and compile programs for."""
        return cls(*[jax.ShapeDtypeStruct((), np.int32)] * 3)


Kind = int | str | Constant


@dataclass(frozen=True)
class Split:
    """How the leaves of a tree go to the towers; hashable, so that it can be part of a cache key.

    Attributes:
        treedef: the structure of the tree.
        kinds: for each leaf its row axis, `"shared"`, `"key"`, or the `Constant` that it is.
    """

    treedef: Any
    kinds: tuple[Kind, ...]

    def rebuild(self, shared: Sequence[Any], rows: Sequence[Any], tower: Tower) -> Any:
        """One tower's tree, from the shared leaves and its own rows (rows on axis 0)."""
        shared_left, rows_left = iter(shared), iter(rows)
        leaves: list[Any] = []
        for kind in self.kinds:
            if isinstance(kind, Constant):
                leaves.append(kind.value)
            elif kind == SHARED:
                leaves.append(next(shared_left))
            elif kind == KEY:
                leaves.append(key_of_tower(next(shared_left), tower))
            else:
                leaf = next(rows_left)
                leaves.append(leaf if kind == 0 else jnp.moveaxis(leaf, 0, int(kind)))
        tree = jax.tree.unflatten(self.treedef, leaves)
        refuse_sparse_rows(tree, self.kinds)
        return tree

    def row_paths(self, tree: Any) -> list[tuple[Any, ...]]:
        """The paths of the leaves that are cut, for messages; `tree` is one of this structure."""
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        each = zip(flat, self.kinds, strict=True)
        return [path for (path, _), kind in each if isinstance(kind, int)]


# What a data set is called. Its rows are read a few at a time, so its leaves may be tables of other
# libraries; these are no arrays for JAX.
_DATA_SET = "data"


class BatchParts(NamedTuple):
    """A tree taken apart.

    Attributes:
        split: which leaf is shared and which is split.
        shared: the shared leaves and the keys.
        rows: the split leaves, with their rows on axis 0.
        num_rows: the number of rows, the same in all of them.
    """

    split: Split
    shared: list[Any]
    rows: list[Any]
    num_rows: int


def take_apart(tree: Any, axes: Any, *, name: str | Names, constants: bool = False) -> BatchParts:
    """Sorts the leaves of a tree into shared ones and rows.

    Args:
        tree: any pytree of arrays, numbers and typed keys.
        axes: the row axis of every leaf, None for shared; a prefix of the tree, as in `jax.vmap`.
        name: what the tree is called in messages, such as `batch`; or what its leaves are called,
            where the user gives `in_axes`.
        constants: whether flags, strings and functions are accepted, as parts of the program.

    Returns:
        The parts; every split leaf has its rows on axis 0.

    Raises:
        ArgumentError: a leaf that can neither be split nor shared (an object; a string, a flag).
        BatchError: nothing to split, no rows, or row counts that differ.
    """
    leaves, treedef = jax.tree.flatten(tree)
    shared: list[Any] = []
    rows: list[Any] = []
    first, num_rows = 0, -1
    all_axes = axes_of_leaves(axes, tree, "in_axes")
    kinds = [
        Constant.of(leaf)
        if constants and is_constant(leaf)
        else _kind(leaf, axis, lambda number=number: path_of(tree, number, name))
        for number, (leaf, axis) in enumerate(zip(leaves, all_axes, strict=True))
    ]
    kinds = _with_legacy_keys(kinds, leaves)
    if name != _DATA_SET:
        for number, leaf in enumerate(leaves):
            if not isinstance(kinds[number], Constant):
                refuse_foreign_array(leaf, lambda number=number: path_of(tree, number, name))
    for number, (leaf, kind) in enumerate(zip(leaves, kinds, strict=True)):
        if isinstance(kind, Constant):
            continue
        if isinstance(kind, str):
            shared.append(leaf)
            continue
        count = int(leaf.shape[kind])
        if num_rows < 0:
            first, num_rows = number, count
        elif count != num_rows:
            raise rows_differ(tree, name, axes, kinds)
        rows.append(leaf if kind == 0 else jnp.moveaxis(leaf, kind, 0))
    if num_rows < 0:
        raise _nothing_to_split(name, KEY in kinds)
    refuse_lists_for_rows(tree, kinds, all_axes, name, axes)
    if any(k == SHARED and axis is not None for k, axis in zip(kinds, all_axes, strict=True)):
        refuse_numbers_for_rows(tree, all_axes, name, num_rows, axes)
    if num_rows == 0:
        raise BatchError(
            f"{path_of(tree, first, name)} has zero rows: a batch needs at least one. Skip empty "
            "batches."
        )
    return BatchParts(Split(treedef, tuple(kinds)), shared, rows, num_rows)


def real_rows(index: jax.Array, tower_rows: int, num_rows: jax.Array) -> jax.Array:
    """The real rows of tower `index`, int32, if `num_rows` rows fill the towers from the front."""
    return jnp.clip(num_rows - index * tower_rows, 0, tower_rows).astype(jnp.int32)


def key_of_tower(key: Any, tower: Tower) -> Any:
    """One tower's key. Tower 0 gets the key unchanged, so it draws what one device would draw.

    Every other tower folds in a constant of this library and then its number. The number alone is
    not enough: users and frameworks fold in numbers of layers and steps, and a tower would repeat
    those random numbers.

    Args:
        key: a typed key of any shape, or one of `jax.random.PRNGKey`.
        tower: the tower.
    """

    def fold(key: Any) -> Any:
        return jax.random.fold_in(jax.random.fold_in(key, _TOWERS), tower.number)

    if not is_key(key):
        return jnp.where(tower.number == 0, key, fold(key))
    folded = jax.vmap(fold)(key.reshape(-1)).reshape(key.shape) if key.ndim else fold(key)
    # Numbers, not keys: jax.debug_key_reuse counts a choice between two keys as a use of both.
    data = jnp.where(tower.number == 0, *map(jax.random.key_data, (key, folded)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(key))


def pad_rows(leaf: Any, size: int) -> Any:
    """Fills axis 0 up to `size` with copies of real rows, so that no tower sees invented data."""
    num_rows = leaf.shape[0]
    if num_rows == size:
        return leaf
    return leaf[np.arange(size) % num_rows]


def axes_of_leaves(axes: Any, tree: Any, name: str) -> list[int | None]:
    """The axis of every leaf, None for shared, from a prefix of the tree as in `jax.vmap`.

    Raises:
        ArgumentError: `axes` is not a prefix of the tree, or holds values other than int and None.
    """
    if isinstance(axes, int) and not isinstance(axes, bool):
        return [axes] * jax.tree.structure(tree).num_leaves
    # None is a leaf among the axes, and an empty branch in the tree.
    marked = jax.tree.map(
        lambda axis: SHARED if axis is None else axis, axes, is_leaf=lambda x: x is None
    )
    found: list[Any] = []

    def add(axis: Any, branch: Any) -> None:
        found.extend([axis] * jax.tree.structure(branch).num_leaves)

    try:
        # `jax.tree.broadcast` would put axes into the user's dataclasses, which may check arrays.
        jax.tree.map(add, marked, tree)
    except ValueError as error:
        raise ArgumentError(
            f"{name}={axes!r} does not fit: it must be an int, None, or a tree of these that is a "
            f"prefix of {jax.tree.structure(tree)}, as in jax.vmap."
        ) from error
    for axis in found:
        if axis != SHARED and (isinstance(axis, bool) or not isinstance(axis, int)):
            raise ArgumentError(
                f"{name} holds {axis!r}: use an int, or None for what is not split."
            )
    return [None if axis == SHARED else axis for axis in found]


def _kind(leaf: Any, axis: int | None, where: Callable[[], str]) -> Kind:
    if isinstance(leaf, jax.Array):
        refuse_donated(leaf, where)
        refuse_explicit_axes(leaf, where)
    elif isinstance(leaf, np.ndarray):
        refuse_what_is_no_number(leaf, where)
    else:
        refuse_what_is_no_array(leaf, where)
    ndim = len(getattr(leaf, "shape", ()))
    if axis is None:
        return SHARED
    if ndim == 0:
        return KEY if is_key(leaf) else SHARED
    if not -ndim <= axis < ndim:
        raise ArgumentError(
            f"{where()} has shape {tuple(leaf.shape)}: there is no axis {axis} to split. Its "
            f"in_axes must be in [{-ndim}, {ndim - 1}], or None to share it. "
            "The number of devices is devices=."
        )
    return axis % ndim


def _with_legacy_keys(kinds: list[Kind], leaves: list[Any]) -> list[Kind]:
    """Marks keys of `jax.random.PRNGKey`, uint32 arrays of shape (2,), among other arrays of rows.

    A batch of two rows is no exception, because half a key is of no use. But a NumPy array then
    counts as two rows, such as labels, because JAX makes keys as `jax.Array`s; and so does an array
    that `shard` has put on the devices, as the other rows, since it leaves keys where they are.
    """
    legacy = {
        number
        for number, (kind, leaf) in enumerate(zip(kinds, leaves, strict=True))
        if kind == 0 and isinstance(leaf, np.ndarray | jax.Array) and is_legacy_key(leaf)
    }
    others = [
        (leaves[number], kind)
        for number, kind in enumerate(kinds)
        if isinstance(kind, int) and number not in legacy
    ]
    if all(leaf.shape[kind] == 2 for leaf, kind in others):
        sharded = {_sharding_of(leaf) for leaf, _ in others} - {None}
        legacy = {
            number
            for number in legacy
            if not isinstance(leaves[number], np.ndarray)
            and _sharding_of(leaves[number]) not in sharded
        }
    if not legacy or not others:
        return kinds
    return [KEY if number in legacy else kind for number, kind in enumerate(kinds)]


def _sharding_of(leaf: Any) -> Any:
    """The sharding that `shard` gave an array; None for all others, such as those of JAX alone."""
    sharding = None if is_traced(leaf) else getattr(leaf, "sharding", None)
    is_ours = isinstance(sharding, NamedSharding) and sharding.mesh.axis_names == (AXIS,)
    return sharding if is_ours else None


def _nothing_to_split(name: str | Names, has_key: bool) -> BatchError:
    given = name if isinstance(name, str) else "the call"
    if has_key:
        text = (
            f"{given} has a key and no array to split: a key alone has no rows. For n draws pass n "
            "keys, jax.random.split(key, n), and draw with jax.vmap(draw)(keys)."
        )
        if isinstance(name, str):
            return BatchError(text)
        return BatchError(
            f"{text} If the function closes over its rows, it must take them as an argument; or "
            "tell mt.value_and_grad the name of its variable, such as in_axes={'batch': 0}."
        )
    text = (
        f"{given} has no array to split: its leaves are numbers, 0-d arrays or shared. Pass the "
        "rows as arrays with at least one axis, np.asarray of a list"
    )
    if isinstance(name, str):
        return BatchError(f"{text}.")
    return BatchError(
        f"{text}, and do not say in_axes=None for them. A loss that closes over its batch must "
        "take it as an argument, loss_fn(params, batch); or tell mt.value_and_grad the name of its "
        "variable, such as in_axes={'batch': 0}."
    )

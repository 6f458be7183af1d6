"""Model state over towers: what one call returns for the next, such as BatchNorm's averages.

Every tower gets the state whole and returns its own. Floats are averaged over towers, weighted by
real rows; everything else is tower 0's, so counters advance as they would on one device. Inside the
towers, keys differ. Tower 0 has the original key, so the returned key is that of one device too.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.towers.leaves import is_key, is_legacy_key
from multitower.towers.rows import Tower, key_of_tower


class Changed(NamedTuple):
    """Leaves of a state that a tower has changed, by their number among the leaves.

    Attributes:
        averaged: floats, times real rows / rows of a full tower; they belong to a job's means.
        first: leaves taken from tower 0, zeros in other towers; they belong to a job's sums.
    """

    averaged: dict[int, Any]
    first: dict[int, Any]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class _KeyData:
    """A key as numbers, which can be added up."""

    data: Any
    impl: Any = field(metadata={"static": True})


def enter(leaf: Any, tower: Tower) -> Any:
    """A leaf of the state as one tower gets it: tower 0 keeps its key, the others get new ones.

    Keys are typed ones of any shape, and uint32 arrays of shape (2,): `jax.random.PRNGKey`, and the
    seeds of Keras.
    """
    return key_of_tower(leaf, tower) if is_key(leaf) or is_legacy_key(leaf) else leaf


def sort_changes(
    given: Sequence[Any], new: Sequence[Any], here: Tower, tower_rows: int, source: str = "mean"
) -> Changed:
    """What a tower returns of its state: the leaves that it has changed.

    Args:
        given: the leaves that went in.
        new: the leaves that came out, in the same order; the same object means no change.
        here: the tower.
        tower_rows: rows of a full tower.
        source: `"mean"`, or `"first"` to take floats from tower 0 as well.
    """
    changed = Changed({}, {})
    for number, (old, leaf) in enumerate(zip(given, new, strict=True)):
        if leaf is old:
            continue
        if source == "mean" and jnp.issubdtype(leaf.dtype, jnp.inexact):
            changed.averaged[number] = weigh(leaf, here, tower_rows)
        else:
            changed.first[number] = only_first(leaf, here)
    return changed


def weigh(leaf: Any, here: Tower, tower_rows: int) -> Any:
    """A leaf times real rows / rows of a full tower, for a mean over all rows."""
    weight = here.num_rows.astype(float) / tower_rows
    # An empty tower has only copies of rows: its value does not count, not even a NaN.
    return jnp.where(weight > 0, leaf * weight.astype(leaf.dtype), jnp.zeros_like(leaf))


def only_first(leaf: Any, here: Tower) -> Any:
    """A leaf in tower 0, zeros in the others: summed over towers it is tower 0's."""
    if is_key(leaf):
        return _KeyData(only_first(jax.random.key_data(leaf), here), jax.random.key_impl(leaf))
    zero = jnp.zeros_like(leaf)
    if jnp.issubdtype(leaf.dtype, jnp.inexact):
        zero = -zero  # adding -0.0 changes no number, adding 0.0 would change -0.0
    return jnp.where(here.number == 0, leaf, zero)


def join(old: Any, changed: Changed) -> Any:
    """The state after a call: leaves that changed in a tower, from means and sums; others stay."""
    leaves, treedef = jax.tree.flatten(old)
    new = {**changed.averaged, **{n: as_leaf(leaf) for n, leaf in changed.first.items()}}
    return jax.tree.unflatten(treedef, [new.get(n, leaf) for n, leaf in enumerate(leaves)])


def as_leaf(total: Any) -> Any:
    """Tower 0's leaf, from the sum over towers of what `only_first` returned."""
    if isinstance(total, _KeyData):
        return jax.random.wrap_key_data(total.data, impl=total.impl)
    return total

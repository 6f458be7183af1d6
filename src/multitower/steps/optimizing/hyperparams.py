"""Finds the numbers that `optax.inject_hyperparams` keeps in an optimizer's state."""

from collections.abc import Iterator, Mapping
from typing import Any

import jax


def holds(node: Any) -> bool:
    """Whether a node of an optimizer's state is one of `optax.inject_hyperparams`."""
    return isinstance(getattr(node, "hyperparams", None), Mapping)


def holders(tree: Any) -> Iterator[Any]:
    """Yields the states of `optax.inject_hyperparams` in an optimizer's state, outer ones first."""
    for node in jax.tree.leaves(tree, is_leaf=holds):
        if holds(node):
            yield node
            yield from holders(getattr(node, "inner_state", ()))

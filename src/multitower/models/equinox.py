"""Equinox: a module is a pytree whose leaves may be anything; floats are its weights."""

import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import ArgumentError

_WEIGHT = "weight"
_FIXED = "fixed"
_STATE = "state"


def is_equinox(value: Any) -> bool:
    """Whether a value is an Equinox module or `eqx.nn.State`. Imports nothing."""
    equinox: Any = sys.modules.get("equinox")
    return equinox is not None and isinstance(value, equinox.Module | equinox.nn.State)


def is_equinox_state(value: Any) -> bool:
    """Whether a value is an `eqx.nn.State`."""
    return is_equinox(value) and isinstance(value, sys.modules["equinox"].nn.State)


class EquinoxParts(NamedTuple):
    """How to put a module together from its arrays.

    Attributes:
        treedef: the structure of the module.
        leaves: for every leaf `"weight"`, `"fixed"` or `"state"` if it is an array, otherwise its
            type and value.
    """

    treedef: Any
    leaves: tuple[str | tuple[type, Any], ...]

    @property
    def changes_in_place(self) -> bool:
        """False: a call returns a new `eqx.nn.State` and changes nothing in place."""
        return False

    def build(self, weights: Any, fixed: Any, state: Any) -> Any:
        """Makes a module of these arrays."""
        arrays: dict[str, Iterator[Any]] = {
            _WEIGHT: iter(jax.tree.leaves(weights)),
            _FIXED: iter(fixed),
            _STATE: iter(state),
        }
        leaves = [x[1] if isinstance(x, tuple) else next(arrays[x]) for x in self.leaves]
        return jax.tree.unflatten(self.treedef, leaves)

    def parameters_of(self, module: Any) -> Any:
        """Not needed, because a call changes none of them."""
        return ()

    def state_after(self, module: Any, state: Any) -> Any:
        """Returns `state`, which a call does not change."""
        return state

    def write(self, module: Any, state: Any) -> None:
        """Does nothing, because nothing has changed."""


def equinox_in_evaluation_mode(module: Any) -> Any:
    """A copy as `eqx.nn.inference_mode` makes it; also of the arrays that `eqx.partition` gives.

    In these arrays a flag is None. Here it is set to True, and `eqx.combine` takes that.

    Raises:
        ArgumentError: a flag that is not a leaf of the module's tree.
    """
    equinox: Any = sys.modules["equinox"]
    try:
        return equinox.tree_at(_flags, module, replace_fn=lambda _: True, is_leaf=_is_none)
    except (TypeError, ValueError) as error:
        raise ArgumentError(
            f"a layer of the {type(module).__name__} has an attribute inference that is not a leaf "
            "of the module, so eqx.nn.inference_mode cannot set it. Make it a plain field, "
            "inference: bool, without static=True; or give it another name."
        ) from error


def _flags(tree: Any) -> list[Any]:
    """The attributes `inference` in a tree, which `eqx.nn.inference_mode` sets."""
    is_inside = lambda node: node is not tree and hasattr(node, "inference")
    nodes = [x for x in jax.tree.leaves(tree, is_leaf=is_inside) if is_inside(x)]
    own = [tree.inference] if hasattr(tree, "inference") else []
    return [*own, *(flag for node in nodes for flag in _flags(node))]


def _is_none(leaf: Any) -> bool:
    return leaf is None


def take_equinox(module: Any) -> tuple[EquinoxParts, Any, Any, Any]:
    """Takes a module apart.

    Returns:
        How to put it together; its weights, as `eqx.partition` gives them; other arrays; its state.

    Raises:
        ArgumentError: a leaf that is neither an array nor hashable.
    """
    flat, treedef = jax.tree_util.tree_flatten_with_path(module)
    kinds = [_STATE if is_equinox_state(module) else _kind(path, leaf) for path, leaf in flat]
    weights = [
        leaf if kind == _WEIGHT else None for kind, (_, leaf) in zip(kinds, flat, strict=True)
    ]
    fixed, state = (
        [leaf for kind, (_, leaf) in zip(kinds, flat, strict=True) if kind == name]
        for name in (_FIXED, _STATE)
    )
    parts = EquinoxParts(treedef, tuple(kinds))
    return parts, jax.tree.unflatten(treedef, weights), fixed, state


def _kind(path: Any, leaf: Any) -> str | tuple[type, Any]:
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return _WEIGHT if jnp.issubdtype(leaf.dtype, jnp.inexact) else _FIXED
    try:
        hash(leaf)
    except TypeError as error:
        raise ArgumentError(
            f"the model's leaf {jax.tree_util.keystr(path)} is {type(leaf).__name__}, which is "
            "neither an array nor hashable: nothing compiled can be remembered by it. Make it an "
            "array, or a static field: eqx.field(static=True)."
        ) from error
    return type(leaf), leaf  # both: 1, 1.0 and True are equal

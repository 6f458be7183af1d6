"""average_gradients: the mean of gradients that were computed apart."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.reduction import evaluate, sum_tree
from multitower.errors import GradientError
from multitower.towers.leaves import is_traced, wide_dtype
from multitower.towers.refusals import refuse_what_is_no_array, refuse_what_is_no_number


def average_gradients(tower_grads: Sequence[Any]) -> Any:
    """The mean of gradients that were computed apart, one pytree per tower.

    The equivalent plain loop is `jax.tree.map(lambda *g: sum(g) / len(g), *tower_grads)`. This adds
    along the library's fixed tree, adds 16-bit floats in float32, and checks the gradients.

    Args:
        tower_grads: one pytree of float arrays per tower, all of the same structure and shapes;
            they may lie on different devices.

    Returns:
        Their mean, with the same structure, shapes and dtypes, on the device of the first one.

    Raises:
        GradientError: no towers; or a gradient that is None, not a float, sparse, or of another
            shape, dtype or structure than in tower 0; the message names its path.
        ArgumentError: a leaf that no device can hold, such as text or a masked array.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> mt.average_gradients([{"w": jnp.ones(2)}, {"w": 3 * jnp.ones(2)}])
        {'w': Array([2., 2.], dtype=float32)}

    Source: `average_gradients` of TensorFlow's CIFAR-10 multi-GPU tutorial.
    """
    if isinstance(tower_grads, Mapping) or not hasattr(tower_grads, "__iter__"):
        kind = type(tower_grads).__name__
        raise GradientError(
            f"average_gradients got one {kind}: pass a sequence with one pytree per tower, such as "
            "[gradients_0, gradients_1]."
        )
    towers = list(tower_grads)
    if not towers:
        raise GradientError("average_gradients got no towers: pass one pytree of gradients each.")
    flat = [_checked_gradients(tree, number) for number, tree in enumerate(towers)]
    for number, leaves in enumerate(flat[1:], start=1):
        _same_structure(flat[0], leaves, number)
    means = [_tree_mean([leaves[path] for leaves in flat]) for path in flat[0]]
    return jax.tree.unflatten(jax.tree.structure(towers[0]), means)


def _checked_gradients(tree: Any, number: int) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda x: x is None)
    leaves: dict[str, Any] = {}
    for path, leaf in flat:
        where = f"tower_grads[{number}]{jax.tree_util.keystr(path)}"
        if leaf is None:
            raise GradientError(
                f"{where} is None: this parameter has no gradient in tower {number}. Leave out of "
                "the parameters what the loss does not use, or return zeros for it."
            )
        if isinstance(leaf, np.ndarray) and leaf.dtype != jax.dtypes.float0:
            refuse_what_is_no_number(leaf, lambda where=where: where)
        elif not isinstance(leaf, jax.Array | np.ndarray):
            refuse_what_is_no_array(leaf, lambda where=where: where)
        array = jnp.asarray(leaf) if not isinstance(leaf, jax.Array) else leaf
        if array.dtype == jax.dtypes.float0 or not jnp.issubdtype(array.dtype, jnp.inexact):
            raise GradientError(
                f"{where} has dtype {array.dtype}, and gradients are floats. An integer here is a "
                "parameter that cannot be differentiated, or the indices of a sparse gradient: "
                "make that dense first (.todense()), indices cannot be averaged."
            )
        leaves[jax.tree_util.keystr(path)] = array
    return leaves


def _same_structure(first: dict[str, Any], other: dict[str, Any], number: int) -> None:
    for path in [*first, *other]:
        if path not in first or path not in other:
            lacking, having = (number, 0) if path in first else (0, number)
            raise GradientError(
                f"tower_grads[{having}]{path} has no counterpart in tower {lacking}: all towers "
                "must return gradients of the same structure."
            )
        if first[path].shape != other[path].shape or first[path].dtype != other[path].dtype:
            raise GradientError(
                f"tower_grads[{number}]{path} is {other[path].dtype}{list(other[path].shape)} and "
                f"{first[path].dtype}{list(first[path].shape)} in tower 0: all towers must return "
                "gradients of the same shapes and dtypes."
            )


def _tree_mean(leaves: list[Any]) -> Any:
    if not is_traced(leaves[0]):
        home = min(leaves[0].devices(), key=lambda device: device.id)
        leaves = jax.device_put(leaves, jax.sharding.SingleDeviceSharding(home))
    return _mean(leaves, len(leaves))


@jax.jit
def _mean(leaves: list[jax.Array], count: int) -> jax.Array:
    """One program for a leaf. The count is an argument: by a constant, XLA may multiply instead."""
    wide = wide_dtype(leaves[0].dtype)
    total = evaluate(sum_tree(0, len(leaves)), lambda i: leaves[i].astype(wide))
    return (total / count).astype(leaves[0].dtype)

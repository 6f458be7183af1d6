"""Mixed precision: what is computed in 16 bits, what stays in float32, and the loss scale.

Parameters and rows are cast on their way into the loss, so matrix products run in the narrow dtype.
Gradients come back through the cast, so they are as wide as the parameters.

In float16 small gradients become zero, so the loss is multiplied by a scale before it is
differentiated, and the mean gradient is divided by it. The scale is a power of two, so that
multiplying by it is exact. Where it makes gradients overflow, the step is skipped and the scale is
halved.

Source: Micikevicius et al. 2018, "Mixed Precision Training".
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import ArgumentError

FIRST_SCALE = 2.0**15
SMALLEST_SCALE = 1.0
# Larger than any useful scale. Without a limit, gradients that are all zero would let the scale
# grow out of the range of float32.
LARGEST_SCALE = 2.0**64
# Steps in a row with finite gradients, after which the scale is doubled.
GROWTH_PERIOD = 2000


def check_compute_dtype(dtype: Any) -> Any:
    """Checks `compute_dtype=`, and returns it as a NumPy dtype; None if nothing is cast.

    Raises:
        ArgumentError: not bfloat16, float16 or float32.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found not in (jnp.bfloat16, jnp.float16, jnp.float32):
        raise ArgumentError(
            f"compute_dtype={dtype!r}: say jnp.bfloat16 or jnp.float16, or leave it out."
        )
    return None if found == jnp.float32 else found


def check_loss_scale(dtype: Any, others: Mapping[str, Any]) -> None:
    """Refuses float16 with options for which a step cannot be skipped for all parameters at once.

    Args:
        dtype: from `check_compute_dtype`.
        others: options that exclude float16, by name, each true if it is set.

    Raises:
        ArgumentError: one of them is set.
    """
    if dtype != jnp.float16:
        return
    for name, value in others.items():
        if value:
            raise ArgumentError(
                f"compute_dtype=float16 and {name} exclude each other: float16 needs a loss scale, "
                "and a step whose gradients overflow is skipped by all parameters together. Use "
                f"compute_dtype=jnp.bfloat16, which needs none, or leave {name} out."
            )


def narrow(params: Any, dtype: Any) -> Any:
    """Parameters as the loss gets them: float32 and float64 leaves are cast to `dtype`."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_wide(leaf) else leaf, params)


def narrow_rows(batch: Any, dtype: Any) -> Any:
    """A batch as the loss gets it: float32 and float64 leaves with several numbers a row are cast.

    Leaves with one number a row, such as targets and weights of shape (rows,) or (rows, 1), keep
    their dtype.
    """
    several = lambda leaf: _is_wide(leaf) and math.prod(leaf.shape[1:]) > 1
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if several(leaf) else leaf, batch)


def as_given(new: Any, given: Any) -> Any:
    """A new model state with the dtypes of the one that the loss was given."""
    if jax.tree.structure(new) != jax.tree.structure(given):
        return new  # another check reports it
    is_float = lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jax.tree.map(
        lambda n, g: jnp.asarray(n, g.dtype) if is_float(n) and is_float(g) else n, new, given
    )


def fitting_scale(dtype: Any, given: Any) -> Any:
    """The loss scale for a state: the one that it has, or a first one; None without float16.

    Args:
        dtype: the dtype that the loss is computed in.
        given: the scale that the state has, or None.

    Returns:
        A dict of `"scale"`, float32, and `"good_steps"`, int32, the steps since its last change;
        None without float16.
    """
    if dtype != jnp.float16:
        return None
    return given or {"scale": np.float32(FIRST_SCALE), "good_steps": np.int32(0)}


def scaled(loss: jax.Array, loss_scale: Any) -> jax.Array:
    """The loss times the scale, to be differentiated in its place."""
    if loss_scale is None:
        return loss
    return loss * loss_scale["scale"].astype(loss.dtype)


def unscaled(tree: Any, loss_scale: Any) -> Any:
    """Gradients or losses divided by the scale."""
    if loss_scale is None:
        return tree
    factor = 1 / loss_scale["scale"]
    with jax.numpy_dtype_promotion("standard"):  # gradients of 16-bit parameters have 16 bits
        return jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), tree)


def next_scale(loss_scale: Any, is_finite: jax.Array) -> Any:
    """The scale of the next step: halved after gradients that are not finite, or doubled.

    It is doubled after `GROWTH_PERIOD` steps in a row with finite gradients.

    Args:
        loss_scale: the scale of this step, as from `fitting_scale`.
        is_finite: whether all of the mean gradient is finite, bool, shape ().
    """
    scale, good_steps = loss_scale["scale"], loss_scale["good_steps"] + 1
    grows = good_steps >= GROWTH_PERIOD
    higher = jnp.where(grows, jnp.minimum(2 * scale, LARGEST_SCALE), scale)
    lower = jnp.maximum(scale / 2, SMALLEST_SCALE)
    return {
        "scale": jnp.where(is_finite, higher, lower),
        "good_steps": jnp.where(is_finite & ~grows, good_steps, 0),
    }


def _is_wide(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) in (jnp.float32, jnp.float64)

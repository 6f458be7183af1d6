"""Mixed precision: what of a step is narrow, and what stays as wide as it is.

Parameters and rows are cast on their way into the loss, so matrix products run in the narrow dtype.
Gradients come back through the cast, so they are as wide as the parameters.
"""

from typing import Any

import jax
import jax.numpy as jnp

from multitower.errors import ArgumentError


def check_compute_dtype(dtype: Any) -> Any:
    """A narrow dtype as NumPy knows it; None if nothing is cast.

    Raises:
        ArgumentError: not one that a loss can be computed in.
    """
    if dtype is None:
        return None
    try:
        found = jnp.dtype(dtype)
    except TypeError:
        found = None
    if found == jnp.float16:
        raise ArgumentError(
            "compute_dtype=float16: small gradients become zero in it, and multitower does not "
            "scale losses. Use jnp.bfloat16, which has the range of float32."
        )
    if found not in (jnp.bfloat16, jnp.float32):
        raise ArgumentError(f"compute_dtype={dtype!r}: say jnp.bfloat16, or leave it out.")
    return found if found == jnp.bfloat16 else None


def narrow(params: Any, dtype: Any) -> Any:
    """Parameters as the loss gets them."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if _is_wide(leaf) else leaf, params)


def narrow_rows(batch: Any, dtype: Any) -> Any:
    """A batch as the loss gets it: one number for each row, as targets and weights are, stays."""
    several = lambda leaf: _is_wide(leaf) and leaf.ndim > 1
    return jax.tree.map(lambda leaf: leaf.astype(dtype) if several(leaf) else leaf, batch)


def as_given(new: Any, given: Any) -> Any:
    """A new model state with the dtypes of the one that the loss was given."""
    if jax.tree.structure(new) != jax.tree.structure(given):
        return new  # it is told elsewhere
    is_float = lambda leaf: jnp.issubdtype(jnp.result_type(leaf), jnp.floating)
    return jax.tree.map(
        lambda n, g: jnp.asarray(n, g.dtype) if is_float(n) and is_float(g) else n, new, given
    )


def _is_wide(leaf: Any) -> bool:
    return getattr(leaf, "dtype", None) in (jnp.float32, jnp.float64)

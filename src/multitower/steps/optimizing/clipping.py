"""Clipping by the global norm of the mean gradient: one factor for all leaves.

Squares are added up leaf by leaf, and the leaves in their order, so that the factor is the same
wherever it is computed. With blocks every tower adds up its own; then the towers' sums are added
along the tree of `reduction`.
"""

import functools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from multitower.engines.reduction import evaluate, sum_tree
from multitower.towers.leaves import wide_dtype


def leaf_squares(gradients: Any) -> jax.Array:
    """The sum of squares of the elements of each leaf, float32 or wider, shape (leaves,)."""
    leaves = [_real_parts(leaf) for leaf in jax.tree.leaves(gradients)]
    dtype = wide_dtype(*(part.dtype for parts in leaves for part in parts))
    square = lambda part: jnp.sum(jnp.square(part.astype(dtype)))
    found = [functools.reduce(operator.add, map(square, parts)) for parts in leaves]
    return jnp.stack(found) if found else jnp.zeros(0, dtype)


def add_towers(squares: jax.Array) -> jax.Array:
    """Sums shape (towers, leaves) over towers, in the same fixed order as all sums over towers."""
    return evaluate(sum_tree(0, len(squares)), lambda tower: squares[tower])


def global_norm(squares: jax.Array) -> jax.Array:
    """The global norm, shape (), from squares of shape (leaves,), added in the order of leaves."""
    if not len(squares):
        return jnp.zeros((), squares.dtype)
    total = functools.reduce(operator.add, [squares[leaf] for leaf in range(len(squares))])
    return jnp.sqrt(total)


def clipped(gradients: Any, squares: jax.Array, limit: float) -> Any:
    """Gradients scaled by one factor so that their global norm is at most `limit`.

    Args:
        gradients: any tree of floats.
        squares: the sums of squares of the whole leaves, shape (leaves,).
        limit: the largest norm, above 0.
    """
    # If the norm is infinite or NaN, leaves that are not finite become NaN, so that
    # `skip_nonfinite` finds them.
    factor = jnp.minimum(1, limit / global_norm(squares))

    def scaled(leaf: jax.Array) -> jax.Array:
        return (leaf.astype(wide_dtype(leaf.dtype)) * factor).astype(leaf.dtype)

    with jax.numpy_dtype_promotion("standard"):  # gradients may be narrower, and complex
        return jax.tree.map(scaled, gradients)


def _real_parts(leaf: jax.Array) -> list[jax.Array]:
    if jnp.issubdtype(leaf.dtype, jnp.complexfloating):
        return [leaf.real, leaf.imag]
    return [leaf]

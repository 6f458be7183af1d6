"""Rows of the whole batch inside of a tower: for losses that compare rows with each other."""

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from multitower.checks.problems import NO_ROWS
from multitower.errors import ArgumentError
from multitower.towers.placement import AXIS
from multitower.towers.surroundings import is_inside_a_tower

_T = TypeVar("_T")


def all_rows(x: _T) -> _T:
    """Returns the rows of all towers, in order: the rows of the whole batch.

    Use it in a loss that compares each row with all others, such as a contrastive loss. Inside a
    tower it is `jax.lax.all_gather(x, "towers", tiled=True)`; outside it is `x`. Gradients flow
    through it into the rows of all towers, so that they are those of the whole batch.

    Args:
        x: an array with rows on axis 0, or a pytree of them: embeddings, labels.

    Returns:
        The same tree, each array of shape (all rows, ...) and of its own dtype.

    Raises:
        ArgumentError: a leaf without an axis.
        OutputError: inside a loop or a branch of JAX; or the batch does not fill all towers evenly.

    Example:
        Each row is pulled to the next one of the whole batch, and pushed away from all others.

        >>> import jax, jax.numpy as jnp, numpy as np
        >>> import multitower as mt
        >>> def loss(w, x):
        ...     rows = mt.row_index(x)
        ...     similar = (x * w) @ mt.all_rows(x * w).T
        ...     right = similar[jnp.arange(len(x)), rows ^ 1]
        ...     return jax.nn.logsumexp(similar, axis=1) - right
        >>> x = np.arange(8, dtype=np.float32).reshape(4, 2) / 8
        >>> found = mt.grad(loss, devices=2)(1.0, x)
        >>> wanted = jax.jit(jax.grad(lambda w: loss(w, x).mean()))(1.0)
        >>> np.allclose(found, wanted)
        True

    Source: all-gathered negatives of SimCLR (Chen et al. 2020) and CLIP (Radford et al. 2021).
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(x)[0]:
        if not jnp.ndim(leaf):
            raise ArgumentError(
                f"all_rows was given x{jax.tree_util.keystr(path)} of shape (), which has no rows. "
                'Pass arrays with rows on axis 0; for numbers use jax.lax.all_gather(x, "towers").'
            )
    if not is_inside_a_tower():
        return x
    return jax.tree.map(lambda leaf: lax.all_gather(leaf, AXIS, tiled=True), x)


def row_index(x: Any) -> jax.Array:
    """Returns the positions of the rows of `x` in the whole batch.

    Inside tower `t` of `n` rows each it is `t * n + jnp.arange(n)`; outside it is
    `jnp.arange(len(x))`. Row i of `x` is row `row_index(x)[i]` of `all_rows(x)`. In `evaluate` and
    `predict` the batch is a chunk of `global_batch` rows.

    Args:
        x: an array with rows on axis 0, or a pytree of them.

    Returns:
        int32, shape (rows of x,).

    Raises:
        ArgumentError: `x` has no rows.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> mt.make_parallel(mt.row_index, devices=2)(jnp.zeros((4, 3)))
        Array([0, 1, 2, 3], dtype=int32)

    Source: the labels of CLIP's loss over all-gathered rows (Radford et al. 2021).
    """
    leaves = jax.tree.leaves(x)
    if not leaves or not jnp.ndim(leaves[0]):
        raise ArgumentError(
            f"row_index was given {type(x).__name__} without an axis of rows. Pass an array with "
            "rows on axis 0, such as the batch or its embeddings."
        )
    num_rows = jnp.shape(leaves[0])[0]
    own = jnp.arange(num_rows, dtype=jnp.int32)
    if not is_inside_a_tower():
        return own
    # For the first look: inside jax.vmap over the rows this is empty and has an axis of rows.
    checkpoint_name(lax.slice_in_dim(leaves[0], 0, 0), NO_ROWS)
    return own + lax.axis_index(AXIS) * num_rows

"""Marks: places where the user allows the program to be cut."""

from typing import Any, TypeVar

import jax
from jax.ad_checkpoint import checkpoint_name

_NAME = "multitower.cut"
_T = TypeVar("_T")


def cut(tree: _T) -> _T:
    """Marks a place where `train_step` and `make_parallel` with `stages=S` may cut the model.

    Everywhere else it is the identity: `mt.cut(h)` equals `h`. Each mark that the result depends
    on ends a stage and begins the next one. If there are more than `stages - 1` marks, those are
    used that give the stages equal work.

    Args:
        tree: an array or a pytree of arrays that passes from one part of the model to the next,
            such as the activations of a block. All arrays of one call are cut together.

    Returns:
        The same values.

    Raises:
        ArgumentError: raised at the first batch with `stages=`, not by this call: a mark is inside
            a loop, a branch or a `custom_vjp`, or there are fewer than `stages - 1` marks.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> def model(weights, x):
        ...     for w in weights:
        ...         x = mt.cut(jnp.tanh(x @ w))
        ...     return x
        >>> model([jnp.eye(2)] * 3, jnp.zeros((1, 2))).shape
        (1, 2)
    """
    return jax.tree.map(
        lambda leaf: checkpoint_name(leaf, _NAME) if isinstance(leaf, jax.Array) else leaf, tree
    )


def is_mark(equation: Any) -> bool:
    """Whether an equation of a jaxpr is a mark."""
    return equation.primitive.name == "name" and equation.params.get("name") == _NAME

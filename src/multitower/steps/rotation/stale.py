"""Rules for stale gradients: smaller updates, and less momentum.

Sources: Zhang, Gupta, Lian, Liu 2016, "Staleness-aware Async-SGD" (the learning rate over the
staleness); Mitliagkas, Zhang, Hadjis, Re 2016, "Asynchrony begets Momentum" (updates of M workers
that do not wait have an implicit momentum of 1 - 1/M, and explicit momentum comes on top of it).
"""

import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from multitower.errors import ArgumentError
from multitower.steps.optimizing.optimizer import holders, holds, takes_extras
from multitower.steps.rotation.options import RotationOptions

if TYPE_CHECKING:
    import optax

# Optax's names of momentum; none of its optimizers has both.
_NAMES = ("momentum", "b1")


def for_stale_gradients(
    optimizer: "optax.GradientTransformation", options: RotationOptions, staleness: Any
) -> "optax.GradientTransformation":
    """The optimizer with the rules for stale gradients applied to its updates.

    Args:
        optimizer: an optax optimizer.
        options: the rules: `stale_scale` and `momentum_correction`.
        staleness: updates made since the parameters of the gradient, int32, shape ().
    """
    import optax  # noqa: PLC0415 (importing stays quick)

    if options.stale_scale is None and not options.momentum_correction:
        return optimizer
    factor = None if options.stale_scale is None else options.stale_scale(staleness)

    @functools.wraps(optimizer.update)
    def update(*args: Any, **extras: Any) -> tuple[Any, Any]:
        gradients, opt_state, *params = args
        kept = momenta_in(opt_state) if options.momentum_correction else []
        lowered = [_lowered(momentum, staleness) for momentum in kept]
        given = _with_momenta(opt_state, iter(lowered)) if kept else opt_state
        updates, new = optimizer.update(gradients, given, *params, **extras)
        if kept:
            new = _with_momenta(new, iter(kept))
        if factor is not None:
            with jax.numpy_dtype_promotion("standard"):
                updates = jax.tree.map(lambda leaf: (leaf * factor).astype(leaf.dtype), updates)
        return updates, new

    is_more = takes_extras(optimizer)
    kind = optax.GradientTransformationExtraArgs if is_more else optax.GradientTransformation
    return kind(optimizer.init, update)


def momenta_in(opt_state: Any) -> list[Any]:
    """The momenta that `optax.inject_hyperparams` keeps in an optimizer's state.

    Raises:
        ArgumentError: the state holds no momentum, or a schedule sets it.
    """
    found: list[Any] = []
    for _, node in holders(opt_state):
        name = _name_in(node)
        if name in getattr(node, "hyperparams_states", {}):
            raise ArgumentError(
                f"momentum_correction=True, and the optimizer's {name} is a schedule, which would "
                f"overrule it: give {name} as a number, or leave momentum_correction out."
            )
        found += [] if name is None else [node.hyperparams[name]]
    if not found:
        raise ArgumentError(
            "momentum_correction=True, and the state of the optimizer does not hold its momentum: "
            "make it with optax.inject_hyperparams, such as "
            "optax.inject_hyperparams(optax.sgd)(learning_rate=0.05, momentum=0.9), or leave "
            "momentum_correction out."
        )
    return found


def _lowered(momentum: Any, staleness: Any) -> Any:
    """A momentum less the implicit momentum of the staleness, at least 0."""
    with jax.numpy_dtype_promotion("standard"):  # a momentum has the dtype of the parameters
        return jnp.maximum(momentum - staleness / (1 + staleness), 0).astype(momentum.dtype)


def _name_in(node: Any) -> str | None:
    return next((name for name in _NAMES if name in node.hyperparams), None)


def _with_momenta(tree: Any, momenta: Iterator[Any]) -> Any:
    """The optimizer's state with these momenta, in the order of `momenta_in`."""

    def changed(node: Any) -> Any:
        if not holds(node):
            return node
        if (name := _name_in(node)) is not None:
            node = node._replace(hyperparams={**node.hyperparams, name: next(momenta)})
        if hasattr(node, "inner_state"):
            node = node._replace(inner_state=_with_momenta(node.inner_state, momenta))
        return node

    return jax.tree.map(changed, tree, is_leaf=holds)

"""Metrics of the update itself: the norm of the mean gradient, and the learning rate."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from multitower.errors import ArgumentError, OutputError
from multitower.steps.optimizing.clipping import global_norm
from multitower.steps.optimizing.optimizer import holders
from multitower.steps.parts import StepParts

NORM = "gradient_norm"
RATE = "learning_rate"


def check_extra_metrics(names: Any, sync_every: Any) -> tuple[str, ...]:
    """Checks `extra_metrics=`, and returns the names as a tuple.

    Raises:
        ArgumentError: an unknown name, or local updates, for which these metrics have no meaning.
    """
    if isinstance(names, str) or not isinstance(names, Sequence) or set(names) - {NORM, RATE}:
        raise ArgumentError(
            f"extra_metrics={names!r}: give a list of names, {NORM!r} and {RATE!r} or one of them."
        )
    if names and sync_every is not None:
        raise ArgumentError(
            f"extra_metrics= and sync_every={sync_every} exclude each other: with local updates "
            "every tower has a gradient and a schedule of its own, and there is no mean gradient. "
            "Leave extra_metrics out."
        )
    return tuple(names)


def check_learning_rate(step: StepParts, params: Any) -> None:
    """Refuses an optimizer whose learning rate is wanted as a metric and cannot be read.

    Raises:
        ArgumentError: its state does not hold it, or holds several.
    """
    if RATE in step.extra_metrics:
        learning_rate_in(jax.eval_shape(step.optimizer.init, params))


def extra_metrics(step: StepParts, opt_state: Any, squares: Any) -> dict[str, jax.Array]:
    """The `extra_metrics` of an update, float32, shape ().

    Args:
        step: what the step is made of.
        opt_state: the optimizer's state after the update.
        squares: sums of squares of the mean gradient, shape (leaves,); only for its norm.
    """
    found: dict[str, jax.Array] = {}
    if NORM in step.extra_metrics:
        found[NORM] = global_norm(squares).astype(jnp.float32)
    if RATE in step.extra_metrics:
        found[RATE] = jnp.asarray(learning_rate_in(opt_state)).astype(jnp.float32)
    return found


def refuse_taken_names(step: StepParts, metrics: Mapping[str, Any]) -> None:
    """Refuses metrics of the loss that have the name of an extra metric.

    Raises:
        OutputError: a metric of the loss is named like an extra metric.
    """
    for name in step.extra_metrics:
        if name in metrics:
            raise OutputError(
                f"the loss returns a metric {name!r}, and extra_metrics has one of that name: "
                "rename it, or leave it out of extra_metrics."
            )


def learning_rate_in(opt_state: Any) -> Any:
    """The learning rate that `optax.inject_hyperparams` keeps in an optimizer's state.

    Raises:
        ArgumentError: the state holds no learning rate, or several.
    """
    found = [node.hyperparams[RATE] for _, node in holders(opt_state) if RATE in node.hyperparams]
    if len(found) != 1:
        many = f"holds {len(found)} of them" if found else "does not hold it"
        raise ArgumentError(
            f"extra_metrics has {RATE!r}, and the state of the optimizer {many}: wrap one "
            "optimizer, such as optax.inject_hyperparams(optax.adam)(learning_rate=schedule), or "
            f"leave {RATE!r} out."
        )
    return found[0]

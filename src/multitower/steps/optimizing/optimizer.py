"""Calls an optimizer's update, with the loss if it takes that; finds numbers in its state."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax

from multitower.errors import ArgumentError

if TYPE_CHECKING:
    import optax


def call_update(
    optimizer: "optax.GradientTransformation",
    gradients: Any,
    opt_state: Any,
    params: Any,
    loss: Any,
) -> tuple[Any, Any]:
    """Calls an optimizer's update.

    Args:
        optimizer: an optax optimizer.
        gradients: the mean gradient, a tree like `params`.
        opt_state: the optimizer's state.
        params: the parameters.
        loss: passed as `value`, with the gradients as `grad`, to optimizers that take them.

    Returns:
        Updates of the parameters, and the new state.

    Raises:
        ArgumentError: the optimizer needs more than this, such as the loss as a function, or the
            gradients of single rows.
    """
    import optax  # noqa: PLC0415 (half of the time of `import multitower`, needed here first)

    is_private = lambda node: isinstance(node, optax.contrib.DifferentiallyPrivateAggregateState)
    if any(map(is_private, jax.tree.leaves(opt_state, is_leaf=is_private))):
        # It would take the first axis of a parameter for the rows, and clip that.
        raise ArgumentError(
            "the optimizer needs the gradient of every row, as optax.contrib.dpsgd does, and "
            "train_step gives it their mean. Use it in a loop of your own: gradients = "
            "mt.make_parallel(jax.vmap(jax.grad(loss_of_row), (None, 0)), in_axes=(None, 0))"
            "(params, batch), then optimizer.update. Or clip every row's gradient inside the loss, "
            "by a backward rule (jax.custom_vjp), and add noise with optax.add_noise."
        )
    extras = {"value": loss, "grad": gradients}
    if takes_extras(optimizer):
        taken = inspect.signature(optimizer.update).parameters
        if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
            extras = {name: extra for name, extra in extras.items() if name in taken}
    else:
        extras = {}
    try:
        return optimizer.update(gradients, opt_state, params, **extras)
    except (AttributeError, TypeError, ValueError) as error:
        needed = _needed(str(error))
        if needed is None:
            raise
        raise ArgumentError(
            f"the optimizer needs {needed}, and train_step gives it the gradients, its state, the "
            "parameters and the value of the loss. Use it in a loop of your own: loss, gradients = "
            "mt.value_and_grad(loss_fn)(params, batch), then optimizer.update."
        ) from error


def takes_extras(optimizer: "optax.GradientTransformation") -> bool:
    """Whether an optimizer's update takes more than gradients, state and parameters."""
    import optax  # noqa: PLC0415 (see call_update)

    # `MultiSteps` does, and so does the plain transformation that it makes of itself.
    owner = getattr(optimizer.update, "__self__", None)
    is_of_kind = isinstance(optimizer, optax.GradientTransformationExtraArgs)
    return is_of_kind or isinstance(owner, optax.MultiSteps)


# Arguments that optax's optimizers report as missing: those of L-BFGS, Sophia and SAM, and of
# others with an argument of their own.
_FUNCTIONS = {
    "value_fn": "the loss as a function of the parameters, value_fn",
    "obj_fn": "the loss as a function of the parameters, obj_fn",
    "grad_fn": "the gradient as a function of the parameters, grad_fn",
}


def _needed(message: str) -> str | None:
    """The argument that an optimizer lacks, read from its error; None for any other error."""
    for name, words in _FUNCTIONS.items():
        if re.search(rf"\b{name}\b", message):
            return words
    if "LookaheadParams" in message or re.search(r"no attribute '?fast\b", message):
        return "fast and slow parameters, optax.LookaheadParams"
    found = re.search(r"missing .* required keyword-only arguments?: (.*)", message)
    return f"more arguments, {found[1].rstrip('.')}" if found else None


def holds(node: Any) -> bool:
    """Whether a node of an optimizer's state is one of `optax.inject_hyperparams`."""
    return isinstance(getattr(node, "hyperparams", None), Mapping)


def holders(tree: Any) -> Iterator[Any]:
    """Yields the states of `optax.inject_hyperparams` in an optimizer's state, outer ones first."""
    for node in jax.tree.leaves(tree, is_leaf=holds):
        if holds(node):
            yield node
            yield from holders(getattr(node, "inner_state", ()))

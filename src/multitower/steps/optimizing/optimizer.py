"""Calls an optimizer's update, with the loss if it takes that; finds numbers in its state."""

import inspect
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from multitower.errors import ArgumentError, StateError

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
        StateError: the state is of another optimizer or of other parameters.
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
            check_opt_state(optimizer, params, opt_state)
            raise
        raise ArgumentError(
            f"the optimizer needs {needed}, and train_step gives it the gradients, its state, the "
            "parameters and the value of the loss. Use it in a loop of your own: loss, gradients = "
            "mt.value_and_grad(loss_fn)(params, batch), then optimizer.update."
        ) from error


def check_opt_state(optimizer: "optax.GradientTransformation", params: Any, opt_state: Any) -> None:
    """Refuses an optimizer's state that is not like the one that its `init` makes.

    Args:
        optimizer: the optimizer of the step.
        params: the parameters, arrays or shapes.
        opt_state: the state that was given, arrays or shapes.

    Raises:
        StateError: it has other leaves, or leaves of other shapes; the message names the first.
    """
    shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(jnp.shape(p), jnp.result_type(p)), params)
    wanted, given = _shapes(jax.eval_shape(optimizer.init, shapes)), _shapes(opt_state)
    for path in [*wanted, *given]:
        if path not in given:
            what = f"opt_state{path} is missing"
        elif path not in wanted:
            what = f"opt_state{path} does not belong to it"
        elif wanted[path] != given[path]:
            what = f"opt_state{path} has shape {given[path]} and not {wanted[path]}"
        else:
            continue
        raise StateError(
            "state.opt_state is not the state of this step's optimizer for these parameters: "
            f"{what}. Begin a new one: state.replace(opt_state=optimizer.init(state.params)), and "
            "with sync_every= also local=None. Or call step.init(state.params)."
        )


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    flat = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): jnp.shape(leaf) for path, leaf in flat}


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


def holders(tree: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """The states of `optax.inject_hyperparams` in an optimizer's state, outer ones first.

    Args:
        tree: the optimizer's state.
        where: its name, with which the place of each of them begins.

    Yields:
        Where in the tree it is, such as `.inner_states['head'].inner_state`, and the state.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=holds):
        if holds(node):
            place = where + jax.tree_util.keystr(path)
            yield place, node
            yield from holders(getattr(node, "inner_state", ()), f"{place}.inner_state")

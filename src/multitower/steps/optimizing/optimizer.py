"""An optimizer's update, with what it looks at beside the gradients."""

import inspect
from typing import TYPE_CHECKING, Any

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
        gradients: as its update takes them.
        opt_state: likewise.
        params: likewise.
        loss: for optimizers that take `value`; others are not given it, nor `grad`.

    Returns:
        Updates of the parameters, and the new state.
    """
    import optax  # noqa: PLC0415 (half of the time of `import multitower`, needed here first)

    extras = {"value": loss, "grad": gradients}
    if isinstance(optimizer, optax.GradientTransformationExtraArgs):
        taken = inspect.signature(optimizer.update).parameters
        if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
            extras = {name: extra for name, extra in extras.items() if name in taken}
    else:
        extras = {}
    return optimizer.update(gradients, opt_state, params, **extras)

"""Fields: the contents of a training state, as a plain pytree."""

from typing import Any, NamedTuple

import jax

from multitower.towers.leaves import device_dtype


class Fields(NamedTuple):
    """The contents of a training state, as a plain pytree; the attributes of a `TrainState`."""

    step: Any
    params: Any
    opt_state: Any
    ema_params: Any
    model_state: Any
    rng: Any
    local: Any = None
    loss_scale: Any = None


def shapes_of(tree: Any) -> Any:
    """`jax.ShapeDtypeStruct` for each array of a tree, with the dtype that it has on a device."""
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(
            x.shape, device_dtype(x), weak_type=getattr(x, "weak_type", False)
        ),
        tree,
    )

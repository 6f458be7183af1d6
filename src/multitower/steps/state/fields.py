"""Fields: the contents of a training state, as a plain pytree."""

from typing import Any, NamedTuple


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

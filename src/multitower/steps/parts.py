"""What a training step is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax

from multitower.functions.objective import Reduction
from multitower.steps.loss import LossFunction

if TYPE_CHECKING:
    import optax

EmaDecay = float | Callable[[jax.Array], Any]


@dataclass(frozen=True)
class StepParts:
    """What a training step is made of, apart from where it runs."""

    loss: LossFunction
    optimizer: "optax.GradientTransformation"
    ema_decay: EmaDecay | None
    model_state_from: Literal["mean", "first"]
    diagnostics: bool
    skip_nonfinite: bool
    clip_norm: float | None
    reduction: Reduction

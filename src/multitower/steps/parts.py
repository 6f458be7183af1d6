"""What a training step is made of."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax

from multitower.functions.objective import Reduction
from multitower.steps.loss import LossFunction
from multitower.towers.rows import BatchParts, Split

if TYPE_CHECKING:
    import optax

EmaDecay = float | Callable[[jax.Array], Any]


class ShardOptions(NamedTuple):
    """What is split over the devices beside the optimizer's state and the moving average.

    Attributes:
        params: whether the parameters are split, too.
    """

    params: bool


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
    extra_metrics: tuple[str, ...] = ()


class Batches(NamedTuple):
    """The batches that a runner is made for.

    Attributes:
        first: one of them.
        tower_rows: rows of a full tower.
        has_weights: whether the loss is a ratio, whose weights must be known first.
        must_be_full: whether every tower must have `tower_rows` real rows.
    """

    first: BatchParts
    tower_rows: int
    has_weights: bool
    must_be_full: bool

    @property
    def split(self) -> Split:
        """Which of their leaves are rows."""
        return self.first.split


class Looked(NamedTuple):
    """What tracing a loss once has shown.

    Attributes:
        averaged: names a result that the loss averages over rows itself, such as "a scalar loss";
            None if all results have one entry per row.
        meets: names the place where towers exchange values in it; None if they do not.
        num_weights: how many weights its gradients need.
        program: with several processes, what the loss returns, in words, and the checksum of its
            program.
        copies_count_in: the results in which copies of rows count, where these fill up a tower.
    """

    averaged: str | None
    meets: str | None
    num_weights: int
    program: tuple[str, int] = "", 0
    copies_count_in: str = ""

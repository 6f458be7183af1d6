"""The loss of a training step: which extras it takes, and what it returns."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from multitower.errors import ArgumentError, OutputError
from multitower.outputs import check_metrics


class LossOutput(NamedTuple):
    """A loss function's result, with nothing left out."""

    loss: Any
    metrics: Any
    model_state: Any


@dataclass(frozen=True)
class LossFunction:
    """A user's loss, called with what it asks for.

    Attributes:
        fn: `fn(params, batch)`, optionally with keyword-only `rng` and `model_state`.
        takes_rng: it wants the tower's key.
        takes_model_state: it wants the model state, and returns a new one.
    """

    fn: Callable[..., Any]
    takes_rng: bool
    takes_model_state: bool

    @classmethod
    def of(cls, fn: Callable[..., Any]) -> "LossFunction":
        """Reads from the signature what the loss takes.

        Raises:
            ArgumentError: `fn` is no function.
        """
        if not callable(fn):
            raise ArgumentError(
                f"the loss is {fn!r}: train_step takes a function loss_fn(params, batch)."
            )
        try:
            parameters = inspect.signature(fn).parameters.values()
        except (TypeError, ValueError):  # some builtins and C functions tell nothing
            return cls(fn, takes_rng=False, takes_model_state=False)
        names = {p.name for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}
        return cls(fn, "rng" in names, "model_state" in names)

    def __call__(self, params: Any, batch: Any, rng: Any, model_state: Any) -> LossOutput:
        """Calls the loss.

        Raises:
            OutputError: it returned something else than it should.
        """
        extras: dict[str, Any] = {}
        if self.takes_rng:
            extras["rng"] = rng
        if self.takes_model_state:
            extras["model_state"] = model_state
        output = self.fn(params, batch, **extras)
        return self._complete(output, model_state)

    def _complete(self, output: Any, model_state: Any) -> LossOutput:
        given: list[Any] = list(output) if isinstance(output, tuple) else [output]
        if self.takes_model_state and len(given) != 3:
            raise OutputError(
                f"the loss takes model_state, so it must return (loss, metrics, model_state); it "
                f"returned {len(given)} value(s). Return {{}} for no metrics."
            )
        if not self.takes_model_state and len(given) not in (1, 2):
            raise OutputError(
                f"the loss returned {len(given)} values: return loss or (loss, metrics); to hand "
                "on model state, take it as keyword-only argument: loss_fn(params, batch, *, "
                "model_state)."
            )
        metrics = given[1] if len(given) > 1 else {}
        check_metrics(metrics)
        return LossOutput(given[0], metrics, given[-1] if len(given) == 3 else model_state)

"""The test phase between training steps: what it is, and when it is due."""

from collections.abc import Callable
from typing import Any

from multitower.errors import ArgumentError, warn, whole_number
from multitower.steps.state.train_state import TrainState
from multitower.training.fitting.early_stopping import Patience


class TestPhase:
    """The function to call between steps, and how often.

    Args:
        evaluate: a function of the state; None for no test phase.
        every: steps from one call to the next; 0 for never.
        patience: decides after a call whether the run ends; None without early stopping.
        is_made: whether the test phase of the step at which the run resumes is known to be made.

    Raises:
        ArgumentError: `every` is not a whole number, or it is given without `evaluate`.
    """

    __test__ = False  # pytest would collect a class of this name

    def __init__(
        self,
        evaluate: Callable[[TrainState], Any] | None,
        every: int,
        patience: Patience | None = None,
        *,
        is_made: bool = False,
    ) -> None:
        every = whole_number("evaluate_every", every, 0)
        if every and not callable(evaluate):
            raise ArgumentError(
                f"evaluate_every={every}: 0 for never; else pass evaluate=, a function of the "
                "state."
            )
        self._evaluate = evaluate
        self._every = every
        self._patience = patience
        self._is_made = is_made

    def is_due(self, number: int) -> bool:
        """Whether to call it after this step."""
        return self._every > 0 and number % self._every == 0

    def warn_if_never_due(self, first: int, steps: int) -> None:
        """Warns of a fit from step `first` to step `steps` without a test phase."""
        every, begins_with_one = self._every, first and self.is_due(first)
        if every and first // every == steps // every and not begins_with_one:
            warn(
                f"evaluate_every={every}: this fit goes from step {first} to step {steps} and has "
                "no test phase on its way. Pass a smaller number, or evaluate_every=0 if you want "
                "none."
            )

    def again(self, first: int, state: TrainState) -> str | None:
        """Calls it at the step at which a run resumes, if it is due there; returns as `run`.

        The run may have ended between its save and this test phase. If it was made before, it gives
        the same scores again. A phase that is known to be made is not repeated, unless early
        stopping has not counted it, because its rule has changed.
        """
        if not (first and self.is_due(first)):
            return None
        patience = self._patience
        if self._is_made and (patience is None or patience.has_counted(first)):
            return None if patience is None else patience.reason()
        return self.run(state)

    def counted(self) -> dict[str, Any]:
        """The counts of early stopping, as JSON values; empty without it."""
        return {} if self._patience is None else self._patience.kept()

    def run(self, state: TrainState) -> str | None:
        """Calls it; returns the reason to end the run early, or None."""
        assert self._evaluate is not None
        self._evaluate(state)
        return None if self._patience is None else self._patience.reason()

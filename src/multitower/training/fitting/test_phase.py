"""The test phase between training steps: what it is, and when it is due."""

from collections.abc import Callable
from typing import Any

from multitower.errors import ArgumentError
from multitower.steps.state.train_state import TrainState
from multitower.training.fitting.early_stopping import Patience


class TestPhase:
    """What is to be called between steps, and how often.

    Args:
        evaluate: a function of the state; None for none.
        every: steps from one call to the next; 0 for never.
        patience: what decides after a call whether the run ends; None if it never does.
        is_made: whether the run goes on from a step whose call is known to have been made.

    Raises:
        ArgumentError: `every` is negative, or there is nothing to call.
    """

    __test__ = False  # pytest takes classes of such names for its own

    def __init__(
        self,
        evaluate: Callable[[TrainState], Any] | None,
        every: int,
        patience: Patience | None = None,
        *,
        is_made: bool = False,
    ) -> None:
        if every < 0 or (every and evaluate is None):
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

    def again(self, first: int, state: TrainState) -> str | None:
        """Calls it where a run goes on, if it is due there; returns what `run` does.

        The run may have ended after its save and before this test phase. Made again, it comes to
        the same scores. One that is known to have been made is not made again, unless early
        stopping has not counted it: then the rule is another one.
        """
        if not (first and self.is_due(first)):
            return None
        patience = self._patience
        if self._is_made and (patience is None or patience.has_counted(first)):
            return None if patience is None else patience.reason()
        return self.run(state)

    def counted(self) -> dict[str, Any]:
        """What early stopping has counted, to be kept; empty without it."""
        return {} if self._patience is None else self._patience.kept()

    def run(self, state: TrainState) -> str | None:
        """Calls it; returns why the run ends early, if it does."""
        assert self._evaluate is not None
        self._evaluate(state)
        return None if self._patience is None else self._patience.reason()

"""The test phase between training steps: what it is, and when it is due."""

from collections.abc import Callable
from typing import Any

from multitower.errors import ArgumentError
from multitower.steps.state.train_state import TrainState


class TestPhase:
    """What is to be called between steps, and how often.

    Args:
        evaluate: a function of the state; None for none.
        every: steps from one call to the next; 0 for never.

    Raises:
        ArgumentError: `every` is negative, or there is nothing to call.
    """

    __test__ = False  # pytest takes classes of such names for its own

    def __init__(self, evaluate: Callable[[TrainState], Any] | None, every: int) -> None:
        if every < 0 or (every and evaluate is None):
            raise ArgumentError(
                f"evaluate_every={every}: 0 for never; else pass evaluate=, a function of the "
                "state."
            )
        self._evaluate = evaluate
        self._every = every

    def is_due(self, number: int) -> bool:
        """Whether to call it after this step."""
        return self._every > 0 and number % self._every == 0

    def run(self, state: TrainState) -> None:
        """Calls it."""
        assert self._evaluate is not None
        self._evaluate(state)

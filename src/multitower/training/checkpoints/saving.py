"""When a run saves, and the message after an interruption."""

import signal
from collections.abc import Mapping
from typing import Any

from multitower.errors import Interrupted
from multitower.steps.state.train_state import TrainState
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.checkpoints.tested import note_tested


class Saver:
    """Saves a run's state when it is due."""

    def __init__(
        self,
        checkpoints: Checkpoints | None,
        every: int,
        last: int,
        about: Mapping[str, Any],
        run: Mapping[str, Any],
    ) -> None:
        self._checkpoints = checkpoints
        self._every = every
        self._last = last
        self._about = about
        self._run = run

    def is_due(self, number: int) -> bool:
        """Whether to save after this step; raises the error of an earlier save that failed."""
        if self._checkpoints is None:
            return False
        self._checkpoints.raise_failure()
        return number % self._every == 0 or number == self._last

    def save(self, number: int, state: TrainState) -> None:
        """Saves the state, if checkpoints are kept."""
        if self._checkpoints is not None:
            self._checkpoints.save(number, state, self._about, run=self._run)

    def note_tested(self, number: int, counted: Mapping[str, Any]) -> None:
        """Notes that the run's last test phase has been made, if checkpoints are kept."""
        if self._checkpoints is not None:
            self._checkpoints.wait()
            note_tested(self._checkpoints.directory / str(number), counted)

    def kept_in_words(self, number: int) -> str:
        """Where the state after this step is saved, and how to continue; waits for the disk."""
        if self._checkpoints is None:
            return ""
        self._checkpoints.wait()
        return (
            f"The state after step {number} is saved in {self._checkpoints.directory}. To "
            "continue, call fit(..., resume=True)."
        )

    def interrupted(self, number: int, step: int) -> Interrupted:
        """The error to raise after a signal; waits until everything is on disk."""
        text = f"{signal.Signals(number).name}: stopped after step {step} of {self._last}"
        if self._checkpoints is None:
            return Interrupted(f"{text}; there is no run_dir to save to.", number)
        self._checkpoints.wait()
        return Interrupted(
            f"{text}, which is saved in {self._checkpoints.directory}. To continue, call "
            "fit(..., resume=True).",
            number,
        )

"""Keeps the state with the best score of the test phase, in its own directory."""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from multitower.errors import RunError, warn
from multitower.processes.together import of_first
from multitower.steps.state.train_state import TrainState
from multitower.training.checkpoints.checkpoint import Checkpoints

_LOWER_IS_BETTER = {"loss", "losses", "error", "errors", "perplexity", "bits"}
_TURNED_AROUND = {"neg", "negative", "minus"}
_STEP = "step"


@dataclass
class BestCheckpoint:
    """Keeps the best state so far; the old one is deleted when the better one is complete.

    Attributes:
        directory: where the state is kept, usually `RUN_DIR/best`.
        metric: name of the score that decides.
        mode: whether the highest or the lowest score is the best.

    Example:
        >>> import tempfile, jax.numpy as jnp, optax
        >>> from pathlib import Path
        >>> import multitower as mt
        >>> from multitower.training.checkpoints.best import BestCheckpoint
        >>> state = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1)).init(jnp.float32(3))
        >>> best = BestCheckpoint(Path(tempfile.mkdtemp()), "accuracy", "max")
        >>> best.offer(1, state, {"accuracy": 0.5}), best.offer(2, state, {"accuracy": 0.25})
        (True, False)
        >>> best.scores()
        (1, {'accuracy': 0.5})
    """

    directory: Path
    metric: str
    mode: Literal["max", "min"]
    _num_offers: int = field(default=0, init=False)
    _has_warned: bool = field(default=False, init=False)

    def watched(self, test_phase: Callable[[TrainState], Any]) -> Callable[[TrainState], None]:
        """A test phase that warns, once, if it offers no state."""

        def watched_phase(state: TrainState) -> None:
            before = self._num_offers
            test_phase(state)
            if self._num_offers == before:
                self._warn(
                    "the test phase did not call trainer.evaluate, which passes the scores on, so "
                    "its state is not kept. Call it in evaluate=."
                )

        return watched_phase

    def offer(
        self,
        step: int,
        state: TrainState,
        scores: Mapping[str, float],
        run: Mapping[str, Any] | None = None,
    ) -> bool:
        """Saves a state if it is better than the one that is kept; waits until it is on disk.

        Args:
            step: updates made.
            state: the state that was scored.
            scores: its scores by name; a NaN is never the best.
            run: as for `Checkpoints.save`.

        Returns:
            Whether it was saved.

        Raises:
            RunError: the scores, or those of the best state so far, lack `metric`.
            CheckpointError: the state cannot be written, or the kept one cannot be read.
        """
        self._num_offers += 1
        check_score(self.metric, scores)
        if math.isnan(scores[self.metric]):
            self._warn(
                "the score is NaN, and such a state is not kept as the best. Check the metrics of "
                "the test phase: a mean over no rows is NaN, for example."
            )
            return False
        kept = self._kept()
        if kept is not None and not self._is_better(scores[self.metric], kept[1]):
            return False
        # The newest checkpoint must have the highest number. A run that is resumed from an earlier
        # step, or scored again on other data, may find a better state at a lower step.
        number = step if kept is None else max(step, kept[0] + 1)
        with Checkpoints(self.directory, keep_last=1) as checkpoints:
            checkpoints.save(number, state, {"scores": dict(scores), _STEP: step}, run=run)
        return True

    def scores(self) -> tuple[int, dict[str, float]] | None:
        """The updates made and the scores of the best state so far; None if there is none.

        Raises:
            CheckpointError: it cannot be read.
        """
        kept = self._kept()
        return None if kept is None else (kept[1].get(_STEP, kept[0]), kept[1]["scores"])

    def _warn(self, why: str) -> None:
        if not self._has_warned:
            self._has_warned = True
            warn(f"keep_best={self.metric!r}: {why}")

    def _kept(self) -> tuple[int, dict[str, Any]] | None:
        """The number under which the best state is kept, and what was saved with it."""
        if not of_first(self.directory.exists()):  # process 0 may be about to create it
            return None
        with Checkpoints(self.directory, read_only=True) as checkpoints:
            return checkpoints.newest_about()

    def _is_better(self, new: float, kept: Mapping[str, Any]) -> bool:
        if self.metric not in kept["scores"]:
            raise RunError(
                f"{self.directory} holds the best state by other scores "
                f"({', '.join(sorted(kept['scores']))}), and keep_best={self.metric!r} is none of "
                "them: name one of these, or move that directory away."
            )
        old = kept["scores"][self.metric]
        return new > old if self.mode == "max" else new < old


def warn_of_worst(option: str, score: str, best: str) -> None:
    """Warns if `best="max"`, and the name of the score says that lower is better.

    Args:
        option: the option of `Trainer` that names the score, for the message.
        score: the name of the score.
        best: `"max"` or `"min"`.
    """
    words = {*re.split(r"[\W_]+", score.lower())}
    if best == "max" and words & _LOWER_IS_BETTER and not words & _TURNED_AROUND:
        warn(
            f"{option}={score!r} and best='max': the state with the highest {score} counts as the "
            "best. Pass best='min' (--best min) for the lowest."
        )


def check_score(metric: str, scores: Iterable[str], option: str = "keep_best") -> None:
    """Refuses the name of a score that the test phase does not compute.

    Args:
        metric: the name.
        scores: the names of the scores of the test phase.
        option: the option of `Trainer` that names it, for the message.

    Raises:
        RunError: `metric` is not among `scores`.
    """
    if metric not in scores:
        raise RunError(
            f"{option}={metric!r}: the test phase has no such score. It has: "
            f"{', '.join(sorted(scores)) or 'none that is one number'}."
        )

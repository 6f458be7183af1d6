"""Early stopping: a run ends when a score of the test phase no longer improves.

The counts are saved with every checkpoint, so that a run that is stopped and resumed ends after the
same step.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from multitower.errors import ArgumentError, RunError, whole_number
from multitower.processes.together import of_first
from multitower.towers.refusals import is_number

RULE = "early_stopping"
_COUNTED = "early_stopping_counted"


@dataclass(frozen=True)
class EarlyStopping:
    """When to end a run early: for `Trainer(early_stopping=...)`.

    Args:
        score: the name of a score of `Trainer.evaluate`.
        patience: end the run after this many test phases in a row without an improvement, 1 or
            more.
        min_delta: a score is an improvement if it is better than the best so far by more than this,
            0 or more.
        best: `"max"` if a higher score is better, `"min"` if a lower one is.

    Raises:
        ArgumentError: an argument has a wrong value.

    Example:
        >>> import multitower as mt
        >>> mt.EarlyStopping("accuracy", patience=5)
        EarlyStopping(score='accuracy', patience=5, min_delta=0.0, best='max')
    """

    score: str
    patience: int = 3
    min_delta: float = 0.0
    best: Literal["max", "min"] = "max"

    def __post_init__(self) -> None:
        whole_number("patience", self.patience, 1)
        if not (is_number(self.min_delta) and 0 <= self.min_delta < math.inf):
            raise ArgumentError(f"min_delta={self.min_delta!r}: it must be a number, 0 or more.")
        if self.best not in ("max", "min"):
            raise ArgumentError(f"best={self.best!r}: say 'max' or 'min'.")

    def in_words(self) -> str:
        """The settings that determine the counts, in words; without patience, which may change."""
        return f"{self.score}, best {self.best}, min_delta {float(self.min_delta):g}"


class Patience:
    """Counts the test phases without an improvement.

    Args:
        rule: when to stop.
        run: the settings that are saved with every checkpoint; the counts are kept in this dict.
        saved: the settings of the checkpoint from which the run continues.
    """

    def __init__(self, rule: EarlyStopping, run: dict[str, Any], saved: Mapping[str, Any]) -> None:
        self._rule = rule
        self._run = run
        self._uncounted = 0
        nothing = {"step": 0, "best": None, "best_step": 0, "waited": 0}
        is_of_this_rule = saved.get(RULE) == rule.in_words()
        run[_COUNTED] = saved.get(_COUNTED, nothing) if is_of_this_rule else nothing

    def see(self, step: int, scores: Mapping[str, float]) -> None:
        """Counts a test phase; one that is made again after a resume counts once.

        Raises:
            RunError: the scores lack the score of the rule.
        """
        from multitower.training.checkpoints.best import check_score  # noqa: PLC0415 (importing stays quick)

        rule, counted = self._rule, self._run[_COUNTED]
        check_score(rule.score, scores, "early_stopping")
        if step <= counted["step"]:
            return
        score = scores[rule.score]
        if self._is_better(score, counted["best"]):
            counted = {"step": step, "best": score, "best_step": step, "waited": 0}
        else:
            counted = {**counted, "step": step, "waited": counted["waited"] + 1}
        self._run[_COUNTED] = counted

    def has_counted(self, step: int) -> bool:
        """Whether the test phase of this step is among those that were counted."""
        return self._run[_COUNTED]["step"] == step

    def kept(self) -> dict[str, Any]:
        """The counts that a resume needs, as JSON values, newer than those in the checkpoint."""
        return {RULE: self._rule.in_words(), _COUNTED: self._run[_COUNTED]}

    def reason(self) -> str | None:
        """Why the run ends now, decided by process 0; None if it goes on.

        Raises:
            RunError: `patience` test phases have passed, and none computed the score.
        """
        counted = self._run[_COUNTED]
        if counted["step"] == 0:
            self._uncounted += 1
            if self._uncounted < self._rule.patience:
                return None  # a later test phase may compute the score
            raise RunError(
                f"early_stopping={self._rule.score!r}: the test phase did not call "
                "trainer.evaluate, which passes the scores on. Call it in evaluate=."
            )
        if not of_first(int(counted["waited"] >= self._rule.patience)):
            return None
        best, waited = counted["best"], counted["waited"]
        phases = "test phase" if waited == 1 else f"{waited} test phases"
        than = f" by more than {self._rule.min_delta:g}" if self._rule.min_delta else ""
        known = "it was never finite"
        if best is not None:
            is_best = "the last improvement was to" if self._rule.min_delta else "the best is"
            known = f"{is_best} {best:g} after step {counted['best_step']}"
        return (
            f"early stopping after step {counted['step']}: {self._rule.score} has not improved"
            f"{than} in the last {phases}; {known}"
        )

    def _is_better(self, score: float, best: float | None) -> bool:
        if not math.isfinite(score):
            return False
        if best is None:
            return True
        gain = score - best if self._rule.best == "max" else best - score
        return gain > self._rule.min_delta

"""What one call of `fit` needs of its trainer: the step, and what the trainer adds to it."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from multitower.steps.state.train_state import TrainState
from multitower.steps.step import TrainStep
from multitower.training.fitting.calls import Feeding
from multitower.training.fitting.early_stopping import EarlyStopping, Patience
from multitower.training.profile import Profile
from multitower.training.progress import Hook, MetricsReader


class TrainerParts(NamedTuple):
    """What one call of `fit` needs of its trainer.

    Attributes:
        step: the training step.
        options: the options of the step, by the names of `train_step`'s arguments.
        checkpoint_every: as for `Trainer`.
        on_nonfinite: as for `Trainer`.
        check_replicas_every: as for `Trainer`.
        early_stopping: as for `Trainer`.
        hooks: the hooks, which are flushed before a save.
        tell: calls all hooks with a `Progress`.
        end: called with the reason if a run ends early.
        profile: traces some steps.
        while_it_runs: makes a context manager for the time of the loop, from the counts of test
            phases, the steps of an epoch, and the pair (steps made, steps in all).
    """

    step: TrainStep
    options: Mapping[str, Any]
    checkpoint_every: int
    on_nonfinite: str
    check_replicas_every: int
    early_stopping: EarlyStopping | None
    hooks: list[Hook]
    tell: Hook
    end: Callable[[str], None]
    profile: Profile
    while_it_runs: Callable[[Patience | None, Any, tuple[int, int]], AbstractContextManager[None]]

    def feeding(self, saves: bool, evaluate_every: int, global_batch: int | None) -> Feeding:
        """Groups the batches of a run into calls."""
        # With several processes, calls end at meetings, so that metrics are exchanged there.
        meets = self.step.placement.spans_processes and self.options["sync_every"]
        return Feeding(
            self.step,
            {name: self.options[name] for name in ("devices", "towers")},
            global_batch,
            self.options["steps_per_call"],
            (
                self.checkpoint_every if saves else 0,
                evaluate_every,
                self.check_replicas_every,
                meets or 0,
            ),
        )

    def reader(self, steps: int, state: TrainState, steps_per_epoch: Any) -> MetricsReader:
        """Reads the metrics of a run."""
        return MetricsReader(
            steps,
            self.on_nonfinite,
            state.kept.params_shapes(),
            self.tell,
            # In a rotation, metrics of a step are ready only after the other groups' turns.
            calls_late=1 if self.step.turns is None else len(self.step.turns.rotation),
            steps_per_epoch=steps_per_epoch,
        )

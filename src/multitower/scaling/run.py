"""One number of devices in a scaling measurement: a training run that is made in turns."""

import math
import time
from collections import deque
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.errors import NonFiniteError
from multitower.hardware.compilations import counted_compilations
from multitower.hardware.devices import devices
from multitower.hardware.memory import MemoryWatch, PeakMemory
from multitower.recipes.definition import Recipe
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob, steps_of_round
from multitower.scaling.stage_times import measure_stages
from multitower.scaling.step_split import PARTS, measure_split
from multitower.training.fitting.settings import MOST_STEPS_PER_CALL, steps_per_call_of

# The first steps of a turn are not counted: they fill the queue of batches, and replace the caches'
# content of other runs.
LEAD_STEPS = 3
# The last step is not counted either: while a measured step runs, the next one is started, as in
# training, so that the host's work is counted once for each measured step.
TAIL_STEPS = 1


class TurnSteps(NamedTuple):
    """The steps of one turn.

    Attributes:
        lead: steps that are made first, and not counted.
        counted: counted steps, in whole rounds, so that every turn has the same number of meetings,
            or of updates of each group.
        tail: steps that are made last, and not counted.
        late: how many calls are started before the loss of the first one is read.
    """

    lead: int
    counted: int
    tail: int
    late: int

    @classmethod
    def of(cls, options: RunOptions, num_steps: int) -> "TurnSteps":
        """The steps of a run that counts `num_steps` steps, rounded up to whole rounds."""
        each = steps_of_round(options, options.towers or 1)
        counted = -(-num_steps // each) * each
        if options.asynchronous:
            return cls(LEAD_STEPS + each - TAIL_STEPS, counted, each, each)
        if options.sync_every is None:
            return cls(LEAD_STEPS, counted, TAIL_STEPS, 1)
        # With several processes a call makes several steps, and ends where towers meet. Every turn
        # begins at a meeting, and counted steps begin and end with calls, in every layout.
        call = min(each, MOST_STEPS_PER_CALL)
        lead = -(-LEAD_STEPS // call) * call
        return cls(lead, counted, each - lead % each, 1)

    @property
    def total(self) -> int:
        """All steps of a turn."""
        return self.lead + self.counted + self.tail


class ScalingRun:
    """A training run of a recipe that pauses while others have their turn.

    It trains as `Trainer.fit` does: a thread makes batches ahead, and the loss is read one step
    late, or one rotation late, so that the devices always have work.

    Args:
        recipe: what to train.
        options: of the run, with the number of devices.

    Attributes:
        losses: the losses of all steps so far.
        turns_s: the mean time of a step in each measured turn, in seconds.
        num_recompilations: how many programs were compiled in measured turns.
        peak: the peak memory of the first turn.
    """

    def __init__(self, recipe: Recipe, options: RunOptions) -> None:
        assert options.devices is not None
        self._memory = MemoryWatch(devices(options.devices))
        steps_per_call = steps_per_call_of(None, options.sync_every)
        options = replace(options, steps_per_call=steps_per_call)
        self._job = RecipeJob.of(recipe, options, None, keep_best=False)
        self._where = self._job.feeding()
        self._state = self._job.trainer.step.init(**self._job.first_state())
        self.losses: list[float] = []
        self.turns_s: list[float] = []
        self.num_recompilations = 0
        self.peak: PeakMemory | None = None

    def warm_up(self, num_steps: int) -> None:
        """Makes a turn that is not measured: it compiles."""
        self._train(TurnSteps.of(self._job.options, num_steps), self._memory.look)
        self.peak = self._memory.peak()

    def take_turn(self, num_steps: int) -> None:
        """Makes a turn, and measures `num_steps` steps of it, rounded up to whole rounds."""
        turn = TurnSteps.of(self._job.options, num_steps)
        with counted_compilations() as compiled:
            ends = self._train(turn, lambda: None)
        self.num_recompilations += len(compiled)
        counted_s = ends[turn.lead + turn.counted - 1] - ends[turn.lead - 1]
        self.turns_s.append(counted_s / turn.counted)

    def split(self, num_steps: int) -> dict[str, float | None]:
        """The time of the parts of a step; losses of the steps made for it are not recorded.

        All times are None for local and asynchronous updates, whose steps differ from each other.
        """
        if self._job.options.sync_every is not None or self._job.options.asynchronous:
            return dict.fromkeys(PARTS)
        self._state, parts = measure_split(
            self._job.trainer.step,
            self._state,
            self._job.batches(len(self.losses)),
            where=self._where,
            num_steps=num_steps,
        )
        return parts

    def stages(self, num_steps: int) -> dict[str, Any] | None:
        """The times of the programs of all stages; losses are not recorded, as in `split`."""
        self._state, found = measure_stages(
            self._job.trainer.step,
            self._state,
            self._job.batches(len(self.losses)),
            where=self._where,
            num_steps=num_steps,
        )
        return found

    def facts(self) -> dict[str, Any]:
        """The recipe, the software and the machine."""
        return self._job.facts()

    def _train(self, turn: TurnSteps, look: Callable[[], None]) -> list[float]:
        """Makes the steps of a turn; returns when the end of each, or of its call, was seen."""
        ends: list[float] = []

        def read(metrics: dict[str, jax.Array]) -> None:
            losses = np.atleast_1d(np.asarray(metrics["loss"]))  # host-device sync
            for loss in losses.tolist():
                self.losses.append(_finite(loss, len(self.losses) + 1))
            ends.extend([time.perf_counter()] * len(losses))

        waiting: deque[dict[str, jax.Array]] = deque()
        first = len(self.losses)
        with closing(self._job.calls(first, first + turn.total)) as ahead:
            for call in ahead:
                self._state, metrics = self._job.trainer.step(self._state, call.batch)
                waiting.append(metrics)
                if len(waiting) > turn.late:
                    read(waiting.popleft())
                look()
        while waiting:
            read(waiting.popleft())
        return ends


def _finite(loss: float, step: int) -> float:
    if not math.isfinite(loss):
        raise NonFiniteError(
            f"step {step}: the loss is {loss}. A scaling measurement is a training that works: "
            "lower the learning rate, or make fewer steps."
        )
    return loss

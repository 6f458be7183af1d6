"""One number of devices in a scaling measurement: a training that goes on in turns."""

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

# The first steps of a turn are not counted: the pipeline of batches made ahead is filled, and what
# the others have left in the caches goes.
LEAD_STEPS = 3
# The last step is not counted either: while a measured one runs, the next one is started, as in a
# training, so that what the host does for a step is counted as often as there are measured steps.
TAIL_STEPS = 1


class TurnSteps(NamedTuple):
    """The steps of one turn.

    Attributes:
        lead: made first, and not counted.
        counted: whole rounds, so that every turn has as many meetings of its towers, or as many
            updates of each group.
        tail: made last, and not counted.
        late: so many calls are started before the loss of the first one is read.
    """

    lead: int
    counted: int
    tail: int
    late: int

    @classmethod
    def of(cls, options: RunOptions, num_steps: int) -> "TurnSteps":
        """Those of a run that is to count `num_steps`, or the next whole number of rounds."""
        each = steps_of_round(options, options.towers or 1)
        counted = -(-num_steps // each) * each
        if options.asynchronous:
            return cls(LEAD_STEPS + each - TAIL_STEPS, counted, each, each)
        if options.sync_every is None:
            return cls(LEAD_STEPS, counted, TAIL_STEPS, 1)
        # Over processes a call makes several steps, and ends where towers meet. Every turn begins
        # at a meeting, and what is counted begins and ends with calls, in every layout alike.
        call = min(each, MOST_STEPS_PER_CALL)
        lead = -(-LEAD_STEPS // call) * call
        return cls(lead, counted, each - lead % each, 1)

    @property
    def total(self) -> int:
        """All steps."""
        return self.lead + self.counted + self.tail


class ScalingRun:
    """A training of a recipe that stands still while others have their turn.

    It goes on as `Trainer.fit` does: batches are made ahead by a thread, and the loss is read one
    step late, or by the turns of a rotation, so that the devices always have work.

    Args:
        recipe: what to train.
        options: of the run, with the number of devices.

    Attributes:
        losses: of all steps so far.
        turns_s: the time of a step in each measured turn.
        num_recompilations: programs that were compiled in measured turns.
        peak: the memory that the first turn took.
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
        """Makes a turn, and measures `num_steps` steps of it, or the next whole rounds."""
        turn = TurnSteps.of(self._job.options, num_steps)
        with counted_compilations() as compiled:
            ends = self._train(turn, lambda: None)
        self.num_recompilations += len(compiled)
        counted_s = ends[turn.lead + turn.counted - 1] - ends[turn.lead - 1]
        self.turns_s.append(counted_s / turn.counted)

    def split(self, num_steps: int) -> dict[str, float | None]:
        """Where the time of a step goes; the steps made for it leave no losses.

        Nothing is known where steps differ from each other: of local and asynchronous updates.
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
        """The programs of all stages; as `split`."""
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
        """Makes the steps of a turn; returns when each, or its call, was seen to be over."""
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

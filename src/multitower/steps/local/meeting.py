"""A meeting of the towers: what they moved since the last one is averaged, and applied once."""

from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.totals import Totals, TowerSums, TowerTurn
from multitower.steps.local.job import MeetingJob, Met
from multitower.steps.local.options import LocalOptions
from multitower.steps.local.state import LocalParts, Own
from multitower.steps.parts import StepParts
from multitower.towers.placement import Placement


class _Programs(NamedTuple):
    """Executables, one per local device each."""

    moved: list[Compiled]
    add: list[Compiled]
    meet: list[Compiled]
    go_on: list[Compiled]


class Meeting:
    """Meetings on one placement: the same additions as for the gradients of a synchronous step.

    Attributes:
        every: towers meet after every step whose number, from 1, is a multiple of this.
        totals: adds up what the towers bring.
    """

    def __init__(self, step: StepParts, options: LocalOptions, placement: Placement) -> None:
        self.every = options.sync_every
        self._job = MeetingJob(step, options)
        self.totals = Totals(placement)
        self._numbers = WholeNumbers()
        self._compiled: dict[Any, _Programs] = {}

    def prepare(self, parts: LocalParts) -> _Programs:
        """Compiles for states like this one; the first step calls it, so that errors come early."""
        given = (parts.replicas[0], next(iter(parts.towers.values())))
        key = signature(given)
        if key not in self._compiled:
            self._compiled[key] = self._compile(*given)
        return self._compiled[key]

    def run(self, parts: LocalParts) -> tuple[LocalParts, Met]:
        """The state after a meeting, and its report on the first local device.

        The given state is overwritten, and its `towers` are emptied.
        """
        programs = self.prepare(parts)

        def moved(turn: TowerTurn) -> TowerSums:
            number = self._numbers.on(self.totals.devices[turn.i], turn.tower)
            own, params = parts.towers[turn.tower], parts.replicas[turn.i].params
            return programs.moved[turn.i](own, params, number)

        totals = self.totals.run(moved, programs.add)
        results = [
            meet(parts.replicas[i], totals[i].packed) for i, meet in enumerate(programs.meet)
        ]
        towers: dict[int, Own] = {}
        for turn in self.totals.turns:
            fields, averaged, _ = results[turn.i]
            own = parts.towers.pop(turn.tower)  # frees old parameters now
            given = (own, fields.params, fields.model_state, averaged)
            towers[turn.tower] = programs.go_on[turn.i](*given)
            del own, given
        return LocalParts([fields for fields, _, _ in results], towers, parts.step), results[0][2]

    def _compile(self, fields: Any, own: Own) -> _Programs:
        devices = self.totals.devices
        number = jax.ShapeDtypeStruct((), np.int32)
        moved = compile_for_each(self._job.moved, (own, fields.params, number), devices)
        sums = moved[0].out_info
        given = (fields, sums.packed)
        meet = compile_for_each(self._job.meet, given, devices, donate=(0,))
        new, averaged, _ = meet[0].out_info
        given = (own, new.params, new.model_state, averaged)
        go_on = compile_for_each(self._job.go_on, given, devices, donate=(0,))
        return _Programs(moved, self.totals.compile(sums), meet, go_on)

"""Steps in which every tower updates its own parameters: the same bits on any number of devices.

Between two meetings no program spans the devices of a process. The few numbers that metrics are
made of are copied to the first device and added there in the fixed order of the tree. With several
processes they go through the reduction, at the end of every call. `calls.py` has calls of several
steps.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.job import Job, Shared
from multitower.engines.packing import Packed
from multitower.engines.same_bits import finish_function, scale_shape, tower_function
from multitower.engines.totals import Totals, TowerSums
from multitower.engines.tracing import refuse_kept_values, trace
from multitower.steps.local.job import LocalJob, Met
from multitower.steps.local.meeting import Meeting
from multitower.steps.local.options import refuse_meeting_in_local
from multitower.steps.local.state import LocalParts, Own, as_state
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Metrics
from multitower.steps.state.bundles import opened
from multitower.steps.state.kept import KeptState
from multitower.towers.global_arrays import replicate
from multitower.towers.placement import Placement, contiguous
from multitower.towers.rows import BatchParts, Tower
from multitower.towers.split import TowerRows, cut


class LocalPrograms(NamedTuple):
    """Executables, and the report (`Met`) of a step without a meeting.

    `tower` has one per local device; `finish` runs on the first; `add` where sums are added.
    """

    tower: list[Compiled]
    add: list[Compiled]
    finish: Compiled
    apart: Met


class Made(NamedTuple):
    """What the metrics of a step are made from, after its updates.

    Attributes:
        programs: the executables of the step.
        sums: what each local tower returned to be summed, by its number, on its device.
        num_rows: rows of the batch, over all towers.
        met: the report of the meeting after it.
    """

    programs: LocalPrograms
    sums: dict[int, TowerSums]
    num_rows: int
    met: Met


class LocalRunner:
    """Steps of towers on their own, and their meetings.

    Attributes:
        devices: the local devices, in the order of the placement.
        turns: the local towers, in the order in which they run.
        totals: adds up the sums that metrics are made of.
    """

    def __init__(
        self, step: StepParts, batches: Batches, placement: Placement, meeting: Meeting
    ) -> None:
        self._job = LocalJob(step, batches.split, batches.tower_rows, placement.num_towers)
        self._tower_rows = batches.tower_rows
        self._placement = placement
        self._meeting = meeting
        self.devices = meeting.totals.devices
        self.turns = meeting.totals.turns
        self.totals = meeting.totals
        if not placement.spans_processes:
            self.totals = Totals(contiguous(self.devices[:1], placement.num_towers))
        self._compiled: dict[Any, LocalPrograms] = {}
        self._numbers = WholeNumbers()
        self._scales: dict[Any, jax.Array] = {}

    def run(self, state: KeptState, batch: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update of every tower; the state is overwritten."""
        parts, made = self.make(state, state.parts(), batch)
        total = self.total(made.sums, made.programs.add)
        return self.state_of(parts, state.maker), self.metrics(made, total)

    def make(
        self, state: KeptState, parts: LocalParts, batch: BatchParts
    ) -> tuple[LocalParts, Made]:
        """Makes one update of every tower, and a meeting if it is due; `state` is spent."""
        rows = cut(batch.rows, batch.num_rows, self._placement, self._tower_rows)
        rest = replicate(batch.shared, self._placement)
        given = [
            (fields.step, fields.rng, leaves)
            for fields, leaves in zip(parts.replicas, rest, strict=True)
        ]
        programs = self._programs(parts, given[0], rows)
        towers: dict[int, Own] = {}
        counts: dict[int, jax.Array] = {}
        sums: dict[int, TowerSums] = {}
        for turn in self.turns:
            i, tower = turn.i, turn.tower
            pieces = [leaf.pieces[tower] for leaf in rows]
            here = self._numbers.of_tower(self.devices[i], rows[0], tower)
            found = programs.tower[i](parts.towers[tower], given[i], pieces, here)
            sums[tower], (towers[tower], counts[i]) = found
            del found  # the last tower's parameters would take memory until the step ends
        state.spend()
        replicas = [one._replace(step=counts[i]) for i, one in enumerate(parts.replicas)]
        new = LocalParts(replicas, towers, parts.step + 1)
        met = programs.apart
        if new.step % self._meeting.every == 0:
            new, met = self._meeting.run(new)
        return new, Made(programs, sums, batch.num_rows, met)

    def total(self, sums: dict[int, TowerSums], add: Sequence[Any]) -> Packed:
        """The sums over all towers, on the first local device."""
        if not self._placement.spans_processes:
            # Only the first device waits for the others, for these few numbers.
            sums = jax.device_put(sums, self.devices[0])
        return self.totals.run(lambda turn: sums[turn.tower], add)[0].packed

    def metrics(self, made: Made, total: Packed) -> Metrics:
        """The metrics of a step, from the sums over all towers."""
        return made.programs.finish(made.met, total, self._scale(made.num_rows))

    def state_of(self, parts: LocalParts, maker: object) -> KeptState:
        """The training state that a user gets for these parts."""
        return as_state(parts, self._placement, maker)

    def _scale(self, num_rows: int) -> jax.Array:
        """The factor that turns sums into means, shape (), on the first local device."""
        scale = np.dtype(scale_shape().dtype).type(self._tower_rows / num_rows)
        key = (num_rows, scale.dtype)
        if key not in self._scales:
            self._scales[key] = jax.device_put(scale, self.devices[0])
        return self._scales[key]

    def _programs(self, parts: LocalParts, given: Any, rows: Sequence[TowerRows]) -> LocalPrograms:
        own = next(iter(parts.towers.values()))
        pieces = [leaf.piece for leaf in rows]
        key = signature((own, given, pieces))
        if key not in self._compiled:
            self._compiled[key] = self._compile(own, given, pieces)
            self._meeting.prepare(parts)
        return self._compiled[key]

    def _compile(self, own: Own, given: Any, pieces: list[jax.Array]) -> LocalPrograms:
        here = Tower.shapes()
        arguments = (Shared(own, given), pieces, here)
        job = Job(self._job.tower, self._job.finish)
        traced = trace(tower_function(job), arguments, self._placement.num_towers)
        refuse_kept_values(traced.program)
        if traced.rounds(final=True) is not None:
            raise refuse_meeting_in_local(traced.meets or "axis_index")

        def tower(own: Own, given: Any, pieces: Any, here: Tower) -> Any:
            return traced(Shared(own, given), pieces, here)

        arguments = (own, given, pieces, here)
        towers = compile_for_each(tower, arguments, self.devices, donate=(0,))
        sums: TowerSums = towers[0].out_info[0]
        params = jax.eval_shape(opened, own).params
        apart = jax.device_put(self._job.apart(params), self.devices[0])
        finished = (apart, sums.packed, scale_shape())
        (finish,) = compile_for_each(finish_function(job), finished, self.devices[:1])
        return LocalPrograms(towers, self.totals.compile(sums), finish, apart)

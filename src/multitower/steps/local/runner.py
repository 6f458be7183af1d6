"""Steps in which every tower updates its own parameters: the same bits on any number of devices.

Between two meetings no program spans devices of one process. The few numbers that metrics are made
of are copied to the first device and added there along the tree; with several processes they take
the way of the reduction.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.executable import compile_for_each, signature
from multitower.engines.job import Job, Shared
from multitower.engines.packing import Packed
from multitower.engines.same_bits import finish_function, scale_shape, tower_function
from multitower.engines.totals import Totals, TowerSums, Turn
from multitower.engines.tracing import trace
from multitower.functions.calls import replicate
from multitower.steps.local.job import LocalJob, Met
from multitower.steps.local.meeting import Meeting
from multitower.steps.local.options import refuse_meeting
from multitower.steps.local.state import Own, Parts, as_state
from multitower.steps.parts import StepParts
from multitower.steps.runner import Metrics
from multitower.steps.state.train_state import TrainState
from multitower.towers.placement import Placement, contiguous
from multitower.towers.rows import Parts as BatchParts
from multitower.towers.rows import Split, Tower
from multitower.towers.split import TowerRows, ready_or_cut


class _Programs(NamedTuple):
    """Executables, and what a meeting would tell where there is none.

    `tower` is one per local device, `finish` for the first one, `add` where metrics are added up.
    """

    tower: list[jax.stages.Compiled]
    add: list[jax.stages.Compiled]
    finish: jax.stages.Compiled
    apart: Met


class LocalRunner:
    """Steps of towers on their own, and their meetings."""

    def __init__(
        self,
        step: StepParts,
        split: Split,
        tower_rows: int,
        placement: Placement,
        meetings: tuple[Meeting, int],
    ) -> None:
        self._job = LocalJob(step, split, tower_rows, placement.num_towers)
        self._tower_rows = tower_rows
        self._placement = placement
        self._meeting, self._every = meetings
        self._devices = self._meeting.totals.devices
        self._totals = self._meeting.totals
        if not placement.spans_processes:
            self._totals = Totals(contiguous(self._devices[:1], placement.num_towers))
        self._compiled: dict[Any, _Programs] = {}
        self._numbers: dict[Any, Any] = {}

    def run(
        self, state: TrainState, batch: BatchParts, maker: object
    ) -> tuple[TrainState, Metrics]:
        """Makes one update of every tower; the state is overwritten."""
        rows = ready_or_cut(batch.rows, batch.num_rows, self._placement, self._tower_rows)
        parts: Parts = state.parts()
        rest: list[Any] = [[]] * len(self._devices)
        if batch.shared:
            rest = replicate(batch.shared, self._placement)
        given = [
            (fields.step, fields.rng, leaves)
            for fields, leaves in zip(parts.replicas, rest, strict=True)
        ]
        programs = self._programs(parts, given[0], rows)
        towers: dict[int, Own] = {}
        counts: dict[int, jax.Array] = {}
        sums: dict[int, TowerSums] = {}
        for turn in self._meeting.totals.turns:
            i, tower = turn.i, turn.tower
            pieces = [leaf.pieces[tower] for leaf in rows]
            found = programs.tower[i](parts.towers[tower], given[i], pieces, self._here(turn, rows))
            sums[tower], (towers[tower], counts[i]) = found
            del found  # the last tower's parameters would take memory until the step ends
        state.spend()
        replicas = [one._replace(step=counts[i]) for i, one in enumerate(parts.replicas)]
        new = Parts(replicas, towers, parts.step + 1)
        met = programs.apart
        if new.step % self._every == 0:
            new, met = self._meeting.run(new)
        totals = self._total(sums, programs.add)
        metrics = programs.finish(met, totals, self._scale(batch.num_rows))
        return as_state(new, self._placement, maker), metrics

    def _total(self, sums: dict[int, TowerSums], add: Sequence[Any]) -> Packed:
        """The sums over all towers, on the first local device."""
        if not self._placement.spans_processes:
            # Only the first device waits for the others, for these few numbers.
            sums = jax.device_put(sums, self._devices[0])
        stacks = self._totals.stacks()
        for turn in self._totals.turns:
            self._totals.put(stacks, turn, sums[turn.tower], add)
        return self._totals.reduced(stacks)[0].packed

    def _here(self, turn: Turn, rows: Sequence[TowerRows]) -> Tower:
        """Who a tower is, on its device; copied there once."""
        key = rows[0].counts(turn.tower)
        if key not in self._numbers:
            counts = Tower(*(np.int32(count) for count in key))
            self._numbers[key] = jax.device_put(counts, self._devices[turn.i])
        return self._numbers[key]

    def _scale(self, num_rows: int) -> jax.Array:
        """What turns sums into means, on the first local device."""
        scale = np.dtype(scale_shape().dtype).type(self._tower_rows / num_rows)
        key = (num_rows, scale.dtype)
        if key not in self._numbers:
            self._numbers[key] = jax.device_put(scale, self._devices[0])
        return self._numbers[key]

    def _programs(self, parts: Parts, given: Any, rows: Sequence[TowerRows]) -> _Programs:
        own = next(iter(parts.towers.values()))
        pieces = [leaf.piece for leaf in rows]
        key = signature((own, given, pieces))
        if key not in self._compiled:
            self._compiled[key] = self._compile(own, given, pieces)
            self._meeting.prepare(parts)
        return self._compiled[key]

    def _compile(self, own: Own, given: Any, pieces: list[jax.Array]) -> _Programs:
        scalar = jax.ShapeDtypeStruct((), np.int32)
        here = Tower(scalar, scalar, scalar)
        arguments = (Shared(own, given), pieces, here)
        job = Job(self._job.tower, self._job.finish)
        traced = trace(tower_function(job), arguments, self._placement.num_towers)
        if traced.rounds(final=True) is not None:
            raise refuse_meeting(traced.meets or "axis_index")

        def tower(own: Own, given: Any, pieces: Any, here: Tower) -> Any:
            return traced(Shared(own, given), pieces, here)

        arguments = (own, given, pieces, here)
        towers = compile_for_each(tower, arguments, self._devices, donate=(0,))
        sums: TowerSums = towers[0].out_info[0]
        apart = jax.device_put(self._job.apart(own.params), self._devices[0])
        finished = (apart, sums.packed, scale_shape())
        (finish,) = compile_for_each(finish_function(job), finished, self._devices[:1])
        return _Programs(towers, self._totals.compile(sums), finish, apart)

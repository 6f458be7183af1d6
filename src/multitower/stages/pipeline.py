"""A pipeline: runs all towers of a step through all stages, on the devices of a layout.

It runs single-device programs. Between them there are only moves, and additions in the order of the
tree of `engines.reduction`, so that the bits are the same on any layout. The host does not wait for
a device.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from multitower.engines.packing import Packed, unpack
from multitower.engines.same_bits import current_tap
from multitower.stages.chain import Chain
from multitower.stages.layout import Layout
from multitower.stages.meeting.rounds import Meeting
from multitower.stages.meeting.totals import StageTotals
from multitower.stages.order import in_rounds
from multitower.stages.programs import Executable, Programs, StageSums
from multitower.stages.walk import Walk
from multitower.towers.split import TowerRows


class PipelineTotals(NamedTuple):
    """The results of a pipeline, summed over all towers.

    Attributes:
        gradients: for each replica of this process and each stage the gradients of its parameters:
            those of its own segments, then those of later segments in descending order.
        results: the tower results of each segment, all on the head's device.
    """

    gradients: list[list[list[Packed]]]
    results: list[Packed]


class Pipeline:
    """Runs a chain on a layout; compiles its programs once."""

    def __init__(self, chain: Chain, layout: Layout, *, remat: bool = True) -> None:
        self.chain = chain
        self.layout = layout
        self._over_towers = StageTotals(layout)
        self._layout_of_segments = layout.of_segments(chain.stage_of)
        self._orders = [
            in_rounds(len(towers), self._layout_of_segments.place_of, chain.round_of)
            for towers in layout.towers_on
        ]
        self._programs = Programs(chain, self._layout_of_segments, remat=remat)

    def run(
        self, params: Sequence[Mapping[int, Any]], rest: Sequence[Any], rows: Sequence[TowerRows]
    ) -> PipelineTotals:
        """Runs all towers.

        Args:
            params: for each replica of this process the parameters by number, each on the device
                of its stage.
            rest: the arguments of the program between parameters and rows, on any device or the
                host.
            rows: the arguments after these. The last three arguments are the tower's numbers.
        """
        tap = current_tap()
        walks = [
            Walk(self.chain, self._programs, self._layout_of_segments, r, own, tap=tap)
            for r, own in enumerate(self._over_towers.additions)
        ]
        for walk, own in zip(walks, params, strict=True):
            walk.begin(own, rest, rows)
        last = self.chain.round_of[-1]
        for phase, orders in enumerate(zip(*self._orders, strict=True)):
            if phase > last:
                self._meet_back(walks, 2 * last - phase)
            # Replicas take turns, so that all of them have work from the start.
            for turns in itertools.zip_longest(*orders):
                for r, turn in enumerate(turns):
                    if turn is not None:
                        tower = self.layout.towers_on[r][turn.tower]
                        walks[r].take(turn._replace(tower=tower))
            if phase < last:
                self._meet(walks, phase)
        totals = self._totals([walk.stacks for walk in walks])
        if tap is not None:
            for r, stages in enumerate(totals.gradients):
                by_stage = {
                    f"stage {s}": [unpack(one) for one in own] for s, own in enumerate(stages)
                }
                tap("reduction", r, by_stage)
        return totals

    def shapes_of_results(self) -> list[Packed]:
        """The shapes of `PipelineTotals.results`."""
        return [programs[0].out_info[0].results for programs in self._programs.backward]

    def _meet(self, walks: Sequence[Walk], number: int) -> None:
        """After a round: sums the values that all towers have sent, and sends the totals to all."""
        for meeting in self._meetings(number):
            stacks = [walk.sent.pop(meeting.after) for walk in walks]
            add = self._programs.meet[meeting.after]
            for walk, total in zip(walks, self._total(meeting.after, stacks, add), strict=True):
                walk.arrive(meeting, total)

    def _meet_back(self, walks: Sequence[Walk], number: int) -> None:
        """Before the backward pass of a round: the same for the cotangents of the totals."""
        for meeting in self._meetings(number):
            if not self.chain.answered_at(meeting):
                continue
            stacks = [walk.sent_back.pop(meeting.after) for walk in walks]
            add = self._programs.meet_back[meeting.after]
            for walk, total in zip(walks, self._total(meeting.after, stacks, add), strict=True):
                walk.arrive_back(meeting, total)

    def _meetings(self, number: int) -> list[Meeting]:
        """The meetings at the end of a round."""
        return [one for one in self.chain.meetings if self.chain.round_of[one.after] == number]

    def _totals(self, stacks: list[list[list[StageSums]]]) -> PipelineTotals:
        """Adds the replicas' partial sums along the rest of the tree, and sends out the totals.

        Programs that span processes start here, after all towers, in the order of the stages. The
        order is the same in every process, so that there is no deadlock.
        """
        segments = range(len(self.chain.stages))
        replicas = range(len(self.layout.replicas))
        totals = [
            self._total(s, [stacks[r][s] for r in replicas], self._programs.add[s])
            for s in segments
        ]
        self._over_towers.connected()

        def gradients_of(r: int, stage: int) -> list[Packed]:
            found: list[Packed] = []
            for s in segments:
                if self.chain.stage_of[s] == stage:
                    found.append(totals[s][r].own)
                    later = [totals[u][r].away for u in reversed(segments)]
                    found += [away[s] for away in later if s in away]
            return jax.device_put(found, self.layout.device(r, stage))

        stages = range(self.layout.num_stages)
        gradients = [[gradients_of(r, stage) for stage in stages] for r in replicas]
        results = jax.device_put([total[0].results for total in totals], self.layout.head)
        return PipelineTotals(gradients, results)

    def _total(self, segment: int, stacks: list[list[Any]], add: Sequence[Executable]) -> list[Any]:
        """The total over towers at a segment, for each replica."""
        return self._over_towers.total(self.chain.stage_of[segment], stacks, add)

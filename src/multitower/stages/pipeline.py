"""A pipeline: runs all towers of a step through all stages, on the devices of a layout.

It runs single-device programs. Between them there are only moves, and additions in the order of the
tree of `engines.reduction`, so that the bits are the same on any layout. The host does not wait for
a device.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from multitower.engines.packing import Packed, unpack
from multitower.engines.same_bits import current_tap
from multitower.stages.chain import Chain
from multitower.stages.layout import Layout, moved
from multitower.stages.meeting.rounds import Meeting
from multitower.stages.meeting.totals import StageTotals
from multitower.stages.order import in_rounds
from multitower.stages.programs import Executable, StagePrograms, StageSums
from multitower.stages.walk import Walk, meet, take_turns
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
        self.over_towers = StageTotals(layout)
        self.layout_of_segments = layout.of_segments(chain.stage_of)
        self._orders = [
            in_rounds(len(towers), self.layout_of_segments.place_of, chain.round_of)
            for towers in layout.towers_on
        ]
        self.programs = StagePrograms(chain, self.layout_of_segments, remat=remat)

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
        others = self.chain.inputs[self.chain.num_params : -3 - len(rows)]
        shared = dict(zip(others, rest, strict=True))
        walks = [_BothWays(self, r, {**own, **shared}, rows) for r, own in enumerate(params)]
        last = self.chain.round_of[-1]
        for phase, orders in enumerate(zip(*self._orders, strict=True)):
            if phase > last:
                self._meet_back(walks, 2 * last - phase)
            take_turns(walks, orders)
            if phase < last:
                meet(walks, phase, self.chain, self.over_towers, self.programs.meet)
        totals = self._totals([walk.stacks for walk in walks])
        if (tap := current_tap()) is not None:
            for r, stages in enumerate(totals.gradients):
                by_stage = {
                    f"stage {s}": [unpack(one) for one in own] for s, own in enumerate(stages)
                }
                tap("reduction", r, by_stage)
        return totals

    def shapes_of_results(self) -> list[Packed]:
        """The shapes of `PipelineTotals.results`."""
        return [programs[0].out_info[0].results for programs in self.programs.backward]

    def _meet_back(self, walks: Sequence["_BothWays"], number: int) -> None:
        """Before the backward pass of a round: as `meet`, for the cotangents of the totals."""
        for meeting in self.chain.meetings_after(number):
            if not self.chain.answered_at(meeting):
                continue
            stacks = [walk.sent_back.pop(meeting.after) for walk in walks]
            add = self.programs.meet_back[meeting.after]
            for walk, total in zip(walks, self._total(meeting.after, stacks, add), strict=True):
                walk.arrive_back(meeting, total)

    def _totals(self, stacks: list[list[list[StageSums]]]) -> PipelineTotals:
        """Adds the replicas' partial sums along the rest of the tree, and sends out the totals.

        Programs that span processes start here, after all towers, in the order of the stages. The
        order is the same in every process, so that there is no deadlock.
        """
        segments = range(len(self.chain.stages))
        replicas = range(len(self.layout.replicas))
        totals = [
            self._total(s, [stacks[r][s] for r in replicas], self.programs.add[s]) for s in segments
        ]
        self.over_towers.connected()

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
        return self.over_towers.total(self.chain.stage_of[segment], stacks, add)


class _BothWays(Walk):
    """What one replica holds while its towers pass forward and backward.

    Attributes:
        stacks: for each segment the sums of its towers that are not added yet.
        sent_back: for each segment after which towers meet, the sums of the cotangents of the
            totals.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        replica: int,
        given: Mapping[int, Any],
        rows: Sequence[TowerRows],
    ) -> None:
        chain, programs = pipeline.chain, pipeline.programs
        places, additions = pipeline.layout_of_segments, pipeline.over_towers.additions[replica]
        super().__init__(chain, places, replica, additions, rows=rows, numbers=programs.numbers)
        self._chain = chain
        self._programs = programs
        self._tap = current_tap()
        self._given = given  # what all towers get whole, by number
        self._copies: dict[tuple[int, jax.Device], jax.Array] = {}
        self._held: dict[tuple[int, int], list[jax.Array]] = {}
        self._answers: dict[tuple[int, int], dict[int, list[jax.Array]]] = defaultdict(dict)
        self._back: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self.stacks: list[list[StageSums]] = [[] for _ in chain.stages]
        self.sent_back: dict[int, list[list[jax.Array]]] = defaultdict(list)

    def arrive_back(self, meeting: Meeting, totals: Sequence[jax.Array]) -> None:
        """Takes the totals of the cotangents: all towers get the same."""
        there = jax.device_put(list(totals), self._devices[meeting.after])
        for number, total in zip(self._chain.answered_at(meeting), there, strict=True):
            for tower in self._additions:
                self._answers[tower, meeting.after][number] = [total]

    def take(self, kind: str, tower: int, s: int) -> None:
        """As `Walk.take`."""
        if kind == "forward":
            self._forward(tower, s)
        else:
            self._backward(tower, s)

    def _forward(self, tower: int, s: int) -> None:
        values = self._held[tower, s] = self._values(tower, s)
        sent, kept = self._chain.stages[s].sent, self._programs.residuals[s]
        if not sent:
            return
        made = self._programs.forward[s][self._replica](values)
        if kept is not None:
            self._held[tower, s] = kept.take(values, made)
        if self._tap is not None:
            self._tap("forward program", tower, {self._chain.segments.name(s): made})
        self._send(dict(zip(sent, made, strict=False)), tower, s, self._programs.meet)

    def _backward(self, tower: int, s: int) -> None:
        values = self._held.pop((tower, s), None)
        if values is None:
            values = self._values(tower, s)
        answers = self._answers.pop((tower, s), {})
        cotangents = [answers[number] for number in self._chain.stages[s].answered]
        sums, found = self._programs.backward[s][self._replica](values, cotangents)
        if self._tap is not None:
            self._tap("backward program", tower, {self._chain.segments.name(s): (sums, found)})
        for number, one in found.items():
            if number in self._chain.meeting_after:
                self._meet_back(number, one, tower, s)
                continue
            maker = self._chain.made_by(number)
            waiting = self._answers[tower, maker].setdefault(number, [])
            waiting.append(moved(one, self._devices[s], self._devices[maker]))
        self._put(self.stacks[s], sums, tower, self._programs.add[s])

    def _meet_back(self, number: int, one: jax.Array, tower: int, s: int) -> None:
        """Takes a cotangent of a total; once a tower has all of a meeting, they are summed."""
        meeting = self._chain.meeting_after[number]
        waiting = self._back[tower, meeting.after]
        sent_as = meeting.sent[meeting.totals.index(number)]
        waiting[sent_as] = moved(one, self._devices[s], self._devices[meeting.after])
        answered = self._chain.answered_at(meeting)
        if len(waiting) == len(answered):
            own = [waiting[x] for x in answered]
            del self._back[tower, meeting.after]
            add = self._programs.meet_back[meeting.after]
            self._put(self.sent_back[meeting.after], own, tower, add)

    def _whole(self, number: int, s: int) -> jax.Array:
        """Copied there once in a step, if it is elsewhere."""
        device = self._devices[s]
        if (number, device) not in self._copies:
            given = self._given[number]
            is_there = isinstance(given, jax.Array) and given.devices() == {device}
            self._copies[number, device] = given if is_there else jax.device_put(given, device)
        return self._copies[number, device]

"""Forward only: cuts the program of one tower into stages, and runs all towers through them.

It runs single-device programs. Between them there are only moves, and sums where towers meet, so
that the bits are the same on any layout. The host does not wait for a device.
"""

import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.executable import WholeNumbers
from multitower.engines.reduction import put
from multitower.engines.segments import Program, Segment, cut
from multitower.stages.chain import avals_of, shapes_of
from multitower.stages.cutting import cut_program
from multitower.stages.inference.placed import Placed
from multitower.stages.layout import Layout, moved
from multitower.stages.meeting.rounds import Meeting, find_meetings
from multitower.stages.meeting.totals import StageTotals, compile_add
from multitower.stages.order import forward_in_rounds
from multitower.stages.pieces import Pieces, split_params
from multitower.towers.split import TowerRows


class ForwardChain(NamedTuple):
    """A tower's program in stages, each cut into segments where towers meet.

    Attributes:
        segments: the segments in their order; the outputs of each are the values that others need.
        stage_of: the stage of each segment.
        round_of: the number of meetings before each segment, in ascending order.
        meetings: the places where values are summed over towers.
        avals: shape and dtype of every value, by number.
        inputs: the numbers of the program's arguments.
        num_params: how many of these are whole in every tower; they come first.
        pieces: by segment, the rows of an argument of which each segment takes only some rows.
        results: for each result of the tower its segment, and its place among the outputs of that
            segment.
    """

    segments: tuple[Segment, ...]
    stage_of: tuple[int, ...]
    round_of: tuple[int, ...]
    meetings: tuple[Meeting, ...]
    avals: Mapping[int, Any]
    inputs: tuple[int, ...]
    num_params: int
    pieces: Pieces
    results: tuple[tuple[int, int], ...]


def make_forward_chain(closed: Any, num_params: int, num_stages: int) -> ForwardChain:
    """Cuts a tower's program.

    Args:
        closed: the jaxpr; arguments that are whole in every tower come first. Where towers meet it
            has the marks of `without_collectives`.
        num_params: how many of its arguments are whole in every tower.
        num_stages: how many stages there are.

    Raises:
        ArgumentError: the program cannot be cut into so many stages.
    """
    found = cut_program(closed, num_stages)
    program, places, pieces = split_params(found.program, found.places, num_params)
    segments = cut(program, places, len(found.stage_of))
    made = {x: (s, n) for s, one in enumerate(segments) for n, x in enumerate(one.outputs)}
    results: list[tuple[int, int]] = []
    for x in program.outputs:
        if not isinstance(x, int) or x not in made:  # an argument, or a constant
            results.append((len(segments) - 1, len(segments[-1].outputs)))
            segments[-1] = _handing_on(segments[-1], x, program)
        else:
            results.append(made[x])
    return ForwardChain(
        tuple(segments),
        found.stage_of,
        found.round_of,
        find_meetings(program, places),
        avals_of(program, closed, pieces),
        tuple(program.inputs),
        num_params,
        pieces,
        tuple(results),
    )


def _handing_on(segment: Segment, x: Any, program: Program) -> Segment:
    """The segment with one more result: an input or a constant, which it returns unchanged."""
    inputs, consts = segment.inputs, dict(segment.consts)
    if isinstance(x, int) and x in program.consts:
        consts[x] = program.consts[x]
    elif isinstance(x, int):
        inputs = tuple(sorted({*inputs, x}))
    return replace(segment, inputs=inputs, outputs=(*segment.outputs, x), consts=consts)


class Forward:
    """Runs a chain on a layout; compiles its programs once.

    Args:
        chain: of a program whose last three arguments are a tower's number and its row counts.
        layout: stages on devices.
        placed: arrays that are on devices already.
    """

    def __init__(self, chain: ForwardChain, layout: Layout, placed: Placed) -> None:
        self.chain = chain
        self.layout = layout
        self.layout_of_segments = layout.of_segments(chain.stage_of)
        self.placed = placed
        self.numbers = WholeNumbers()
        self._over_towers = StageTotals(layout)
        equal = EqualPrograms()
        devices = [self.layout_of_segments.devices_of(s) for s in range(len(chain.segments))]
        self.programs = [
            equal.compile_for_each(
                segment.__call__, (shapes_of(chain.avals, segment.inputs),), devices[s]
            )
            for s, segment in enumerate(chain.segments)
        ]
        num_towers = layout.towers.num_towers
        self.adds = {
            one.after: compile_add(
                equal, shapes_of(chain.avals, one.sent), devices[one.after], num_towers
            )
            for one in chain.meetings
        }
        made = [segment.outputs for segment in chain.segments]
        made += [one.totals for one in chain.meetings]
        self.users = {
            x: [s for s, segment in enumerate(chain.segments) if x in segment.inputs]
            for numbers in made
            for x in numbers
            if isinstance(x, int)
        }

    def run(self, params: Sequence[Any], rows: Sequence[TowerRows]) -> dict[int, list[jax.Array]]:
        """Runs all towers.

        Args:
            params: the first arguments of the program, on any device or the host.
            rows: the arguments after these.

        Returns:
            The results of each tower of this process, by number, on the device of its last stage.
        """
        towers_on = self.layout.towers_on
        additions = self._over_towers.additions
        walks = [_Walk(self, r, params, rows, additions[r]) for r in range(len(towers_on))]
        orders = [forward_in_rounds(len(towers), self.chain.round_of) for towers in towers_on]
        for number, own in enumerate(zip(*orders, strict=True)):
            # Replicas take turns, so that all of them have work from the start.
            for turns in itertools.zip_longest(*own):
                for r, turn in enumerate(turns):
                    if turn is not None:
                        walks[r].take(towers_on[r][turn.tower], turn.stage)
            self._meet(walks, number)
        self._over_towers.connected()
        return {tower: results for walk in walks for tower, results in walk.results.items()}

    def _meet(self, walks: Sequence["_Walk"], number: int) -> None:
        """After a round: sums the values that towers have sent, and sends the totals to all."""
        for one in self.chain.meetings:
            if self.chain.round_of[one.after] == number:
                stacks = [walk.sent.pop(one.after) for walk in walks]
                stage = self.chain.stage_of[one.after]
                totals = self._over_towers.total(stage, stacks, self.adds[one.after])
                for walk, total in zip(walks, totals, strict=True):
                    walk.arrive(one, total)


class _Walk:
    """What one replica holds while its towers pass.

    Attributes:
        results: the results of its towers, by number.
        sent: the sums of the values that towers send, for each segment after which they meet.
    """

    def __init__(
        self,
        forward: Forward,
        replica: int,
        params: Sequence[Any],
        rows: Sequence[TowerRows],
        additions: Mapping[int, int],
    ) -> None:
        chain, layout = forward.chain, forward.layout
        segments = range(len(chain.segments))
        self._forward = forward
        self._replica = replica
        self._additions = additions
        # The rows are on the first device; the results go to the last one.
        self._ends = [layout.device(replica, s) for s in (0, layout.num_stages - 1)]
        self._devices = [forward.layout_of_segments.device(replica, s) for s in segments]
        # A NumPy array may change, so its copies are kept during one call only.
        self._copies: dict[Any, jax.Array] = {}
        self._whole = [self._params(s, params) for s in segments]
        self._rows = dict(zip(chain.inputs[chain.num_params : -3], rows, strict=True))
        self._counts = [rows[0].counts(tower) for tower in range(layout.towers.num_towers)]
        self._arrived: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self.results: dict[int, list[Any]] = defaultdict(lambda: [None] * len(chain.results))
        self.sent: dict[int, list[list[jax.Array]]] = defaultdict(list)

    def take(self, tower: int, s: int) -> None:
        """Starts one program, and sends its results to the devices that need them."""
        chain = self._forward.chain
        known = {**self._whole[s], **self._arrived.pop((tower, s), {})}
        values = [
            known[x] if x in known else self._own(x, tower, s) for x in chain.segments[s].inputs
        ]
        made = self._forward.programs[s][self._replica](values)
        outputs = chain.segments[s].outputs
        for x, value in zip(outputs, made, strict=True):
            for user in self._forward.users[x] if isinstance(x, int) else []:
                there = moved(value, self._devices[s], self._devices[user])
                self._arrived[tower, user][x] = there
        for one in chain.meetings:
            if one.after == s:
                own = [made[outputs.index(x)] for x in one.sent]
                add = self._forward.adds[s]
                put(self.sent[s], own, self._additions[tower], add[self._replica] if add else None)
        for place, (stage, n) in enumerate(chain.results):
            if stage == s:
                self.results[tower][place] = moved(made[n], self._devices[s], self._ends[1])

    def arrive(self, meeting: Meeting, totals: Sequence[jax.Array]) -> None:
        """Takes totals over towers: all towers get the same."""
        for x, total in zip(meeting.totals, totals, strict=True):
            for user in self._forward.users[x]:
                there = jax.device_put(total, self._devices[user])
                for tower in self._additions:
                    self._arrived[tower, user][x] = there

    def _params(self, s: int, params: Sequence[Any]) -> dict[int, jax.Array]:
        """The parameters that a segment needs, on its device."""
        chain = self._forward.chain
        needed = {*chain.segments[s].inputs}
        found: dict[int, jax.Array] = {}
        for i, (leaf, number) in enumerate(zip(params, chain.inputs, strict=False)):
            piece = chain.pieces.get(i, {}).get(s)
            if number in needed:
                found[number] = self._copy(i, leaf, s, None)
            elif piece is not None:
                found[piece.number] = self._copy(i, leaf, s, (piece.first, piece.last))
        return found

    def _copy(self, i: int, leaf: Any, s: int, rows: tuple[int, int] | None) -> jax.Array:
        """A parameter, or rows of it, on the device of a segment; copied once for each device."""
        key = (i, self._devices[s], rows)
        if key not in self._copies:
            self._copies[key] = self._forward.placed.on(leaf, self._devices[s], rows)
        return self._copies[key]

    def _own(self, x: int, tower: int, s: int) -> jax.Array:
        """A tower's rows, or its number or row counts, on the device of a segment."""
        if x in self._rows:
            return moved(self._rows[x].pieces[tower], self._ends[0], self._devices[s])
        count = self._counts[tower][self._forward.chain.inputs[-3:].index(x)]
        return self._forward.numbers.on(self._devices[s], count)

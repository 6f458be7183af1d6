"""Forward only: cuts the program of one tower into stages, and runs all towers through them.

It runs single-device programs. Between them there are only moves, and sums where towers meet, so
that the bits are the same on any layout. The host does not wait for a device.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multitower.engines.equal_programs import EqualPrograms
from multitower.engines.executable import WholeNumbers
from multitower.engines.segments import Program, Segment, cut
from multitower.stages.chain import Segmented, avals_of, shapes_of
from multitower.stages.cutting import cut_program
from multitower.stages.layout import Layout, moved
from multitower.stages.meeting.rounds import find_meetings
from multitower.stages.meeting.totals import StageTotals, compile_add
from multitower.stages.order import forward_in_rounds
from multitower.stages.pieces import split_params
from multitower.stages.walk import Walk, meet, take_turns
from multitower.towers.placed import Placed
from multitower.towers.split import TowerRows


@dataclass(frozen=True)
class ForwardChain(Segmented):
    """A tower's program in stages, each cut into segments where towers meet.

    Attributes:
        segments: the segments in their order; the outputs of each are the values that others need.
        results: for each result of the tower its segment, and its place among the outputs of that
            segment.
    """

    segments: tuple[Segment, ...]
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
        tuple(segment.inputs for segment in segments),
        avals_of(program, closed, pieces),
        tuple(program.inputs),
        num_params,
        pieces,
        found.stage_of,
        found.round_of,
        find_meetings(program, places),
        tuple(segments),
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
        self.over_towers = StageTotals(layout)
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

    def run(self, params: Sequence[Any], rows: Sequence[TowerRows]) -> dict[int, list[jax.Array]]:
        """Runs all towers.

        Args:
            params: the first arguments of the program, on any device or the host.
            rows: the arguments after these.

        Returns:
            The results of each tower of this process, by number, on the device of its last stage.
        """
        walks = [_ForwardOnly(self, r, params, rows) for r in range(len(self.layout.replicas))]
        orders = [forward_in_rounds(len(walk.towers), self.chain.round_of) for walk in walks]
        for number, own in enumerate(zip(*orders, strict=True)):
            take_turns(walks, own)
            meet(walks, number, self.chain, self.over_towers, self.adds)
        self.over_towers.connected()
        return {tower: results for walk in walks for tower, results in walk.results.items()}


class _ForwardOnly(Walk):
    """What one replica holds while its towers pass.

    Attributes:
        results: the results of its towers, by number.
    """

    def __init__(
        self, forward: Forward, replica: int, params: Sequence[Any], rows: Sequence[TowerRows]
    ) -> None:
        chain, layout = forward.chain, forward.layout
        places, additions = forward.layout_of_segments, forward.over_towers.additions[replica]
        super().__init__(chain, places, replica, additions, rows=rows, numbers=forward.numbers)
        self._forward = forward
        self._last = layout.device(replica, layout.num_stages - 1)  # the results go there
        # A NumPy array may change, so its copies are kept during one call only.
        self._copies: dict[Any, jax.Array] = {}
        self._on_devices = [self._params(s, params) for s in range(len(chain.segments))]
        self.results: dict[int, list[Any]] = defaultdict(lambda: [None] * len(chain.results))

    def take(self, kind: str, tower: int, s: int) -> None:
        """As `Walk.take`; keeps the results of the tower."""
        chain = self._forward.chain
        made = self._forward.programs[s][self._replica](self._values(tower, s))
        sent = zip(chain.segments[s].outputs, made, strict=True)
        by_number = {x: value for x, value in sent if isinstance(x, int)}  # others are literals
        self._send(by_number, tower, s, self._forward.adds)
        for place, (stage, n) in enumerate(chain.results):
            if stage == s:
                self.results[tower][place] = moved(made[n], self._devices[s], self._last)

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

    def _whole(self, number: int, s: int) -> jax.Array:
        return self._on_devices[s][number]

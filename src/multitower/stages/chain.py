"""A chain: the program of one tower as stages, each with a forward and a backward program.

What these two compute is in `passes`. If towers meet in a stage, it is cut there into several
segments, one for each round; otherwise each stage is one segment.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multitower.engines.segments import Program, Segment, cut, numbers_in
from multitower.stages.cutting import cut_program
from multitower.stages.meeting.rounds import CutProgram, Meeting, find_meetings
from multitower.stages.order import Segments
from multitower.stages.passes.stage import Stage
from multitower.stages.pieces import Pieces, split_params
from multitower.stages.work import work_of
from multitower.towers.leaves import shape_of

SPLIT = -2


@dataclass(frozen=True)
class Segmented:
    """A tower's program in segments, round by round, and in a round stage by stage.

    Attributes:
        needs: the numbers of the inputs of each segment.
        avals: shape and dtype of every value that is an input or is sent, by number.
        inputs: the numbers of the program's arguments.
        num_params: how many of these are whole in every tower; they come first.
        pieces: the pieces of each of these that is split; each segment takes only some rows of it.
        stage_of: the stage of each segment.
        round_of: the round of each segment: the number of meetings before it.
        meetings: the places where values are summed over towers.
    """

    needs: tuple[tuple[int, ...], ...]
    avals: Mapping[int, Any]
    inputs: tuple[int, ...]
    num_params: int
    pieces: Pieces
    stage_of: tuple[int, ...]
    round_of: tuple[int, ...]
    meetings: tuple[Meeting, ...]

    def users(self, number: int) -> list[int]:
        """The segments that have the value of this number as an input."""
        return self._users.get(number, [])

    def meetings_after(self, number: int) -> list[Meeting]:
        """The meetings at the end of a round."""
        return [one for one in self.meetings if self.round_of[one.after] == number]

    @functools.cached_property
    def _users(self) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for s, numbers in enumerate(self.needs):
            for number in numbers:
                found.setdefault(number, []).append(s)
        return found


@dataclass(frozen=True)
class Chain(Segmented):
    """A tower's program in stages, which are differentiated with respect to the parameters.

    Attributes:
        stages: the segments in their order.
        homes: the stage that keeps each parameter: that of the first segment that uses it; or
            SPLIT.
    """

    stages: tuple[Stage, ...]
    homes: tuple[int, ...]

    @property
    def params(self) -> frozenset[int]:
        """The numbers of the parameters, or of their pieces."""
        return frozenset(self.home_of)

    @functools.cached_property
    def home_of(self) -> dict[int, int]:
        """The segment that keeps each parameter or piece, by its number."""
        numbers = self.inputs[: self.num_params]
        pieces = [piece.number for own in self.pieces.values() for piece in own.values()]
        last = len(self.stages) - 1
        return {x: min(self.users(x), default=last) for x in (*numbers, *pieces)}

    def number(self, param: int, stage: int) -> int:
        """The number of a parameter, or of its piece in a stage."""
        own = self.pieces.get(param)
        return self.inputs[param] if own is None else own[stage].number

    def made_by(self, number: int) -> int:
        """The segment that sends the value of this number."""
        return next(s for s, stage in enumerate(self.stages) if number in stage.sent)

    @functools.cached_property
    def segments(self) -> Segments:
        """The stage, the round and the share of the work of each segment."""
        work = [sum(work_of(step.equation) for step in one.segment.steps) for one in self.stages]
        shares: list[float] = []
        for stage, own in zip(self.stage_of, work, strict=True):
            peers = [w for w, s in zip(work, self.stage_of, strict=True) if s == stage]
            shares.append(own / sum(peers) if sum(peers) else 1 / len(peers))
        sends = tuple(bool(stage.sent) for stage in self.stages)
        return Segments(self.stage_of, self.round_of, tuple(shares), sends)

    def num_answers(self, number: int) -> int:
        """How many cotangents come back for the value of this number, which is sent."""
        if number in self.meeting_after:
            return 1  # the total
        return sum(number in stage.differentiated for stage in self.stages)

    def answered_at(self, meeting: Meeting) -> tuple[int, ...]:
        """The numbers of the values that are sent at this meeting and have a cotangent."""
        return tuple(x for x in meeting.sent if x in self.stages[meeting.after].answered)

    @functools.cached_property
    def meeting_after(self) -> dict[int, Meeting]:
        """The meeting of each value that is summed over towers, and of each total, by number."""
        return {x: one for one in self.meetings for x in (*one.sent, *one.totals)}


def make_chain(
    closed: Any,
    num_params: int,
    num_stages: int,
    *,
    may_split: Callable[[Pieces], bool] = lambda pieces: False,
) -> Chain:
    """Cuts a tower's program.

    Args:
        closed: the jaxpr; parameters are its first arguments, and the value to differentiate is its
            first result.
        num_params: how many parameters there are.
        num_stages: how many stages there are.
        may_split: returns whether stacked parameters may be kept in these pieces, one per stage.

    Raises:
        ArgumentError: the program cannot be cut into so many stages.
    """
    rounds = cut_program(closed, num_stages)
    rounds, pieces = _with_pieces(rounds, num_params, may_split)
    program, places = rounds.program, rounds.places
    segments = cut(program, places, len(rounds.stage_of))
    meetings = find_meetings(program, places)
    params = program.inputs[:num_params]
    of_pieces = [piece.number for own in pieces.values() for piece in own.values()]
    active = _active(program, [*params, *of_pieces])
    stages = _make_stages(program, segments, active, meetings)
    users = [
        [rounds.stage_of[s] for s, stage in enumerate(stages) if number in stage.inputs]
        for number in params
    ]
    homes = tuple(
        SPLIT if i in pieces else next(iter(found), num_stages - 1) for i, found in enumerate(users)
    )
    return Chain(
        tuple(stage.inputs for stage in stages),
        avals_of(program, closed, pieces),
        tuple(program.inputs),
        num_params,
        pieces,
        rounds.stage_of,
        rounds.round_of,
        meetings,
        tuple(stages),
        homes,
    )


def _with_pieces(
    rounds: CutProgram, num_params: int, may_split: Callable[[Pieces], bool]
) -> tuple[CutProgram, Pieces]:
    """The rounds with stacked parameters in pieces, if every stage uses one and `may_split`."""
    program, places, found = split_params(rounds.program, rounds.places, num_params)
    stages = [[rounds.stage_of[s] for s in own] for own in found.values()]
    if not found or any(len({*own}) < len(own) for own in stages):
        return rounds, {}
    pieces = {
        i: {rounds.stage_of[s]: piece for s, piece in own.items()} for i, own in found.items()
    }
    if not may_split(pieces):
        return rounds, {}
    return rounds._replace(program=program, places=places), pieces


def _make_stages(
    program: Program, segments: Sequence[Segment], active: set[int], meetings: Sequence[Meeting]
) -> list[Stage]:
    """The stages, with the numbers of what they send, and of what gets a cotangent."""
    num_stages, share = len(segments), program.outputs[0]
    sent_as = {total: x for one in meetings for x, total in zip(one.sent, one.totals, strict=True)}
    meets = {*sent_as.values()}
    made_in = {n: s for s, segment in enumerate(segments) for n in segment.outputs}
    results = _placed_results(program, made_in, num_stages)
    uses: list[set[int]] = [set() for _ in range(num_stages + 1)]  # by later stages
    for s in reversed(range(num_stages)):
        uses[s] = uses[s + 1] | set(segments[s].inputs)
    answers: set[int] = set()
    stages: list[Stage] = []
    for s in reversed(range(num_stages)):
        segment = segments[s]
        made = {*segment.outputs}
        differentiated = _differentiated(segment, active, {*(made & answers), share})
        stages.append(
            Stage(
                _with_inputs(segment, results[s].values(), made_in, program),
                tuple(x for x in segment.outputs if x in uses[s + 1] or x in meets),
                results[s],
                tuple(differentiated),
                tuple(x for x in segment.outputs if x in answers),
                share if share in made and share in active else None,
            )
        )
        answers.update(sent_as.get(x, x) for x in differentiated)
    stages.reverse()
    return stages


def _active(program: Program, params: Sequence[int]) -> set[int]:
    """The numbers of the values through which the first result depends on a parameter."""
    reached = set(params)
    for step in program.steps:
        if step.equation.primitive.name == "stop_gradient" or not reached.intersection(
            numbers_in(step.inputs)
        ):
            continue
        reached.update(
            number
            for number, atom in zip(step.outputs, step.equation.outvars, strict=True)
            if jnp.issubdtype(atom.aval.dtype, jnp.inexact)
        )
    return reached & _needed(program.steps, {program.outputs[0]}, reached)


def _needed(steps: Sequence[Any], ends: set[Any], reached: set[int]) -> set[int]:
    """The numbers in `reached` that the values `ends` depend on, through each other."""
    needed = reached.intersection(numbers_in(ends))
    for step in reversed(steps):
        if needed.intersection(step.outputs):
            needed |= reached.intersection(numbers_in(step.inputs))
    return needed


def _differentiated(segment: Segment, active: set[int], ends: set[Any]) -> list[int]:
    """The inputs through which the segment's values in `ends` depend on parameters."""
    needed = _needed(segment.steps, ends & {*segment.outputs}, active)
    return [x for x in segment.inputs if x in needed]


def _placed_results(
    program: Program, made_in: Mapping[int, int], num_stages: int
) -> list[dict[int, Any]]:
    """The results that each stage makes; the last one also has those that no stage makes."""
    results: list[dict[int, Any]] = [{} for _ in range(num_stages)]
    for place, x in enumerate(program.outputs[1:]):
        stage = made_in.get(x, num_stages - 1) if isinstance(x, int) else num_stages - 1
        results[stage][place] = x
    return results


def _with_inputs(
    segment: Segment, results: Any, made_in: Mapping[int, int], program: Program
) -> Segment:
    """The segment with inputs and constants that are results of the tower without computation."""
    wanted = set(numbers_in(results)) - made_in.keys()
    consts = {x: program.consts[x] for x in sorted(wanted & program.consts.keys())}
    inputs = tuple(sorted({*segment.inputs, *(wanted - consts.keys())}))
    return Segment(segment.steps, inputs, segment.outputs, {**segment.consts, **consts})


def avals_of(program: Program, closed: Any, pieces: Pieces) -> dict[int, Any]:
    """Shape and dtype of every value of a program that was read from `closed`, by number."""
    avals = dict(zip(program.inputs, closed.in_avals, strict=True))
    for step in program.steps:
        pairs = zip(step.outputs, step.equation.outvars, strict=True)
        avals.update((number, atom.aval) for number, atom in pairs)
    for i, own in pieces.items():
        whole = avals[program.inputs[i]]
        for piece in own.values():
            shape = (piece.last - piece.first, *whole.shape[1:])
            avals[piece.number] = jax.ShapeDtypeStruct(shape, whole.dtype)
    return avals


def shapes_of(avals: Mapping[int, Any], numbers: Iterable[int]) -> list[jax.ShapeDtypeStruct]:
    """The shapes of the values of these numbers, to compile programs for."""
    return [shape_of(avals[number]) for number in numbers]

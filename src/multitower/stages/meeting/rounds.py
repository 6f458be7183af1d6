"""Rounds: stages in which towers meet are cut there, into programs of one tower each.

A step's round is the number of meetings before it. All towers run a round, they meet, and the next
round begins. Steps that no meeting needs are run as late as possible, in the last round, in which
one tower after the other goes forward and backward.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

from multitower.engines.segments import Program, Step, numbers_in
from multitower.stages.meeting.sums import is_meeting

# The place of a step that no segment runs: the towers meet there.
NOWHERE = -1


class Meeting(NamedTuple):
    """Values that are summed over towers together, on the devices of one stage.

    Attributes:
        after: the segment that sends the values.
        sent: the numbers of the values.
        totals: the numbers of their totals.
    """

    after: int
    sent: tuple[int, ...]
    totals: tuple[int, ...]


class CutProgram(NamedTuple):
    """A program whose steps have a stage and a round; both together are a segment.

    Attributes:
        program: the program, with three steps for each meeting: a copy of the value, the sum, and a
            copy of the sum.
        places: the segment of each step; NOWHERE for a sum.
        stage_of: the stage of each segment.
        round_of: the round of each segment.
    """

    program: Program
    places: list[int]
    stage_of: tuple[int, ...]
    round_of: tuple[int, ...]


class _Placed(NamedTuple):
    """A step, its stage, and its round if that is fixed."""

    step: Step
    stage: int
    round: int | None


def cut_into_rounds(program: Program, stages: Sequence[int], num_stages: int) -> CutProgram:
    """Cuts stages where towers meet.

    Args:
        program: the program of one tower.
        stages: the stage of each of its steps.
        num_stages: how many stages there are; without meetings, each is a segment.
    """
    if not any(is_meeting(step.equation) for step in program.steps):
        each = tuple(range(num_stages))
        return CutProgram(program, list(stages), each, (0,) * num_stages)
    placed, last = _apart(program, stages)
    rounds = _as_late_as_possible(placed, last)
    segments = sorted({(r, one.stage) for one, r in zip(placed, rounds, strict=True) if r >= 0})
    at = {pair: n for n, pair in enumerate(segments)}
    places = [at.get((r, one.stage), NOWHERE) for one, r in zip(placed, rounds, strict=True)]
    return CutProgram(
        program._replace(steps=[one.step for one in placed]),
        places,
        tuple(stage for _, stage in segments),
        tuple(r for r, _ in segments),
    )


def find_meetings(program: Program, places: Sequence[int]) -> tuple[Meeting, ...]:
    """The meetings of a program in rounds; all sums after the same segment are one meeting."""
    made_in: dict[int, int] = {}
    found: dict[int, list[Step]] = {}
    for step, place in zip(program.steps, places, strict=True):
        made_in.update(dict.fromkeys(step.outputs, place))
        if place == NOWHERE:
            found.setdefault(made_in[step.inputs[0]], []).append(step)
    return tuple(
        Meeting(after, tuple(s.inputs[0] for s in steps), tuple(s.outputs[0] for s in steps))
        for after, steps in sorted(found.items())
    )


def _apart(program: Program, stages: Sequence[int]) -> tuple[list[_Placed], int]:
    """The steps, with three for each sum over towers; and the number of the last round."""
    known = [*program.inputs, *program.consts, *(x for s in program.steps for x in s.outputs)]
    fresh = itertools.count(1 + max(known))
    round_of: dict[int, int] = {}
    placed: list[_Placed] = []
    for step, stage in zip(program.steps, stages, strict=True):
        here = max((round_of.get(x, 0) for x in numbers_in(step.inputs)), default=0)
        if not is_meeting(step.equation):
            placed.append(_Placed(step, stage, None))
            round_of.update(dict.fromkeys(step.outputs, here))
            continue
        sent, total = next(fresh), next(fresh)
        placed.append(_Placed(Step(step.equation, step.inputs, [sent]), stage, here))
        placed.append(_Placed(Step(step.equation, [sent], [total]), stage, NOWHERE))
        placed.append(_Placed(Step(step.equation, [total], step.outputs), stage, None))
        round_of.update(dict.fromkeys(step.outputs, here + 1))
    return placed, max(round_of.values())


def _as_late_as_possible(placed: Sequence[_Placed], last: int) -> list[int]:
    """The first round that needs each step; NOWHERE for a sum."""
    needed: dict[int, int] = {}
    rounds: list[int] = []
    for step, _, fixed in reversed(placed):
        found = fixed
        if found is None:
            found = min((needed.get(x, last) for x in step.outputs), default=last)
        rounds.append(found)
        if found != NOWHERE:
            for x in numbers_in(step.inputs):
                needed[x] = min(needed.get(x, last), found)
    return rounds[::-1]

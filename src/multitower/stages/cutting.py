"""Cutting: which step of a traced program belongs to which stage.

It depends on the program and the number of stages only, not on devices. A step belongs to the
latest stage of its inputs. A step that depends on no heavy step and no mark is floating: it goes to
the first stage that uses its result.
"""

import itertools
from collections.abc import Sequence
from typing import Any

from multitower.engines.segments import (
    Program,
    Step,
    is_call,
    numbers_in,
    open_calls,
    read_program,
    without_dead_steps,
)
from multitower.engines.source_lines import line_of
from multitower.errors import ArgumentError
from multitower.stages.balance import equal_groups, equal_positions
from multitower.stages.marks import is_mark
from multitower.stages.meeting.rounds import CutProgram, cut_into_rounds
from multitower.stages.scans import split_scans
from multitower.stages.work import is_cheap, is_heavy, work_of, work_of_program

_FLOATING = -1


def cut_program(closed: Any, num_stages: int) -> CutProgram:
    """Cuts a program into stages, and these where towers meet.

    Args:
        closed: the jaxpr.
        num_stages: how many stages there are.

    Returns:
        The program, with calls inlined, scans split and cheap steps repeated where that is needed,
        and the stage and the round of each of its steps.

    Raises:
        ArgumentError: the program cannot be cut into so many stages.
    """
    program = without_dead_steps(read_program(closed, is_mark, _refuse_mark))
    if num_stages > 1 and any(is_mark(step.equation) for step in program.steps):
        places, num_levels = _levels_by_marks(program)
        places = _settled(program, places, num_levels - 1)
        places = _grouped(program, places, num_levels, num_stages)
    else:
        program = _opened(closed, num_stages)
        program, places = _cut_by_work(program, closed.in_avals, num_stages)
        places = _settled(program, places, num_stages - 1)
    found = cut_into_rounds(program, places, num_stages)
    program, places = _with_repeated_steps(found.program, found.places)
    return found._replace(program=program, places=places)


def _levels_by_marks(program: Program) -> tuple[list[int], int]:
    """The level of each step, which is the number of marks before it; and the number of levels."""
    levels: dict[int, int] = {}
    places: list[int] = []
    for is_group, steps in _groups_of_marks(program):
        found = [[levels.get(x, _FLOATING) for x in numbers_in(step.inputs)] for step in steps]
        if is_group:  # all leaves of one call are cut together
            level = max([0, *(one for each in found for one in each)])
            places += [level] * len(steps)
            levels.update((number, level + 1) for step in steps for number in step.outputs)
        else:
            level = max(found[0], default=_FLOATING)
            places.append(level)
            levels.update((number, level) for number in steps[0].outputs)
    return places, max([0, *levels.values()]) + 1


def _groups_of_marks(program: Program) -> list[tuple[bool, list[Step]]]:
    """The steps one by one, except that neighbouring marks, as of one call, form a group."""
    groups: list[tuple[bool, list[Step]]] = []
    for step in program.steps:
        marked = is_mark(step.equation)
        if marked and groups and groups[-1][0]:
            made = {number for one in groups[-1][1] for number in one.outputs}
            if not made.intersection(numbers_in(step.inputs)):
                groups[-1][1].append(step)
                continue
        groups.append((marked, [step]))
    return groups


def _grouped(
    program: Program, levels: Sequence[int], num_levels: int, num_stages: int
) -> list[int]:
    """The stage of each step: neighbouring levels are joined so that stages have equal work."""
    if num_levels < num_stages:
        raise ArgumentError(
            f"stages={num_stages}, and the model has {num_levels - 1} mt.cut(h) that its result "
            f"depends on one after the other: {num_levels} stages at most. Mark "
            f"{num_stages - num_levels} more, use stages={num_levels}, or take all marks out to "
            "have the model cut automatically."
        )
    work = [0] * num_levels
    for step, level in zip(program.steps, levels, strict=True):
        work[level] += work_of(step.equation)
    stage_of = equal_groups(work, num_stages)
    return [stage_of[level] for level in levels]


def _opened(closed: Any, num_stages: int) -> Program:
    """The program with its calls opened, except for calls of `jax.checkpoint` that fit a stage."""
    share = work_of_program(closed.jaxpr) / num_stages

    def opens(equation: Any) -> bool:
        is_plain = equation.primitive.name in ("jit", "closed_call")
        return is_call(equation) and (is_plain or work_of(equation) > 1.25 * share)

    return without_dead_steps(open_calls(closed, opens))


def _cut_by_work(
    program: Program, avals: Sequence[Any], num_stages: int
) -> tuple[Program, list[int]]:
    """Cuts into equal shares of the work, in program order, where few bytes have to cross."""
    program = without_dead_steps(split_scans(program, avals, num_stages))
    main = _after_heavy_steps(program)
    work = [work_of(program.steps[at].equation) for at in main]
    if num_stages > 1:
        _refuse_one_heavy_step(program, main, work, num_stages)
    positions = equal_positions(work, _bytes_across(program, main), num_stages)
    places = [_FLOATING] * len(program.steps)
    for stage, (first, last) in enumerate(itertools.pairwise([0, *positions, len(main)])):
        for at in main[first:last]:
            places[at] = stage
    return program, places


def _after_heavy_steps(program: Program) -> list[int]:
    """The numbers of the steps that are heavy or depend on a heavy one; all if none is heavy."""
    reached: set[int] = set()
    main: list[int] = []
    for at, step in enumerate(program.steps):
        if is_heavy(step.equation) or reached.intersection(numbers_in(step.inputs)):
            reached.update(step.outputs)
            main.append(at)
    return main or list(range(len(program.steps)))


def _bytes_across(program: Program, main: Sequence[int]) -> list[int]:
    """The bytes that would have to cross each place between two of these steps."""
    made: dict[int, tuple[int, int]] = {}
    last_use: dict[int, int] = {}
    for position, at in enumerate(main):
        step = program.steps[at]
        last_use.update((x, position) for x in numbers_in(step.inputs) if x in made)
        for number, atom in zip(step.outputs, step.equation.outvars, strict=True):
            made[number] = (position, atom.aval.size * atom.aval.dtype.itemsize)
    across = [0] * (len(main) + 1)
    for number, last in last_use.items():
        first, size = made[number]
        for position in range(first + 1, last + 1):
            across[position] += size
    return across


def _refuse_one_heavy_step(
    program: Program, main: Sequence[int], work: Sequence[int], num_stages: int
) -> None:
    """Refuses a program that has too few places to cut it at."""
    total, largest = sum(work), max(range(len(work)), key=work.__getitem__, default=0)
    num_heavy = sum(is_heavy(program.steps[at].equation) for at in main)
    has_places = len(main) >= num_stages and (num_heavy >= num_stages or num_heavy == 0)
    if has_places and (num_stages == 2 or work[largest] <= total / 2):
        return
    if not main:
        raise ArgumentError(f"stages={num_stages}, and the model computes nothing.")
    equation = program.steps[main[largest]].equation
    where = line_of(equation)
    raise ArgumentError(
        f"stages={num_stages}: the model cannot be cut into so many parts of equal work. It has "
        f"{num_heavy} {'equation' if num_heavy == 1 else 'equations'} with much work (products of "
        "matrices, convolutions, loops), and one "
        f"({equation.primitive.name}{f' at {where}' if where else ''}) has "
        f"{100 * work[largest] / max(total, 1):.0f} % of the work. Use fewer stages, write that "
        "part as several equations, or mark the places with h = mt.cut(h)."
    )


def _settled(program: Program, places: Sequence[int], last: int) -> list[int]:
    """The stage of each step, where floating steps go to the first stage that uses their result."""
    settled = list(places)
    first_use: dict[int, int] = {}
    for at in reversed(range(len(settled))):
        step = program.steps[at]
        if settled[at] == _FLOATING:
            settled[at] = min((first_use.get(x, last) for x in step.outputs), default=last)
        for x in numbers_in(step.inputs):
            first_use[x] = min(first_use.get(x, last), settled[at])
    return settled


def _with_repeated_steps(program: Program, places: Sequence[int]) -> tuple[Program, list[int]]:
    """The program with cheap steps on its inputs in every segment that uses them.

    So a weight that is cast or transposed is sent in its original form, or not at all.
    """
    free = {*program.inputs, *program.consts}
    makes: dict[int, tuple[Step, int]] = {}
    numbers = itertools.count(1 + max([*free, *(n for s in program.steps for n in s.outputs)]))
    steps: list[Step] = []
    stages: list[int] = []
    copies: dict[tuple[int, int], int] = {}

    def here(x: Any, stage: int) -> Any:
        if not isinstance(x, int) or x not in makes or makes[x][1] == stage:
            return x
        if (x, stage) not in copies:
            step = makes[x][0]
            inputs = [here(one, stage) for one in step.inputs]
            outputs = [next(numbers) for _ in step.outputs]
            copies.update(((n, stage), new) for n, new in zip(step.outputs, outputs, strict=True))
            steps.append(Step(step.equation, inputs, outputs))
            stages.append(stage)
        return copies[x, stage]

    for step, stage in zip(program.steps, places, strict=True):
        if is_cheap(step.equation) and free.issuperset(numbers_in(step.inputs)):
            free.update(step.outputs)
            makes.update((number, (step, stage)) for number in step.outputs)
        inputs = [here(x, stage) for x in step.inputs]
        steps.append(Step(step.equation, inputs, step.outputs))
        stages.append(stage)
    return program._replace(steps=steps), stages


def _refuse_mark(equation: Any, mark: Any) -> ArgumentError:
    where = line_of(mark)
    name = equation.primitive.name
    what = {"scan": "a loop (lax.scan)", "while": "a loop (while_loop)", "cond": "a branch"}
    advice = (
        "Take it out: a scan over stacked layers is cut by its length when there are no marks."
        if name == "scan"
        else "Mark a place outside of it."
    )
    return ArgumentError(
        f"mt.cut(h){f' at {where}' if where else ''} is inside {what.get(name, name)}, which runs "
        f"as one equation and cannot be cut there. {advice}"
    )

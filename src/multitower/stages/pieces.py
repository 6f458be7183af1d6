"""Stacked parameters of a scan that is split by its length: every stage has its own layers of them.

A parameter that stages only take slices of, each stage its own, is as many parameters.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from multitower.engines.segments import Program, Step, numbers_in


class Piece(NamedTuple):
    """Some rows of a parameter, `first:last` along axis 0, under a number of their own."""

    first: int
    last: int
    number: int


# For each parameter that is split its pieces by stage.
Pieces = Mapping[int, Mapping[int, Piece]]


def split_params(
    program: Program, places: Sequence[int], num_params: int
) -> tuple[Program, list[int], Pieces]:
    """Splits the parameters of which every stage uses its own rows alone.

    Args:
        program: parameters are its first inputs.
        places: for each step its stage; where towers meet, its segment.
        num_params: how many parameters there are.

    Returns:
        The program without the slices, the places of its steps, and the pieces by these.
    """
    uses: dict[int, list[tuple[Step, int]]] = defaultdict(list)
    for step, place in zip(program.steps, places, strict=True):
        for x in numbers_in(step.inputs):
            uses[x].append((step, place))
    pieces: dict[int, dict[int, Piece]] = {}
    for i, number in enumerate(program.inputs[:num_params]):
        found = _pieces(uses[number])
        if found and number not in program.outputs:
            pieces[i] = found
    numbers = {piece.number for own in pieces.values() for piece in own.values()}
    kept = [
        (step, place)
        for step, place in zip(program.steps, places, strict=True)
        if not numbers.intersection(step.outputs)
    ]
    steps = [step for step, _ in kept]
    return program._replace(steps=steps), [place for _, place in kept], pieces


def rows_of(pieces: Pieces) -> dict[int, dict[int, tuple[int, int]]]:
    """For each parameter in pieces, by stage, its rows `first:last`."""
    return {
        i: {stage: (piece.first, piece.last) for stage, piece in sorted(own.items())}
        for i, own in pieces.items()
    }


def _pieces(uses: Sequence[tuple[Step, int]]) -> dict[int, Piece]:
    """The pieces by stage, if these uses are slices that together are the whole; else nothing."""
    found: dict[int, Piece] = {}
    for step, place in uses:
        rows = _rows(step.equation)
        if rows is None or place in found:
            return {}
        found[place] = Piece(*rows, step.outputs[0])
    ordered = sorted(found.values())
    ends = [0, *(piece.last for piece in ordered)]
    length = uses[0][0].equation.invars[0].aval.shape[0] if len(found) > 1 else 0
    is_whole = [piece.first for piece in ordered] == ends[:-1] and ends[-1] == length
    return found if len(found) > 1 and is_whole else {}


def _rows(equation: Any) -> tuple[int, int] | None:
    """The rows that an equation takes of its input, if that is all that it does."""
    if equation.primitive.name != "slice" or set(equation.params["strides"] or (1,)) != {1}:
        return None
    shape = equation.invars[0].aval.shape
    starts, ends = equation.params["start_indices"], equation.params["limit_indices"]
    if any(starts[1:]) or tuple(ends[1:]) != tuple(shape[1:]):
        return None
    return starts[0], ends[0]

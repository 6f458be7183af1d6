"""Pieces: stacked parameters of a split scan, of which every stage keeps its own layers.

If every stage takes its own slice of a parameter, and nothing else uses it, each slice is treated
as a parameter.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from multitower.engines.segments import Program, Step, numbers_in


class Piece(NamedTuple):
    """Rows `first:last` of a parameter along axis 0, with their own number in the program."""

    first: int
    last: int
    number: int


# By parameter, then by stage: the pieces of parameters that are split.
Pieces = Mapping[int, Mapping[int, Piece]]


def split_params(
    program: Program, places: Sequence[int], num_params: int
) -> tuple[Program, list[int], Pieces]:
    """Splits the parameters of which every stage uses only its own rows.

    Args:
        program: a program whose first inputs are the parameters.
        places: the stage of each step; its segment, if towers meet.
        num_params: how many parameters there are.

    Returns:
        The program without the slices, the places of its steps, and the pieces by place.
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
    """The rows `first:last` of each piece, by parameter, then by stage."""
    return {
        i: {stage: (piece.first, piece.last) for stage, piece in sorted(own.items())}
        for i, own in pieces.items()
    }


def _pieces(uses: Sequence[tuple[Step, int]]) -> dict[int, Piece]:
    """The pieces by stage, if these uses are slices that together are the whole; else empty."""
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
    """The rows `first:last` that an equation slices from its input; None for other equations."""
    if equation.primitive.name != "slice" or set(equation.params["strides"] or (1,)) != {1}:
        return None
    shape = equation.invars[0].aval.shape
    starts, ends = equation.params["start_indices"], equation.params["limit_indices"]
    if any(starts[1:]) or tuple(ends[1:]) != tuple(shape[1:]):
        return None
    return starts[0], ends[0]

"""A loop over the rows in Python, which leaves a copy of its body for each row in the program."""

from typing import Any

from multitower.checks.equations import programs_in
from multitower.engines.source_lines import line_of


def all_one_by_one(program: Any, num_rows: int) -> str | None:
    """Where a program takes all rows of an array one by one, as a loop in Python does.

    Args:
        program: a jaxpr, closed or open.
        num_rows: the size of every axis of rows.

    Returns:
        The line; None if it does not.
    """
    taken: dict[Any, set[int]] = {}  # by the array and its axis
    for equation in getattr(program, "jaxpr", program).eqns:
        for inner in programs_in(equation.params):
            if (place := all_one_by_one(inner, num_rows)) is not None:
                return place
        shape = getattr(equation.invars[0].aval, "shape", ()) if equation.invars else ()
        name, params = equation.primitive.name, equation.params
        for axis in (axis for axis, size in enumerate(shape) if size == num_rows):
            if name == "slice" and equation.outvars[0].aval.shape[axis] == 1:
                rows = taken.setdefault((equation.invars[0], axis), set())
                rows.add(params["start_indices"][axis])
                if len(rows) == num_rows:
                    return line_of(equation) or name
            elif len(equation.outvars) == num_rows and params.get("axis") == axis:  # unstack, split
                return line_of(equation) or name
    return None

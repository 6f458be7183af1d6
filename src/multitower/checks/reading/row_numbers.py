"""The numbers of the rows, 0, 1, 2 ...: which values are such numbers, and find row i?"""

from typing import Any

import numpy as np

from multitower.checks.reading import operations
from multitower.checks.reading.flow import Flow


def is_index(equation: Any, inputs: list[Flow], num_rows: int, real_rows: int) -> bool:
    """Whether a result may be an index that finds row i: made of the numbers of the rows.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        num_rows: the size of every axis of rows.
        real_rows: the number of rows of a real tower; 0 if it is not known.
    """
    name = equation.primitive.name
    if name == "iota":
        return is_number(equation, inputs, num_rows)
    of_rows = [flow.is_index for flow in inputs]
    # (i + 1) % n is the row after, and n - 1 - i the one at the other end.
    is_next = name == "rem" and of_rows[0] and _number(inputs[1]) == num_rows
    is_backwards = name in ("neg", "rev") or (name == "sub" and of_rows == [False, True])
    # i ^ 1 is the neighbour in a pair of rows, which an odd number of rows cuts.
    is_cut = name == "xor" and real_rows % 2 == 1
    # A mask finds no row, nor do places counted in one, as jnp.nonzero and jnp.triu_indices do.
    is_count = name in operations.CUMULATIVE or equation.outvars[0].aval.dtype == bool
    is_other = is_next or is_backwards or is_cut or is_count
    return any(of_rows) and not (is_other or _is_moved(name, inputs, num_rows))


def is_number(equation: Any, inputs: list[Flow], num_rows: int) -> bool:
    """Whether a result is the number of a row, as it is; see `is_index`."""
    name = equation.primitive.name
    if name == "iota":
        sizes = equation.params["shape"]
        return sizes[equation.params["dimension"]] % num_rows == 0
    if name == "select_n":  # i, or i + n where an index is negative
        return all(flow.is_number for flow in inputs[1:])
    if name == "add":
        return _is_plus_rows(inputs, num_rows)
    return name in operations.SAME_NUMBERS and inputs[0].is_number


def place_beside_number(equation: Any, inputs: list[Flow]) -> str | None:
    """Where a place comes from that an index has beside the number of the row itself, if one has.

    `logits[jnp.arange(n), jnp.arange(n) // 16]` has one.
    """
    name = equation.primitive.name
    if name in operations.STACKS and any(flow.is_number for flow in inputs):
        return next((flow.placed for flow in inputs if flow.placed and not flow.is_number), None)
    return inputs[0].beside_number if name in operations.SAME_NUMBERS else None


def rows_of_each(equation: Any, inputs: list[Flow]) -> int:
    """How many rows have the same number in a result that is made of their numbers: 4 in i // 4."""
    name = equation.primitive.name
    if name == "div":
        number, by = inputs[0], _number(inputs[1])
        is_step = number.is_number or number.each > 1  # 2 * i // 4 changes with every second row
        is_whole = by is not None and by > 0 and by.is_integer()
        return number.each * int(by) if by is not None and is_step and is_whole else 1
    if name not in (*operations.SAME_NUMBERS, "add", "sub", "select_n"):
        return 1
    values = inputs[1:] if name == "select_n" else inputs
    return min((flow.each for flow in values if flow.placed), default=1)


def _is_moved(name: str, inputs: list[Flow], num_rows: int) -> bool:
    """Whether it is the number of another row, i - 1; but 3 * i + 1 is an entry of row i."""
    if name not in ("add", "sub") or [flow.is_index for flow in inputs].count(True) != 1:
        return False
    return any(flow.is_number for flow in inputs) and not _is_plus_rows(inputs, num_rows)


def _is_plus_rows(inputs: list[Flow], num_rows: int) -> bool:
    """Whether it is i + n, Python's -1 for the last row, which jnp adds to every index."""
    number, by = sorted(inputs, key=lambda flow: not flow.is_number)
    plus = _number(by)
    return number.is_number and plus is not None and plus % num_rows == 0


def _number(flow: Flow) -> float | None:
    """A constant that is a number, as a float, since an int8 is compared with no larger number."""
    if flow.value is None or np.ndim(flow.value):
        return None
    return float(np.real(flow.value))

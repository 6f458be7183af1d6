"""Places: values that depend on a row's place in its tower, or on how many rows a tower has."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from multitower.checks.equations import is_empty
from multitower.checks.reading import operations
from multitower.checks.reading.along_rows import works_along_rows
from multitower.checks.reading.counts import is_zero
from multitower.checks.reading.flow import Flow, Word
from multitower.checks.reading.loops import Reader

_LOOKS_UP = ("gather", "dynamic_slice")


def placed(equation: Any, word: Word, inputs: Sequence[Flow], reader: Reader) -> str | None:
    """Where the numbers of the rows come from, or how many there are, if a result depends on them.

    Args:
        equation: the operation.
        word: the word for its result.
        inputs: what is known of its inputs.
        reader: knows the number and the axes of rows, and the operation's line.
    """
    name = equation.primitive.name
    if word == "free" and (
        _makes_places(equation, reader)
        or _lays_out_places(equation, inputs, reader)
        or _cut_to_rows(equation, inputs, reader)
        or _tells_rows_apart(equation, inputs, reader)
        or _counts_on(equation, inputs, reader)
    ):
        return reader.where(equation)
    is_gone = name == "mul" and any(map(is_zero, inputs))
    if is_gone or name in operations.DRAWS or _is_among_neighbours(equation, inputs, reader):
        return None  # i * 0, the seed of random numbers, or i % 2
    # Integers of a state are those of tower 0, which this tower chooses by its number.
    values = inputs[1:] if name == "select_n" else inputs
    if word == "free" and any(flow.varies for flow in values):
        return None  # the number of the tower went into it, too
    if _finds_among_all(equation, reader):
        if name == "slice":
            return reader.where(equation)
    elif name in operations.FINDS and (name not in _LOOKS_UP or _finds_rows(equation, reader)):
        if beside := next((flow.beside_number for flow in inputs if flow.beside_number), None):
            return beside
        inputs = [inputs[n] for n in operations.FINDS[name]]  # row i of what belongs to rows
    return next((flow.placed for flow in inputs if flow.placed), None)


def _is_among_neighbours(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether it is a place in a group of rows that is the same in the tower and in the batch."""
    name, out = equation.primitive.name, equation.outvars[0]
    if name not in ("rem", "and") or out.aval.dtype == bool:
        return False
    size = inputs[1].value
    sizes = [0] if size is None else np.ravel(size).tolist()
    if name == "and":  # i & 3 is i % 4
        if any(number <= 0 or number & (number + 1) for number in sizes):
            return False
        sizes = [number + 1 for number in sizes]
    if not all(sizes):
        return True  # it is not known
    if reader.num_rows in sizes:
        return False
    groups = [number * inputs[0].each for number in sizes]
    times = [out.aval.shape[axis] // reader.num_rows for axis in reader.row_axes(out)]
    rows = [number * reader.real_rows for number in times or [1]]
    return all(number % group == 0 for number in rows for group in groups)


def _makes_places(equation: Any, reader: Reader) -> bool:
    """Whether it numbers the rows, or puts them together as `jnp.linspace(0, 1, n)` does."""
    if equation.primitive.name not in ("iota", "concatenate"):
        return False
    axis = equation.params["dimension"]
    of_rows = [axis in reader.row_axes(atom) for atom in equation.invars]
    return axis in reader.row_axes(equation.outvars[0]) and not (of_rows and all(of_rows))


def _lays_out_places(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether a reshape makes rows of what differs: `jnp.repeat(jnp.arange(2), len(x) // 2)`.

    Groups that are whole in a real tower may differ inside, as in `jnp.tile(weights, len(x) // 2)`;
    so may what is there once for all rows and then again, `jnp.repeat(weights, len(x))`.
    """
    if equation.primitive.name != "reshape" or is_empty(equation.outvars[0]):
        return False
    before, after = equation.invars[0].aval.shape, equation.outvars[0].aval.shape
    for axis in reader.row_axes(equation.outvars[0]):
        behind = math.prod(after[axis + 1 :])
        for one in inputs[0].apart:
            group, each = (math.prod(before[n:]) // behind for n in (one, one + 1))
            is_inside = before[one] % reader.num_rows > 0 and 0 < each < group <= after[axis]
            if is_inside and not _is_alike(group, each, after[axis], reader):
                return True
    return False


def _is_alike(group: int, each: int, size: int, reader: Reader) -> bool:
    """Whether groups of entries, in which `each` that are alike follow each other, suit a tower."""
    if each % reader.tower_rows == 0:
        return True
    if group % reader.num_rows == 0:
        return False
    return size * reader.real_rows % (reader.tower_rows * group) == 0


def _tells_rows_apart(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether it makes constants of the rows differ by place: `jnp.cumsum(jnp.ones(len(x)))`."""
    (out,), name = equation.outvars[:1], equation.primitive.name
    axes = reader.row_axes(out)
    known = [not (flow.varies or flow.is_drawn or flow.is_index) for flow in inputs]
    if not (axes and inputs and all(known)):
        return False
    if name == "pad":
        return any(max(equation.params["padding_config"][axis]) > 0 for axis in axes)
    if name in ("cummax", "cummin", "rev", "sort"):  # equal numbers stay equal
        return False
    return works_along_rows(equation, inputs, reader.num_rows, reader.all_rows)


def _cut_to_rows(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether it takes an entry for each row of a tower from a longer array, `table[:len(x)]`.

    Entries that are all equal may be taken, and those at the place of the tower.
    """
    if equation.primitive.name not in ("slice", "dynamic_slice"):
        return False
    are_equal = inputs[0].value is not None and np.ndim(inputs[0].value) == 0
    if are_equal or any(flow.varies for flow in inputs):
        return False
    rows = reader.row_axes(equation.outvars[0])
    return any(axis not in reader.row_axes(equation.invars[0]) for axis in rows)


def _counts_on(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether it adds the number of rows to a number that every tower has, `seen + len(x)`.

    So does `seen + x.size`, or `seen.at[0].add(len(x))`.
    """
    name = equation.primitive.name
    if name in ("scatter-add", "scatter-sub"):
        inputs = [inputs[n] for n in operations.FINDS[name]]
    elif name not in ("add", "sub"):
        return False
    others = [flow for flow in inputs if not _is_count(flow, reader)]
    is_number = lambda flow: flow.is_steady and not (flow.varies or flow.is_drawn)
    return len(others) == 1 and is_number(others[0])


def _is_count(flow: Flow, reader: Reader) -> bool:
    """Whether it is a constant that is the number of rows of a tower, or a multiple of it.

    Or an array that has such a number, as in `totals + jnp.array([len(x), 1])`.
    """
    of_all = reader.num_rows * reader.num_towers
    numbers = [] if flow.value is None else np.ravel(np.real(flow.value)).tolist()
    return any(
        number in reader.made.multiples
        or (number > 0 and number % reader.num_rows == 0 and not (of_all and number % of_all == 0))
        for number in numbers
    )


def _finds_rows(equation: Any, reader: Reader) -> bool:
    """Whether it looks up rows; `logits[i, labels[i]]` looks up a class, which labels decide."""
    params, rows = equation.params, reader.row_axes(equation.invars[0])
    if equation.primitive.name == "gather":
        return any(axis in params["dimension_numbers"].start_index_map for axis in rows)
    shape = equation.invars[0].aval.shape
    return any(params["slice_sizes"][axis] < shape[axis] for axis in rows)


def _finds_among_all(equation: Any, reader: Reader) -> bool:
    """Whether it looks up rows of all towers, by numbers or by place."""
    name, params = equation.primitive.name, equation.params
    if name not in (*_LOOKS_UP, "slice"):
        return False
    shape, own = equation.invars[0].aval.shape, reader.row_axes(equation.invars[0])
    of_all = [a for a, n in enumerate(shape) if n and n % reader.num_rows == 0 and a not in own]
    if name == "slice":
        out = reader.row_axes(equation.outvars[0])
        return any(axis in out for axis in of_all)
    if name == "gather":
        return any(axis in params["dimension_numbers"].start_index_map for axis in of_all)
    return any(params["slice_sizes"][axis] < shape[axis] for axis in of_all)

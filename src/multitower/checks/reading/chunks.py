"""Chunks: rows that `z = h.reshape(2, -1, d)` lays out as halves, one after the other.

`z[0] * z[1]` brings together two rows of different halves, which a tower does not have. A loop over
the halves, or their sum, brings nothing together, as long as the sum is only added up. With their
axes changed, `z.swapaxes(0, 1)`, the halves are `z[:, 0]` and `z[:, 1]`; and if that is laid out as
rows again, the rows are in another order, which depends on how many there are.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from multitower.checks.reading import operations
from multitower.checks.reading.flow import SUM_OF_CHUNKS, Chunks, Flow, line_at, place_of

# They put chunks beside each other.
_BESIDE = {"pad", *operations.STACKS, *operations.WRITTEN}
# It is known which axis of their result an axis of theirs becomes, though their shapes differ.
_MOVES = {"broadcast_in_dim", "dot_general", "reshape", "squeeze", "transpose"}
# They go along an axis, and leave as many entries on it.
_ALONG = {*operations.CUMULATIVE, "sort"}


def pairing(place: str) -> str:
    """Where chunks are brought together, `chunks at model.py:30`, from the operation's place."""
    return place_of("chunks", line_at(place))


def pairs_chunks(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether an operation brings together rows of several chunks.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.

    Returns:
        Whether it does; False also for a sum of chunks, and if that is not known.
    """
    name, all_of = equation.primitive.name, [one for one in _all_chunks(inputs) if one]
    if name == "dot_general" and len(all_of) > 1:
        contracted, batch = equation.params["dimension_numbers"]
        one, other = all_of
        together = {*zip(*contracted, strict=True), *zip(*batch, strict=True)}
        return (one.axis, other.axis) not in together or one.is_reversed != other.is_reversed
    chunks = _in_result(equation, inputs)
    if len(chunks) > 1 or SUM_OF_CHUNKS in chunks:
        return not _is_linear(equation, inputs)
    apart = apart_in(equation, inputs)
    if any(isinstance(one, Chunks) and one.axis in apart for one in chunks):
        return True
    return name not in ("reduce_sum", "cumsum") and _is_along_chunks(equation, inputs)


def with_chunks(
    equation: Any, inputs: Sequence[Flow], found: Sequence[Flow], tower_rows: int
) -> list[Flow]:
    """What is known of an operation's results, with the chunk that each has the rows of.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        found: what is known of its results.
        tower_rows: the number of rows of a tower.
    """
    chunks = _chunks_of_results(equation, inputs, tower_rows)
    return [
        replace(flow, chunk=chunk) if chunk is not None and flow.word == "by row" else flow
        for flow, chunk in zip(found, chunks, strict=True)
    ]


def apart_in(equation: Any, inputs: Sequence[Flow]) -> frozenset[int]:
    """The axes of a result along which what is free of rows in it differs; see `Flow.apart`."""
    name, shapes = equation.primitive.name, _shapes(equation.invars)
    (shape, *_), is_free = _shapes(equation.outvars), [flow.word == "free" for flow in inputs]
    if name == "iota":
        return frozenset([equation.params["dimension"]])
    is_one = len(equation.outvars) == 1
    if not is_one or name in operations.DRAWS or any(flow.is_drawn for flow in inputs):
        return frozenset()
    if name in operations.STACKS and all(is_free) and not _are_equal(equation, inputs):
        return frozenset([equation.params["axis" if name == "stack" else "dimension"]])
    if name == "slice":
        return frozenset(axis for axis in inputs[0].apart if is_free[0] and shape[axis] > 1)
    if name not in _MOVES and not all(_is_spread(one, shape) for one in shapes):
        return frozenset()
    found = (
        moved(equation, number, axis)
        for number, flow in enumerate(inputs)
        if is_free[number]
        for axis in flow.apart
    )
    return frozenset(axis for axis in found if axis is not None)


def _are_equal(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether all inputs are one value, or known to be the same number, or arrays of it."""
    values = [flow.value for flow in inputs]
    is_number = all(v is not None and np.ndim(v) == 0 and v == values[0] for v in values)
    return is_number or all(atom is equation.invars[0] for atom in equation.invars)


def _is_spread(shape: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether an operation on elements takes an input with this shape as one with the result's."""
    pairs = zip(shape, result, strict=False)
    return not shape or (len(shape) == len(result) and all(n in (1, size) for n, size in pairs))


def axes_apart(shape: Sequence[int]) -> frozenset[int]:
    """The axes along which an argument that every tower gets whole may differ: with two entries."""
    return frozenset(axis for axis, size in enumerate(shape) if size > 1)


def in_a_turn(chunk: int | Chunks | None) -> int | Chunks | None:
    """The chunk of what a loop takes in one turn of an array with this one, along axis 0."""
    if not isinstance(chunk, Chunks):
        return chunk
    if chunk.axis == 0:
        return None
    return chunk._replace(axis=chunk.axis - 1, rows=chunk.rows - 1 if chunk.rows else None)


def of_all_turns(chunk: int | Chunks | None) -> int | Chunks | None:
    """The chunk of the array in which a loop puts together what its turns give, along axis 0."""
    if not isinstance(chunk, Chunks):
        return chunk
    return chunk._replace(axis=chunk.axis + 1, rows=0 if chunk.rows is None else chunk.rows + 1)


def turned(equation: Any, flow: Flow, tower_rows: int) -> tuple[tuple[Chunks, int], int] | None:
    """The order of rows that a reshape makes of chunks whose rows come first, one of each chunk.

    Args:
        equation: the reshape.
        flow: what is known of its input.
        tower_rows: the number of rows of a tower.

    Returns:
        The chunks and the number of rows in each, and the axis of all rows in the result; None if
        the result is no such rows.
    """
    chunk, (before, after) = flow.chunk, _shapes([equation.invars[0], equation.outvars[0]])
    if not isinstance(chunk, Chunks) or chunk.rows is None:
        return None
    is_apart = chunk.axis == chunk.rows + 1
    if not is_apart and not (chunk.is_reversed and chunk.rows == chunk.axis + 1):
        return None
    first = min(chunk.axis, chunk.rows)
    axis = _axis_behind(math.prod(before[:first]), tower_rows, after)
    return None if axis is None else ((chunk, before[chunk.rows]), axis)


def turned_back(equation: Any, flow: Flow, tower_rows: int) -> Chunks | None:
    """The chunks that a reshape takes apart again, of rows in the order of `turned`; else None."""
    if flow.order is None or flow.order.turned is None:
        return None
    chunk, each = flow.order.turned
    axis = axis_cut(equation, tower_rows)
    if axis is None:
        return None
    is_apart = chunk.rows is not None and chunk.axis > chunk.rows
    found = Chunks(axis + is_apart, axis + (not is_apart), chunk.is_reversed)
    return found if equation.outvars[0].aval.shape[found.rows or 0] == each else None


def axis_cut(equation: Any, tower_rows: int) -> int | None:
    """The axis of the chunks that a reshape of rows makes; that of the rows is behind it."""
    before, after = _shapes([equation.invars[0], equation.outvars[0]])
    if tower_rows not in before:
        return None
    in_front = math.prod(before[: before.index(tower_rows)])
    for axis in range(len(after) - 1):
        is_whole = 1 < after[axis] < tower_rows == after[axis] * after[axis + 1]
        if is_whole and math.prod(after[:axis]) == in_front:
            return axis
    return None


def _chunks_of_results(
    equation: Any, inputs: Sequence[Flow], tower_rows: int
) -> Sequence[int | Chunks | None]:
    """The chunk of each result; None if it is not known."""
    name, num_results = equation.primitive.name, len(equation.outvars)
    chunks = {flow.chunk for flow in inputs} - {None}
    if name == "reshape" and not chunks:
        if inputs[0].order is not None:
            return [turned_back(equation, inputs[0], tower_rows)]
        axis = axis_cut(equation, tower_rows)
        return [None if axis is None else Chunks(axis, axis + 1)]
    if not chunks or name in _BESIDE or pairs_chunks(equation, inputs):
        return [None] * num_results
    found = _in_result(equation, inputs)
    if len(found) > 1 or _is_along_chunks(equation, inputs):
        return [SUM_OF_CHUNKS] * num_results
    (chunk,) = found or {None}
    if isinstance(chunk, int):
        return [chunk] * num_results
    return _of_all_chunks(equation, inputs, chunk)


def _of_all_chunks(
    equation: Any, inputs: Sequence[Flow], chunk: Chunks | None
) -> Sequence[int | Chunks | None]:
    """The chunk of each result of an array that has all of them."""
    results, params = _shapes(equation.outvars), equation.params
    pairs = zip(_shapes(equation.invars), _all_chunks(inputs), strict=True)
    shape, axis = next((shape, one.axis) for shape, one in pairs if one)
    if len(results) == shape[axis] and params.get("axis") == axis:  # z1, z2 = z
        return range(len(results))
    if equation.primitive.name == "slice" and results[0][axis] == 1:
        return [params["start_indices"][axis]]
    if equation.primitive.name == "rev" and axis in params["dimensions"] and chunk is not None:
        return [chunk._replace(is_reversed=not chunk.is_reversed)]
    return [chunk] * len(results)


def _in_result(equation: Any, inputs: Sequence[Flow]) -> set[int | Chunks]:
    """The chunks of the inputs; where one has all of them, with the axes of the result."""
    found: set[int | Chunks] = set()
    for number, flow in enumerate(inputs):
        if isinstance(flow.chunk, Chunks):
            axis, rows = flow.chunk[:2]
            axis = moved(equation, number, axis)
            behind = None if rows is None else moved(equation, number, rows)
            if axis is not None and (behind is None) == (rows is None):
                found.add(flow.chunk._replace(axis=axis, rows=behind))
        elif flow.chunk is not None:
            found.add(flow.chunk)
    return found


def moved(equation: Any, number: int, axis: int) -> int | None:
    """The axis of the first result that an input's axis becomes; None if that is not known."""
    name, params = equation.primitive.name, equation.params
    before, after = _shapes([equation.invars[number], equation.outvars[0]])
    gone = params.get("axes", params.get("dimensions", ())) if len(after) < len(before) else ()
    found = axis if len(before) == len(after) else None
    if name == "transpose":
        found = params["permutation"].index(axis)
    elif name == "broadcast_in_dim":
        found = params["broadcast_dimensions"][axis]
    elif name == "reshape":
        found = _axis_behind(math.prod(before[:axis]), before[axis], after)
    elif name == "dot_general":
        found = _moved_in_product(equation, number, axis)
    elif gone and axis not in gone:
        found = axis - sum(one < axis for one in gone)
    return found if found is not None and after[found] == before[axis] else None


def _moved_in_product(equation: Any, number: int, axis: int) -> int | None:
    contracted, batch = equation.params["dimension_numbers"]
    if axis in batch[number]:
        return list(batch[number]).index(axis)
    shapes = _shapes(equation.invars)
    free = [
        [n for n in range(len(shape)) if n not in (*contracted[side], *batch[side])]
        for side, shape in enumerate(shapes)
    ]
    if axis in contracted[number]:
        return None
    return len(batch[0]) + number * len(free[0]) + free[number].index(axis)


def _axis_behind(in_front: int, size: int, shape: tuple[int, ...]) -> int | None:
    """The axis of this size that has so many elements in front of it, from one to the next."""
    fits = (n for n, one in enumerate(shape) if one == size and math.prod(shape[:n]) == in_front)
    return next(fits, None)


def _is_linear(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether what it makes of sums of chunks is a sum of chunks."""
    name, others = equation.primitive.name, [flow for flow in inputs if flow.chunk is None]
    if name == "select_n":
        return inputs[0].word == "free"
    if name in _BESIDE or name in operations.LINEAR_TOGETHER or name in operations.LINEAR_ALONE:
        return True
    is_scaled = name in operations.LINEAR_WITH_FREE or (name == "div" and inputs[0] not in others)
    return is_scaled and len(others) == 1 and others[0].word == "free"


def _is_along_chunks(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether it goes over all chunks, from row to row, such as z.max(0)."""
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        contracted, _ = params["dimension_numbers"]
        pairs = zip(_all_chunks(inputs), contracted, strict=True)
        return any(one and one.axis in axes for one, axes in pairs)
    chunk = _all_chunks(inputs)[0]
    if chunk is None:
        return False
    if name in _ALONG:
        return chunk.axis == params.get("axis", params.get("dimension"))
    axes = params.get("axes", ())
    return chunk.axis in axes and chunk.rows not in axes


def _all_chunks(inputs: Sequence[Flow]) -> list[Chunks | None]:
    """Where each input has all chunks; None for one that does not."""
    return [flow.chunk if isinstance(flow.chunk, Chunks) else None for flow in inputs]


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    return [getattr(atom.aval, "shape", ()) for atom in atoms]

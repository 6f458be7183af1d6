"""Layouts: where the rows lie in an axis that holds several values of each of them.

`jnp.concatenate([a, b])` has all rows once, and then all rows again. `x.reshape(rows * tokens, d)`
has the tokens of the first row, then those of the second. `Flow.inner` is how many values of a row
lie side by side: 1 and `tokens`. A reshape that makes an axis of rows where other rows lie, such as
`jnp.concatenate([a, b]).reshape(rows, 2)`, puts them in another order, which depends on how many
rows there are: a row of its result has values of several rows.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from multitower.checks.reading import operations
from multitower.checks.reading.chunks import turned, turned_back
from multitower.checks.reading.flow import Flow, Order, line_at, place_of
from multitower.checks.reading.loops import Reader


def laid_out(
    equation: Any, inputs: list[Flow], plain: Callable[[list[Flow]], Flow], reader: Reader
) -> list[Flow] | None:
    """What is known of the result of a reshape, if it is known where the rows of its input lie.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        plain: what is known of its result, whatever order its inputs are in.
        reader: knows the axes of rows, and the operation's line.

    Returns:
        One flow, whose rows are in an order if they are no longer where rows belong; else None.
    """
    if equation.primitive.name != "reshape" or inputs[0].word != "by row":
        return None
    (result,) = equation.outvars
    if (found := turned(equation, inputs[0], reader.tower_rows)) is not None:
        chunks, axis = found
        step = math.prod(result.aval.shape[axis + 1 :])
        order = Order(laid_apart(reader.where(equation)), -1, "rows", step, chunks)
        return [replace(plain(inputs), order=order)]
    if inputs[0].order is not None and inputs[0].order.turned is not None:
        is_back = turned_back(equation, inputs[0], reader.tower_rows) is not None
        return [plain(inputs)] if is_back else None
    step = _step(equation.invars[0], inputs[0], reader)
    axis = _axis(result, reader)
    if step is None or axis is None:
        return None
    inner, order = _inner(step, result, axis, reader), None
    if inner is None:
        alike = Fraction(math.prod(result.aval.shape[axis + 1 :]), step)
        order = Order(laid_apart(reader.where(equation)), -alike, "rows", step)
    return [replace(plain(inputs), order=order, inner=inner)]


def order_of_result(equation: Any, inputs: Sequence[Flow]) -> Order | None:
    """The order of what an operation makes of each row for itself, or of their sum.

    Returns:
        The order; None if its inputs are in several, or if the operation brings the rows together
        that lie where one belongs. A sum of these is one as long as it is only added up.
    """
    pairs = zip(equation.invars, inputs, strict=True)
    orders = [_moved(flow.order, atom, equation) for atom, flow in pairs if flow.order is not None]
    first, *others = orders
    if first is None or any(one is None or one[1:] != first[1:] for one in others):
        return None
    return first


def _moved(order: Order, atom: Any, equation: Any) -> Order | None:
    if order.step is None:  # sorted rows
        return order
    before, after = atom.aval.shape, equation.outvars[0].aval.shape
    # The values of one row are on the axes from here on, if anything but their sum is in it.
    blocks = [n for n in range(len(before) + 1) if math.prod(before[n:]) == order.step]
    if blocks and before[: blocks[0]] == after[: blocks[0]]:
        return order._replace(step=math.prod(after[blocks[0] :]))
    name = equation.primitive.name
    linear = {*operations.LINEAR_ALONE, *operations.LINEAR_WITH_FREE, "div", "add", "sub"}
    return order._replace(step=0) if name in linear else None


def laid_apart(place: str) -> str:
    """Where a layout brings rows together, `layout at model.py:30`, from the operation's place."""
    return place_of("layout", line_at(place))


def pairs_layouts(equation: Any, inputs: Sequence[Flow], reader: Reader) -> bool:
    """Whether it brings together values that lie row by row, and one row after the other.

    So does a slice that takes all values of some rows, and none of others, as in
    `jnp.repeat(x, 2, axis=0)[:len(x)]`: they stand where values of all rows belong.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        reader: knows the axes of rows.
    """
    if equation.primitive.name == "slice":
        return _leaves_rows_out(equation, inputs[0], reader)
    looks_up = equation.primitive.name in operations.FINDS
    if looks_up and not getattr(
        equation.params.get("dimension_numbers"), "operand_batching_dims", ()
    ):
        return False
    return len(_inners(equation, inputs, reader) - {None}) > 1


def _leaves_rows_out(equation: Any, flow: Flow, reader: Reader) -> bool:
    atom, result = equation.invars[0], equation.outvars[0]
    axis, inner = _axis(atom, reader), _inner_of(atom, flow, reader)
    if axis is None or inner is None or flow.order is not None or _axis(result, reader) is None:
        return False
    start, strides = equation.params["start_indices"][axis], equation.params["strides"]
    stride, size = strides[axis] if strides else 1, result.aval.shape[axis]
    # Of each row all values, or every second one ...: the first row's, then the next row's.
    begins = start % (reader.tower_rows * inner) < stride
    is_whole = inner % stride == 0 and size % (reader.tower_rows * inner // stride) == 0
    return not (begins and is_whole)


def with_inner(
    equation: Any, inputs: Sequence[Flow], found: Sequence[Flow], reader: Reader
) -> list[Flow]:
    """What is known of an operation's results, with how many values of a row lie side by side.

    `laid_out` knows that of a reshape.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        found: what is known of its results.
        reader: knows the axes of rows.
    """
    if equation.primitive.name == "reshape":
        return list(found)
    inners = [
        _inner_of_result(equation, inputs, atom, reader) if flow.word == "by row" else None
        for atom, flow in zip(equation.outvars, found, strict=True)
    ]
    return [
        flow if inner is None else replace(flow, inner=inner)
        for flow, inner in zip(found, inners, strict=True)
    ]


def _inner_of_result(
    equation: Any, inputs: Sequence[Flow], result: Any, reader: Reader
) -> int | None:
    axis, name = _axis(result, reader), equation.primitive.name
    if axis is None or _is_plain(result, axis, reader):
        return None
    if name == "tile" or (name == "concatenate" and equation.params["dimension"] == axis):
        pairs = zip(equation.invars, inputs, strict=True)
        is_whole = {_inner_of(atom, flow, reader) for atom, flow in pairs} == {1}
        return 1 if is_whole else None
    inners = _inners(equation, inputs, reader)
    return inners.pop() if len(inners) == 1 else None


def _inners(equation: Any, inputs: Sequence[Flow], reader: Reader) -> set[int | None]:
    """How many values of a row lie side by side in the inputs that have as many as the result."""
    result = equation.outvars[0]
    size = result.aval.shape[axis] if (axis := _axis(result, reader)) is not None else 0
    axes = [_axis(atom, reader) for atom in equation.invars]
    return {
        flow.inner
        for atom, axis, flow in zip(equation.invars, axes, inputs, strict=True)
        if flow.word == "by row" and axis is not None and atom.aval.shape[axis] == size
    }


def _axis(atom: Any, reader: Reader) -> int | None:
    """The axis of rows, if there is one, and it has whole towers of them."""
    axes, shape = reader.row_axes(atom), getattr(atom.aval, "shape", ())
    return axes[0] if len(axes) == 1 and shape[axes[0]] % reader.tower_rows == 0 else None


def _is_plain(atom: Any, axis: int, reader: Reader) -> bool:
    return atom.aval.shape[axis] == reader.tower_rows


def _inner_of(atom: Any, flow: Flow, reader: Reader) -> int | None:
    axis = _axis(atom, reader)
    if axis is None or flow.word != "by row":
        return None
    return 1 if _is_plain(atom, axis, reader) else flow.inner


def _step(atom: Any, flow: Flow, reader: Reader) -> int | None:
    """How many elements there are from one row to the next; None if that is not known."""
    if flow.order is not None:
        return flow.order.step or None
    axis, inner = _axis(atom, reader), _inner_of(atom, flow, reader)
    return None if axis is None or inner is None else inner * math.prod(atom.aval.shape[axis + 1 :])


def _inner(step: int, atom: Any, axis: int, reader: Reader) -> int | None:
    """How many values of a row lie side by side on its axis; None if other rows lie there."""
    shape = atom.aval.shape
    inner, rest = divmod(step, math.prod(shape[axis + 1 :]))
    fits = inner and not rest and shape[axis] // reader.tower_rows % inner == 0
    return inner if fits else None

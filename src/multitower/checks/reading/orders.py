"""Orders: rows that are sorted, worked on, and put back where they were, bring nothing together.

So does a mixture of experts: tokens are sorted by their expert, each expert works on its own, and
`h[jnp.argsort(order)]` or `zeros.at[order].set(h)` puts them back. A sum over sorted rows is that
of the rows, too. Whatever else is done with sorted rows, or with their order, brings them together:
`settled`. So it is with rows that a reshape lays out in another order.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from multitower.checks.reading import operations
from multitower.checks.reading.flow import Flow, Order, all_places, roots_of
from multitower.checks.reading.layout import laid_out, order_of_result
from multitower.checks.reading.loops import Reader

# One operation's result, from what is known of its inputs, as if nothing had been sorted.
_Plain = Callable[[list[Flow]], Flow]


def in_order(equation: Any, inputs: list[Flow], plain: _Plain, reader: Reader) -> list[Flow] | None:
    """What is known of the results of an operation that sorts rows, or has sorted ones.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        plain: what is known of its result, whatever order its inputs are in.
        reader: knows the axes of rows, and the operation's line.

    Returns:
        One flow per result; None if nothing is sorted, or if this brings sorted rows together.
    """
    if equation.primitive.name == "sort":
        return _sorted(equation, inputs, plain, reader)
    if (found := laid_out(equation, inputs, plain, reader)) is not None:
        return found
    if not any(flow.order for flow in inputs):
        return None
    return _looked_up(equation, inputs, plain) or _side_by_side(equation, inputs, plain)


def _sorted(equation: Any, inputs: list[Flow], plain: _Plain, reader: Reader) -> list[Flow] | None:
    """Sorts rows together with their numbers, as `argsort` does; or an order, which undoes it."""
    keys, numbers = inputs[0], [flow.word == "free" and flow.is_index for flow in inputs]
    along = equation.params["dimension"] in reader.row_axes(equation.invars[0])
    if along and keys.is_drawn and not keys.sources and not any(flow.order for flow in inputs):
        own = replace(plain(inputs), mixed=all_places(inputs), roots=roots_of(inputs, None))
        return [own] * len(inputs)  # jax.random.permutation(key, x): rows that meet at random
    if not along or not any(numbers) or any(flow.order for flow in inputs[1:]):
        return None
    if keys.order is not None and keys.order.what != "numbers":
        return None
    flow = plain(inputs)
    if flow.word != "by row":
        return None  # noise alone
    order = Order(reader.where(equation), reader.count(), "rows")
    own = replace(flow, mixed=all_places(inputs), roots=roots_of(inputs, None))
    rows = [replace(own, placed=one.placed, order=order) for one in inputs]
    undoes = keys.order._replace(what="undoes") if keys.order else None
    found = replace(own, order=undoes or order._replace(what="numbers"))
    return [found if is_numbers else row for row, is_numbers in zip(rows, numbers, strict=True)]


def _looked_up(equation: Any, inputs: list[Flow], plain: _Plain) -> list[Flow] | None:
    """Takes rows in an order, `x[order]`, puts them back, or writes down what undoes the order."""
    name, order = equation.primitive.name, None
    if name == "gather":
        array, index = inputs
        is_taken = array.word == "by row" and array.order is None
        if is_taken and index.order is not None and index.order.what == "numbers":
            order = index.order._replace(what="rows")
        elif not _belong(array.order, index.order, "undoes"):
            return None
    elif name in operations.SCATTERS:
        array, index, written = inputs
        is_inverse = array.word == written.word == "free" and written.is_index
        if is_inverse and index.order is not None and index.order.what == "numbers":
            order = index.order._replace(what="undoes")
        elif array.order is not None or not _belong(written.order, index.order, "numbers"):
            return None
    else:
        return None
    return [replace(plain(inputs), order=order)]


def _belong(rows: Order | None, index: Order | None, what: str) -> bool:
    """Whether these are rows in an order, and an index of this kind that belongs to it."""
    if rows is None or index is None or rows.number != index.number:
        return False
    return (rows.what, index.what) == ("rows", what)


def _side_by_side(equation: Any, inputs: list[Flow], plain: _Plain) -> list[Flow] | None:
    """Each sorted row for itself, `jnp.tanh(x[order])`, an index's sign, or a sum over all rows."""
    order = order_of_result(equation, inputs)
    if order is None:
        return None
    inputs = list(inputs)
    if equation.primitive.name.startswith("ragged_dot"):
        inputs[2] = Flow()  # how many rows each expert gets, which is a sum over rows
    if not all(flow.order or (flow.word == "free" and not flow.placed) for flow in inputs):
        return None
    flow = plain(inputs)
    if flow.word not in ("by row", "linear"):
        return None
    is_sum = flow.word == "linear"
    return [replace(flow, order=None if is_sum else order)] * len(equation.outvars)

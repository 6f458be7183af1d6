"""Operations that work along an axis: do they bring rows together?"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from multitower.checks.reading import operations
from multitower.checks.reading.flow import Flow

_ALONG_AXIS = (*operations.CUMULATIVE, "sort", "rev", "argsort")
# These work on the matrices in the last two axes.
_OF_MATRICES = (
    "cholesky", "eig", "eigh", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve",
)  # fmt: skip
# These along the last axis of their first argument, if they do not say along which.
_ALONG_LAST = ("approx_top_k", "top_k", "tridiagonal_solve")


def works_along_rows(equation: Any, inputs: Sequence[Flow], num_rows: int, all_rows: int) -> bool:
    """Whether an operation brings rows together although its result has an axis of rows.

    Args:
        equation: of a program that is traced with `num_rows` rows.
        inputs: what is known of its arguments.
        num_rows: the size of every axis of rows.
        all_rows: the size of an axis that holds the rows of all towers, which does not count as an
            axis of rows; 0 if there is none.

    Returns:
        Whether it does; False also if that is not known.
    """
    name = equation.primitive.name
    axes = _row_axes(equation.invars[0], num_rows, all_rows)
    if name in _OF_MATRICES:
        ndim = len(equation.invars[0].aval.shape)
        return any(axis >= ndim - 2 for axis in axes)
    if name in _ALONG_LAST:
        ndim = len(equation.invars[0].aval.shape)
        axis = equation.params.get("axis", equation.params.get("reduction_dimension", -1))
        return axis % ndim in axes
    if name in _ALONG_AXIS:
        params = equation.params
        along = params.get("dimensions", (params.get("axis", params.get("dimension", 0)),))
        return any(axis in along for axis in axes)
    if name.startswith("reduce_window") or name.startswith("select_and"):
        window = equation.params.get("window_dimensions", ())
        return any(axis < len(window) and window[axis] > 1 for axis in axes)
    rule = _RULES.get(name)
    return rule is not None and rule(equation, inputs, axes, num_rows)


def row_axes(shape: Sequence[int], num_rows: int, all_rows: int) -> list[int]:
    """The axes of a shape that count as axes of rows; see `works_along_rows`."""
    return [
        axis
        for axis, size in enumerate(shape)
        if size and size % num_rows == 0 and not (all_rows and size % all_rows == 0)
    ]


def batches_of_rows(program: Any, num_rows: int) -> set[Any]:
    """What `jax.lax.map(f, x, batch_size=)` takes of rows: the full batches, and the rest.

    Args:
        program: a jaxpr, closed or open.
        num_rows: the size of every axis of rows.

    Returns:
        The results of these slices, which hold all rows together.
    """
    equations = getattr(program, "jaxpr", program).eqns
    reshaped = {id(e.invars[0]): e for e in equations if e.primitive.name == "reshape"}
    cuts: dict[tuple[int, int, int], Any] = {}  # by the array, the first row and the end
    for equation in equations:
        if equation.primitive.name == "slice" and equation.invars[0].aval.shape[:1] == (num_rows,):
            start, end = (equation.params[name][0] for name in ("start_indices", "limit_indices"))
            cuts[id(equation.invars[0]), start, end] = equation.outvars[0]
    found = set[Any]()
    for (array, start, end), batches in cuts.items():
        rest, groups = cuts.get((array, end, num_rows)), reshaped.get(id(batches))
        if start == 0 and rest is not None and groups is not None:
            num_groups, *of_one = groups.outvars[0].aval.shape
            if of_one and num_groups * of_one[0] == end and num_rows - end < of_one[0]:
                found |= {batches, rest}
    return found


def first_rows(equation: Any, axis: int) -> int:
    """How many rows a slice such as x[:64] takes from the beginning; 0 if it begins elsewhere."""
    starts, strides = equation.params["start_indices"], equation.params["strides"]
    is_plain = starts[axis] == 0 and (strides is None or strides[axis] == 1)
    return equation.params["limit_indices"][axis] if is_plain else 0


def takes_one_of_each_group(equation: Any, num_rows: int, tower_rows: int, real_rows: int) -> bool:
    """Whether it is a slice such as x[1::3] of rows that come in groups of 3, in a real tower too.

    Args:
        equation: the operation.
        num_rows: the size of every axis of rows.
        tower_rows: the number of rows of the tower that is read.
        real_rows: that of a real tower; 0 if it is not known.
    """
    strides = equation.params.get("strides") if equation.primitive.name == "slice" else None
    return any(
        stride > 1
        and size % num_rows == 0
        and size % stride == 0
        and size * real_rows % (tower_rows * stride) == 0
        for stride, size in zip(strides or (), equation.invars[0].aval.shape, strict=False)
    )


def _row_axes(atom: Any, num_rows: int, all_rows: int) -> list[int]:
    return row_axes(getattr(atom.aval, "shape", ()), num_rows, all_rows)


def _gather(equation: Any, inputs: Sequence[Flow], axes: Sequence[int], _: int) -> bool:
    """Whether rows are looked up as in a table, by other numbers than their own."""
    table, indices = inputs[:2]
    if table.word != "by row" or indices.is_index:
        return False
    numbers, sizes = equation.params["dimension_numbers"], equation.params["slice_sizes"]
    shape = equation.invars[0].aval.shape
    return any(axis in numbers.start_index_map and sizes[axis] < shape[axis] for axis in axes)


def _scatter(equation: Any, inputs: Sequence[Flow], axes: Sequence[int], _: int) -> bool:
    """Whether rows are written to other places than their own."""
    indices = inputs[1]
    into = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    return not indices.is_index and any(axis in into for axis in axes)


def _update(equation: Any, inputs: Sequence[Flow], axes: Sequence[int], _: int) -> bool:
    """Whether some rows are written over, at a place that is no row's own number."""
    new = equation.invars[1].aval.shape
    is_part = any(new[axis] < equation.invars[0].aval.shape[axis] for axis in axes)
    return is_part and not any(flow.is_index for flow in inputs[2:])


def _fft(equation: Any, inputs: Sequence[Flow], axes: Sequence[int], _: int) -> bool:
    first = len(equation.invars[0].aval.shape) - len(equation.params["fft_lengths"])
    return any(axis >= first for axis in axes)


def _convolution(equation: Any, inputs: Sequence[Flow], axes: Sequence[int], num_rows: int) -> bool:
    """Whether a filter moves along rows, or rows are channels, except as groups (`jax.vmap`)."""
    params = equation.params
    if params["feature_group_count"] % num_rows == 0 or params["batch_group_count"] % num_rows == 0:
        return False
    batch_axis, channels = params["dimension_numbers"].lhs_spec[:2]
    has_groups = params["feature_group_count"] > 1  # each channel then sums up a part of the rows
    if axes == [channels] and not has_groups and num_rows not in equation.outvars[0].aval.shape:
        return False  # it is a sum over rows, as the gradient of a filter is
    return any(axis != batch_axis for axis in axes) and inputs[0].word == "by row"


def _product(equation: Any, inputs: Sequence[Flow], _: Sequence[int], num_rows: int) -> bool:
    """Whether a matrix, such as a triangular one, makes new rows out of several."""
    if num_rows not in equation.outvars[0].aval.shape:
        return False  # it is a sum over rows, if anything
    contracted, _batch = equation.params["dimension_numbers"]
    return any(
        flow.word == "by row" and any(atom.aval.shape[axis] == num_rows for axis in axes)
        for flow, atom, axes in zip(inputs, equation.invars, contracted, strict=True)
    )


_Rule = Callable[[Any, Sequence[Flow], Sequence[int], int], bool]
_RULES: Mapping[str, _Rule] = {
    "dot_general": _product,
    "gather": _gather,
    "fft": _fft,
    "conv_general_dilated": _convolution,
    "dynamic_update_slice": _update,
    **dict.fromkeys(operations.SCATTERS, _scatter),
}

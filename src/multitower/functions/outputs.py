"""What a loss may return, and how the parts of it are combined over towers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import OutputError, warn
from multitower.towers.leaves import is_key, row_shapes, wide_dtype
from multitower.towers.rows import Tower

_HOLDS_COUNT = (
    "{name} keeps the number of its rows beside its arrays, such as the shape that a probability "
    "distribution notes, or it is a list with an entry for each row. Put together from all towers "
    "it would say {rows} rows, those of one tower. Return its arrays, and make it of all rows "
    "outside of this function."
)
# What train_step itself puts into the metrics.
_RESERVED = ("loss", "tower_losses", "finite_params", "skipped", "loss_scale", "staleness")


def is_per_example(loss: Any, tower_rows: int) -> bool:
    """Whether a loss is a vector over rows (True) or a scalar (False).

    Raises:
        OutputError: it is neither, or not a real floating-point number.
    """
    if not hasattr(loss, "shape") or not hasattr(loss, "dtype"):
        hint = " To return (loss, aux), pass has_aux=True." if isinstance(loss, tuple) else ""
        raise OutputError(
            f"the loss is {type(loss).__name__}, not an array: return the loss of every example "
            f"(shape ({tower_rows},) here) or their mean (shape ()).{hint}"
        )
    if not jnp.issubdtype(loss.dtype, jnp.floating):
        raise OutputError(
            f"the loss has dtype {loss.dtype}: it must be a real floating-point number. Take "
            ".real, jnp.abs(...) or .astype(jnp.float32), whichever is meant."
        )
    if loss.shape not in ((), (tower_rows,)):
        hint = ""
        if loss.shape == (tower_rows, tower_rows):
            hint = (
                f" A prediction of shape ({tower_rows}, 1) minus a target of shape ({tower_rows},) "
                "also has this shape, every row with every other: then take prediction[:, 0]."
            )
        elif tower_rows == 1:
            hint = (
                " An array with one entry per row of the batch that is no argument, such as "
                "targets that the function closes over, also gives this shape: make it an argument."
            )
        elif len(loss.shape) == 1:
            hint = (
                f" If the batch is a list of {loss.shape[0]} rows, make arrays of them: "
                "jax.tree.map(lambda *rows: np.stack(rows), *batch)."
            )
        raise OutputError(
            f"the loss has shape {loss.shape} for {tower_rows} rows: return the loss of every "
            f"example, shape ({tower_rows},), or their mean, shape (). If a row has several terms, "
            f"sum or average them{_mean_of_rows(loss.shape, tower_rows)}. For a mean over "
            f"tokens or other weighted terms return mt.ratio(loss * mask, mask).{hint}"
        )
    return loss.shape != ()


def _mean_of_rows(shape: tuple[int, ...], tower_rows: int) -> str:
    """An example of the mean over all axes but that of the rows, which an ensemble has second."""
    if len(shape) == 1:  # the rows are gone already
        return ", such as error.mean(axis=1) and not error.mean(axis=0)"
    if shape[:1] == (tower_rows,) or tower_rows not in shape:
        return ", e.g. loss.mean(axis=tuple(range(1, loss.ndim)))"
    others = [axis for axis in range(len(shape)) if axis != shape.index(tower_rows)]
    return f", e.g. loss.mean(axis={others[0] if len(others) == 1 else tuple(others)})"


def type_in_words(value: Any) -> str:
    """The type of what a function returned; "array" for every array, traced or not."""
    is_array = hasattr(value, "shape") and hasattr(value, "dtype")
    return "array" if is_array else type(value).__name__


def check_arrays(outputs: Any, name: str) -> None:
    """Refuses what is neither an array nor a number in what a function returned in a tower.

    Raises:
        OutputError: text, a function, or another object; the message names the first.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(outputs)[0]:
        if isinstance(leaf, jax.Array | bool | int | float | complex):
            continue
        what, is_number = type(leaf).__name__, hasattr(leaf, "__jax_array__")
        if isinstance(leaf, np.ndarray | np.generic):
            is_number = jnp.issubdtype(leaf.dtype, np.number) or leaf.dtype == np.bool_
            what = f"{what} of {leaf.dtype}"
        if not is_number:
            raise OutputError(
                f"{name}{jax.tree_util.keystr(path)} is {what}: in a tower a function runs inside "
                "jax.jit and can return arrays and numbers only. Keep everything else outside."
            )


def wide(value: Any) -> jax.Array:
    """The value as an array of at least float32, for sums over many rows."""
    value = jnp.asarray(value)
    return value.astype(wide_dtype(value.dtype))


def row_sum(values: jax.Array, here: Tower) -> jax.Array:
    """The sum of `values`, shape (rows, ...), over the real rows of a tower: shape (...)."""
    real = jnp.arange(values.shape[0], dtype=here.num_rows.dtype) < here.num_rows
    real = real.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.where(real, values, jnp.zeros_like(values)).sum(0)


def find_row_leaves(
    outputs_of: Callable[[list[Any]], Any],
    rows: Sequence[Any],
    outputs: Any,
    name: str,
    skip: Collection[int] = (),
) -> list[bool]:
    """Finds out for each leaf of `outputs` whether it has one entry per row.

    A shape alone cannot tell 16 rows from 16 classes, so the function is also traced with one row
    more, or if that fails, as in a function of whole groups of rows, with twice as many.

    Args:
        outputs_of: the function of the rows that returned `outputs`.
        rows: what it was given, arrays or shapes with rows on axis 0.
        outputs: what it returned, arrays or shapes.
        name: what the outputs are called in messages.
        skip: numbers of leaves that have no rows and may be anything.

    Raises:
        OutputError: a leaf that can be neither averaged nor concatenated; the message names it.
            Or `outputs` has the number of rows in its structure.
    """
    tower_rows = rows[0].shape[0]
    flat, _ = jax.tree_util.tree_flatten_with_path(outputs)
    more_rows, more = 0, None
    if any(leaf.ndim for _, leaf in flat):
        more_rows, more = shapes_with_more_rows(outputs_of, rows, outputs, name)
    verdicts: list[bool] = []
    for number, (path, leaf) in enumerate(flat):
        if number in skip:
            verdicts.append(False)
            continue
        where = f"{name}{jax.tree_util.keystr(path)}"
        shape = tuple(leaf.shape)
        grown = (more_rows, *shape[1:])
        by_row = shape[:1] == (tower_rows,) and (more is None or more[number] == grown)
        if not by_row and more is not None and more[number] != shape:
            hint = _moved(shape, more[number], tower_rows, more_rows) or _of_groups(
                shape, more[number], tower_rows, more_rows - tower_rows
            )
            raise OutputError(
                f"{where} has shape {shape} with {tower_rows} rows and {more[number]} with "
                f"{more_rows}: it can neither be averaged over towers nor concatenated. "
                "Return one entry per row on axis 0, or something whose shape does not depend on "
                f"the rows; or leave it out.{hint}"
            )
        if not by_row and not jnp.issubdtype(leaf.dtype, jnp.inexact):
            raise OutputError(
                f"{where} has dtype {leaf.dtype} and no axis of rows: a tower's {leaf.dtype} "
                "cannot be averaged. Return one entry per row (e.g. correct = prediction == label, "
                "not their count), or a float that is a mean over the rows or the same in every "
                'tower, such as jax.lax.psum(count, "towers") * 1.0. A state for the '
                "next call must also be an argument, with in_axes=None."
            )
        verdicts.append(by_row)
    return verdicts


def _moved(shape: tuple[int, ...], more: tuple[int, ...], tower_rows: int, more_rows: int) -> str:
    """Advice for a leaf with its rows on another axis than the first, as in (time, rows), or ""."""
    changed = [n for n, sizes in enumerate(zip(shape, more, strict=False)) if len({*sizes}) > 1]
    if len(shape) != len(more) or len(changed) != 1:
        return ""
    (axis,) = changed
    if not axis or (shape[axis], more[axis]) != (tower_rows, more_rows):
        return ""
    return f" Here the rows are on axis {axis}: jnp.moveaxis(..., {axis}, 0) puts them first."


def _of_groups(
    shape: tuple[int, ...], more: tuple[int, ...], tower_rows: int, added_rows: int
) -> str:
    """Advice for a leaf with several entries for every row, or one for several rows, or "".

    The shape of several entries does not show whether they are in the order of rows. They may also
    be several arrays over all rows, one after another, which would be in another order if the
    towers' leaves were concatenated.
    """
    added = more[0] - shape[0] if shape and more else 0
    if added < 1 or shape[0] * added_rows != added * tower_rows or shape[1:] != more[1:]:
        return ""
    if added_rows % added == 0 and added < added_rows:
        group = added_rows // added
        return (
            f" Here is one entry for every {group} rows: jnp.repeat(..., {group}, axis=0) has one "
            "for each row."
        )
    if added % added_rows or added == added_rows:
        return ""
    entries = added // added_rows
    inner = ", ".join(map(str, (entries, *shape[1:])))
    return (
        f" Here are {entries} entries for every row: if they lie row by row, return "
        f".reshape(-1, {inner})."
    )


def refuse_ragged(what: str, num_rows: int, num_towers: int) -> OutputError:
    """The error for a mean over towers that would be wrong, because towers have uneven rows."""
    low = num_rows // num_towers * num_towers
    nearest = f"{low} or {low + num_towers}" if low else str(num_towers)
    fewer = [number for number in range(2, num_towers) if num_rows % number == 0]
    fitting = f", or devices={fewer[-1]} (towers={fewer[-1]} if you set towers)" if fewer else ""
    by_row = "mt.ratio of one total and one weight" if "ratio of sums" in what else "one value"
    return OutputError(
        f"the batch has {num_rows} rows and {what}: {num_rows} rows do not fill {num_towers} "
        f"towers evenly, so the mean over towers would be wrong. Return {by_row} per example, or "
        f"use {nearest} rows{fitting}."
    )


def warn_of_copies(names: str, num_rows: int, tower_rows: int) -> None:
    """Warns of a batch that leaves a tower partly full, where copies of rows count.

    Args:
        names: the results in which they count; see `checks.first_look.look`.
        num_rows: the rows of the batch.
        tower_rows: the rows of a full tower.

    Warns:
        MultitowerWarning: always.
    """
    warn(
        f"the batch has {num_rows} rows, and a tower takes {tower_rows}: the tower that is left "
        f"partly full is filled up with copies of rows, which count in {names}. Leave such a batch "
        "out, or its last rows, as mt.make_batches does."
    )


def check_metrics(metrics: Any) -> None:
    """Refuses metrics that are not a dict by name, hold keys, or would replace the loss.

    Raises:
        OutputError: the metrics are wrong.
    """
    if not isinstance(metrics, Mapping):
        raise OutputError(
            f"the loss returned metrics of type {type_in_words(metrics)}: return (loss, metrics) "
            "or (loss, metrics, model_state) with a dict of metrics, {} for none."
        )
    for name in metrics:
        if not isinstance(name, str):
            raise OutputError(
                f"the metrics hold an entry {name!r} ({type(name).__name__}): the names of metrics "
                "are strings, and 'loss' is one of them. Put such entries into a dict of their "
                "own, e.g. {'by_class': {0: x, 1: y}}."
            )
    for name in _RESERVED:
        if name in metrics:
            raise OutputError(
                f"the metrics hold an entry {name!r}: train_step adds its own under that name. "
                f"Rename yours, e.g. '{'cross_entropy' if name == 'loss' else f'my_{name}'}'."
            )
    for path, leaf in jax.tree_util.tree_flatten_with_path(metrics)[0]:
        if is_key(leaf):
            raise OutputError(
                f"metrics{jax.tree_util.keystr(path)} holds PRNG keys: a metric is averaged over "
                "rows or towers, and keys have no mean. Return numbers, or leave it out."
            )


def metric_name(path: Sequence[Any]) -> str:
    """What a metric is called where it is shown, from its path in the dict: `errors/top1`."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def _notes_rows(
    outputs_of: Callable[[list[Any]], Any], rows: Sequence[Any], outputs: Any, more: Any
) -> bool:
    """Whether the structure of `outputs` has the number of rows in it: that of `more` is another.

    A structure that is another one at every call, such as one that holds a new function, says
    nothing.
    """
    structure = jax.tree.structure(outputs)
    if jax.tree.structure(more) == structure:
        return False
    again = jax.eval_shape(outputs_of, row_shapes(rows, rows[0].shape[0]))
    return jax.tree.structure(again) == structure


def shapes_with_more_rows(
    outputs_of: Callable[[list[Any]], Any], rows: Sequence[Any], outputs: Any, name: str
) -> tuple[int, list[tuple[int, ...]] | None]:
    """A larger number of rows, and the shapes of all leaves with it; None if they are not known.

    Args:
        outputs_of: as for `find_row_leaves`.
        rows: as for `find_row_leaves`.
        outputs: as for `find_row_leaves`.
        name: as for `find_row_leaves`.

    Raises:
        OutputError: with any more rows an mt.ratio has totals or weights of a wrong shape: they
            are as many as a tower has rows by accident. Or the structure of `outputs` has the
            number of rows in it.
    """
    tower_rows = rows[0].shape[0]
    refused: list[OutputError] = []
    for num_rows in (tower_rows + 1, 2 * tower_rows):  # the second has whole groups of rows
        more = row_shapes(rows, num_rows)
        try:
            found = jax.eval_shape(outputs_of, more)
        except OutputError as error:
            refused.append(error)
            continue
        except Exception:  # a number of rows is written into the function
            continue
        if _notes_rows(outputs_of, rows, outputs, found):
            raise OutputError(_HOLDS_COUNT.format(name=name, rows=tower_rows))
        leaves = jax.tree.leaves(found)
        known = len(leaves) == len(jax.tree.leaves(outputs))
        return num_rows, [tuple(leaf.shape) for leaf in leaves] if known else None
    if len(refused) == 2:
        raise refused[0]
    return 0, None

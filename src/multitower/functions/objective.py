"""What a tower differentiates: its share of the mean, the sum or the ratio over all rows."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax

from multitower.checks.problems import ADDED, TERMS
from multitower.errors import ArgumentError, OutputError
from multitower.functions.outputs import is_per_example, row_sum, wide
from multitower.functions.ratio import is_ratio, join_ratio, lacks_rows, sums_of, terms_in
from multitower.towers.rows import Tower

Reduction = Literal["mean", "sum"]


def check_reduction(reduction: Any) -> None:
    """Checks `reduction=`.

    Raises:
        ArgumentError: neither `"mean"` nor `"sum"`.
    """
    if reduction not in ("mean", "sum"):
        raise ArgumentError(
            f"reduction={reduction!r}: say 'mean', over all rows, or 'sum'; for a quotient of two "
            "sums return mt.ratio(total, weight)."
        )


def share_of(
    loss: Any, here: Tower, tower_rows: int, reduction: Reduction, weights: Sequence[jax.Array]
) -> jax.Array:
    """A tower's share of the loss over the rows of all towers: the sum of the shares is that loss.

    So every loss has the cotangent that it would have on one device. With the cotangent of a mean
    over the tower's own rows, a backward rule that is not linear, such as one that clips, would
    give another result.

    Args:
        loss: one loss for each row, shape (rows,); or a scalar, the mean over the tower's rows (the
            sum, if `reduction` is `"sum"`); or a ratio.
        here: the tower.
        tower_rows: rows of a full tower.
        reduction: `"mean"` or `"sum"` over all rows.
        weights: for each term of a ratio, the sum of its weights over all towers, shape ().

    Returns:
        At least float32, shape (): in 16 bits a sum over rows may be out of range.

    Raises:
        OutputError: the loss is not a ratio, a scalar or a vector over rows.
    """
    if is_ratio(loss):
        if reduction == "sum":
            raise OutputError(
                "the loss is mt.ratio(total, weight), and reduction='sum': a ratio is the quotient "
                "of two sums already. Leave reduction out."
            )
        return join_ratio(sums_of(loss, here, tower_rows), weights)
    by_row = is_per_example(loss, tower_rows)
    loss = wide(loss)
    if reduction == "sum":
        return row_sum(loss, here) if by_row else loss
    all_rows = here.all_rows.astype(loss.dtype)
    if by_row:
        return row_sum(loss, here) / all_rows
    return loss * (here.num_rows.astype(loss.dtype) / all_rows)


def name_without_rows(
    loss: Any, tower_rows: int, offset_of: Callable[[list[Any]], Any], rows: Sequence[Any]
) -> str | None:
    """Names the part of a loss that is already a sum or mean over the tower's rows, or None.

    Args:
        loss: what the loss returned.
        tower_rows: rows of a tower.
        offset_of: if the loss is a ratio, what was added to it, as a function of the rows.
        rows: the tower's rows, or their shapes.
    """
    if not is_ratio(loss):
        return None if is_per_example(loss, tower_rows) else "a scalar loss"
    if lacks_rows(loss, tower_rows):
        return "a ratio of sums, not of totals and weights with an entry for every row"
    if loss.offset is not None and _rows_reach(offset_of, rows):
        return "a ratio with a mean over rows added to it"
    return None


def as_mean(loss: Any, num_rows: int, reduction: Reduction) -> Any:
    """The loss as a mean over rows, in which rows meet as in the loss; for the first look."""
    if not is_ratio(loss):
        return loss if reduction == "mean" or loss.ndim else loss / num_rows
    mean = sum(total.sum() / num_rows for total, _ in loss.terms)
    return mean if loss.offset is None else loss.offset + mean


def for_first_look(loss: Any, others: Any, num_rows: int, reduction: Reduction) -> dict[str, Any]:
    """What the first look reads of a loss, by name.

    Args:
        loss: what the loss returned.
        others: the results beside it, with their ratios.
        num_rows: rows of a tower.
        reduction: how the losses of rows are combined.
    """
    is_added = reduction == "sum" and not is_ratio(loss) and not loss.ndim
    return {
        "loss": as_mean(loss, num_rows, reduction),
        TERMS: terms_in(loss, others),
        ADDED: loss if is_added else (),
    }


def weights_of(loss: Any, here: Tower, tower_rows: int) -> list[jax.Array]:
    """A tower's sum of weights for each term of a ratio; [] for another loss."""
    return sums_of(loss, here, tower_rows).weights if is_ratio(loss) else []


def num_weights(loss: Any) -> int:
    """How many sums of weights must be known before the loss can be differentiated."""
    return len(loss.terms) if is_ratio(loss) else 0


def _rows_reach(fn: Callable[[list[Any]], Any], rows: Sequence[Any]) -> bool:
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in rows]
    program = jax.make_jaxpr(fn)(shapes)
    from multitower.checks.reading.flow import rows_of  # noqa: PLC0415 (at the first call: importing stays quick)
    from multitower.checks.reading.row_flow import read  # noqa: PLC0415 (at the first call: importing stays quick)

    flows = [rows_of(number) for number in range(len(rows))]
    reading = read(program, flows, rows[0].shape[0])
    return any(flow.word != "free" for flow in reading.outputs)

"""The metrics of a step: what a tower returns of them, and how they are put together."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.functions.calls import Leaves
from multitower.functions.objective import Reduction
from multitower.functions.outputs import find_row_leaves, row_sum, wide
from multitower.functions.ratio import (
    RatioHole,
    RatioSums,
    fill_ratios,
    join_ratio,
    sums_of,
    take_ratios,
)
from multitower.models.state import weigh
from multitower.steps.loss import LossOutput
from multitower.towers.rows import Tower


class MetricSums(NamedTuple):
    """What a tower returns of its metrics to be summed over towers.

    Attributes:
        by_row: the metrics with one entry per row, summed over the tower's rows.
        apart: ratios, as total and weight; with `reduction="sum"` the loss comes last, as a `share`
            without either.
    """

    by_row: Leaves
    apart: list[RatioSums]


def sort_metrics(
    output: LossOutput,
    output_of: Callable[[list[Any]], LossOutput],
    rows: list[Any],
    here: Tower,
    *,
    reduction: Reduction,
    share: jax.Array,
) -> tuple[MetricSums, dict[int, jax.Array]]:
    """Sorts the loss and the metrics by how they are combined over towers.

    Args:
        output: what the loss returned.
        output_of: returns the same for other rows.
        rows: the tower's rows.
        here: the tower.
        reduction: how the losses of rows are combined, `"mean"` or `"sum"`.
        share: this tower's share of the loss.

    Returns:
        What is added up, and the leaves that are averaged over towers, by number.
    """
    num_rows = rows[0].shape[0]
    plain, ratios = _taken(output, reduction)
    apart = [sums_of(one, here, num_rows) for one in ratios]
    if reduction == "sum":
        apart.append(RatioSums([], [], share))
    metrics = jax.tree.map(wide, plain)
    rest_of = lambda rows: _without_loss(_taken(output_of(rows), reduction)[0])
    rest = _without_loss(metrics)
    verdicts = find_row_leaves(rest_of, rows, rest, "metrics")
    # The loss is a vector over rows or a scalar; to find out again would trace the model again.
    of_loss = jax.tree.map(lambda loss: loss.ndim == 1, metrics["loss"])
    of_rest = jax.tree.unflatten(jax.tree.structure(rest), verdicts)
    is_row = jax.tree.leaves({"loss": of_loss, **of_rest})
    leaves, treedef = jax.tree.flatten(metrics)
    counted = {i: row_sum(leaf, here) for i, leaf in enumerate(leaves) if is_row[i]}
    averaged = {i: weigh(leaf, here, num_rows) for i, leaf in enumerate(leaves) if not is_row[i]}
    return MetricSums(Leaves(counted, treedef), apart), averaged


def join_metrics(sums: MetricSums, averaged: dict[int, Any], num_rows: jax.Array) -> dict[str, Any]:
    """The metrics, with the loss, from sums and means over towers."""
    # Sum over weight, rounded once: 5 of 10 is 0.5 however the rows were cut. A step of a loop that
    # is not made has no rows: its metrics are cut off, and must be no NaN for jax_debug_nans.
    count = jnp.maximum(num_rows, 1)
    with jax.numpy_dtype_promotion("standard"):  # the count has 64 bits with jax_enable_x64
        exact = {number: total / count for number, total in sums.by_row.by_number.items()}
    leaves = {**averaged, **exact}
    metrics = sums.by_row.treedef.unflatten(leaves[number] for number in range(len(leaves)))
    weights = [[jnp.where(num_rows, one, 1) for one in ratio.weights] for ratio in sums.apart]
    return fill_ratios(metrics, list(map(join_ratio, sums.apart, weights)))


def _taken(output: LossOutput, reduction: Reduction) -> tuple[Any, list[Any]]:
    """Loss and metrics with holes in place of ratios and of a summed loss; and the ratios."""
    loss = () if reduction == "sum" else output.loss
    plain, ratios = take_ratios({"loss": loss, **output.metrics})
    if reduction == "sum":
        plain["loss"] = RatioHole(len(ratios))
    return plain, ratios


def _without_loss(metrics: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in metrics.items() if name != "loss"}

"""Looks at a loss before it is compiled: what it averages itself, and where towers meet in it."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from multitower.checks.first_look import look
from multitower.engines.job import Shared
from multitower.engines.tracing import look_by_shapes, trace
from multitower.functions.auxiliary import made_of_no_rows
from multitower.functions.objective import for_first_look, name_without_rows, num_weights
from multitower.functions.outputs import find_row_leaves
from multitower.functions.ratio import take_ratios
from multitower.models.state import join
from multitower.processes.together import are_several
from multitower.steps.job import loss_in_tower
from multitower.steps.loss import LossOutput
from multitower.steps.parts import Looked, StepParts
from multitower.steps.state.fields import Fields
from multitower.towers.leaves import row_shapes
from multitower.towers.refusals import name_of, taken_out_of
from multitower.towers.rows import BatchParts, Split, Tower
from multitower.towers.same_call import shapes_in_words


def look_at_loss(
    step: StepParts,
    parts: BatchParts,
    fields: Fields,
    tower_rows: int,
    *,
    num_towers: int,
    is_by_device: bool,
    exchange: bool,
) -> Looked:
    """Traces a loss, and warns of results that depend on the number of towers.

    Args:
        step: what the step is made of.
        parts: a batch, taken apart.
        fields: the state.
        tower_rows: rows of a full tower.
        num_towers: how many towers there are.
        is_by_device: whether that is the number of devices, because `towers` was not given.
        exchange: whether towers may exchange values.

    Raises:
        OutputError: the loss returned a value of the wrong kind or shape.
    """
    forward = loss_in_tower(step, parts.split, tower_rows)
    rows, here = _stand_ins(parts, tower_rows)
    shared = Shared(fields, parts.shared)
    # Under jit, so that rows of one shape are traced once: a large model takes a while.
    run = jax.jit(lambda rows, here: forward(fields.params, shared, rows, here))
    traced = trace(run, (rows, here), num_towers)
    find = lambda: _averaged(traced.shapes, run, rows, here)
    averaged = look_by_shapes(find, num_towers=num_towers)
    batch = lambda: parts.split.rebuild(parts.shared, rows, here)
    copies_count_in = look(
        lambda rows, here, shared: _by_name(step, parts.split, shared, rows, here),
        parts.rows,
        shared,
        averages=True,
        num_devices=num_towers if is_by_device else 0,
        named=lambda number: (
            name_of(parts.split.row_paths(batch())[number], "batch"),
            taken_out_of("batch"),
        ),
        real_rows=tower_rows,
        exchange=exchange,
        fun=step.loss.fn,
    )
    found = Looked(averaged, traced.meets, num_weights(traced.shapes.loss))
    if are_several():
        returned = {"loss": traced.shapes.loss, "metrics": traced.shapes.metrics}
        found = found._replace(program=(shapes_in_words(returned), traced.checksum))
    if step.model_state_from == "mean":  # else tower 0 decides, which is the last one to be short
        found = found._replace(copies_count_in=copies_count_in)
    return found


def averaged_over_rows(
    step: StepParts, parts: BatchParts, fields: Fields, tower_rows: int, num_towers: int
) -> str | None:
    """What a loss averages over rows itself, as `Looked.averaged`, from shapes and in silence."""
    forward = loss_in_tower(step, parts.split, tower_rows)
    rows, here = _stand_ins(parts, tower_rows)

    def find(shared: Shared) -> str | None:
        run = lambda rows, here: forward(shared.state.params, shared, rows, here)
        return _averaged(jax.eval_shape(run, rows, here), run, rows, here)

    return look_by_shapes(find, Shared(fields, parts.shared), num_towers=num_towers)


def _stand_ins(parts: BatchParts, tower_rows: int) -> tuple[list[jax.ShapeDtypeStruct], Tower]:
    """The shapes of a full tower's rows, and the first tower, to trace a loss with."""
    rows = row_shapes(parts.rows, tower_rows)
    return rows, Tower(np.int32(0), np.int32(tower_rows), np.int32(tower_rows))


def _averaged(
    output: Any, run: Callable[[list[Any], Tower], LossOutput], rows: list[Any], here: Tower
) -> str | None:
    """What a loss averages over rows itself, from the shapes of its results, `output`."""
    tower_rows = rows[0].shape[0]
    loss_of = lambda rows: run(rows, here).loss
    without = name_without_rows(output.loss, tower_rows, lambda rows: loss_of(rows).offset, rows)
    metrics, ratios = take_ratios(output.metrics)
    taken = lambda rows, here: take_ratios(run(rows, here).metrics)
    plain = lambda rows, here: taken(rows, here)[0]
    is_row = find_row_leaves(lambda rows: plain(rows, here), rows, metrics, "metrics")
    for number, one in enumerate(ratios):
        offset_of = lambda rows, number=number: taken(rows, here)[1][number].offset
        without = without or name_without_rows(one, tower_rows, offset_of, rows)
    if not (without or all(is_row)):
        steady, _ = made_of_no_rows(plain, rows, here)
        flat, _ = jax.tree_util.tree_flatten_with_path(metrics)
        for number, (path, _) in enumerate(flat):
            if not (is_row[number] or number in steady or without):
                without = f"metrics{jax.tree_util.keystr(path)} is not per example"
    return without


def _by_name(step: StepParts, split: Split, shared: Shared, rows: Any, here: Tower) -> Any:
    # The look finds statistics of rows in the means over towers, so it takes these here, also where
    # the step keeps those of tower 0.
    forward = loss_in_tower(replace(step, model_state_from="mean"), split, len(rows[0]))
    output = forward(shared.state.params, shared, rows, here)
    new = join(shared.state.model_state, output.model_state)
    of_loss = for_first_look(output.loss, output.metrics, len(rows[0]), step.reduction)
    return {**of_loss, "metrics": take_ratios(output.metrics)[0], "model_state": new}

"""Evaluation: every example counts once, whatever the batches, towers and devices."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import OutputError, refuse_foreign
from multitower.functions.objective import Reduction, check_reduction
from multitower.functions.outputs import type_in_words
from multitower.functions.parallel import score_in_parallel
from multitower.functions.ratio import Ratio, by_row, keeping_ratios
from multitower.hardware.devices import DeviceSpec, hashable_spec
from multitower.models.modules import in_evaluation_mode
from multitower.processes.together import whole_on_host
from multitower.steps.loss import model_state_for, takes_model_state
from multitower.towers.leaves import is_key, is_legacy_key
from multitower.towers.surroundings import refuse_traced
from multitower.training.scoring.chunks import (
    Where,
    cached,
    check_same_data,
    chunks,
    for_each_chunk,
)
from multitower.training.scoring.exact_sums import ExactSums

# By name of the metric: one entry per row; for a ratio a list of offset, totals and weights.
Scores = dict[str, jax.Array | list[jax.Array]]


@refuse_foreign(
    global_batch="Say how many rows to score at a time, such as global_batch=256.",
    batch_size="The rows to score at a time, over all towers, are global_batch=.",
)
def evaluate(
    metrics: Callable[..., dict[str, jax.Array]],
    params: Any,
    dataset: Any,
    *,
    global_batch: int,
    model_state: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    reduction: Reduction = "mean",
    stages: int | None = None,
    layout: tuple[int, int] | None = None,
    interleave: bool = False,
) -> dict[str, Any]:
    """Scores a data set on all devices: the mean of each metric over all examples.

    The result equals `{name: fsum(v) / len(v) for name, v in metrics(params, dataset).items()}`.
    Every example counts once.

    Args:
        metrics: `metrics(params, batch)` returns a dict. Each value has one entry per row, a number
            or an array: shape (rows,), or such as (rows, classes). A value may also be
            `mt.ratio(total, weight)` with one entry per row in both: totals and weights are then
            summed over all examples and divided once. `metrics` may also take keyword-only
            `model_state`, like a loss.
        params: the first argument of `metrics`, whole on every device. NNX and Equinox modules in
            it are copied and scored in evaluation mode, as after `model.eval()` or
            `eqx.nn.inference_mode`: without dropout, with BatchNorm's running statistics. Models
            that are functions of arrays (plain JAX, Flax Linen, Haiku, Keras) have no mode: call
            them in `metrics` with `training=False` or the like.
        dataset: a pytree of NumPy arrays with one example per row on axis 0; or an iterator of such
            batches, such as a data loader of another library, for data that do not fit into memory.
            Batches may differ in size. Every process must get the same batches. If there is one
            PRNG key for all rows, every tower gets a different one, in every chunk.
        global_batch: rows to score at a time, 1 or more. Larger batches of an iterator are scored
            in parts, smaller ones are padded with rows that do not count.
        model_state: passed to `metrics`, if it takes it; whole on every device.
        devices: as for `multitower.devices`.
        towers: the number of towers; results then have the same bits on any number of devices. By
            default there is one per device, and results are equal up to rounding.
        reduction: how the entries of the rows are combined: `"mean"` or `"sum"`.
        stages: cut the model into this many parts on different devices, as for `make_parallel`.
            `params` and `model_state` are then on the devices of the stages that use them, not
            whole on every device.
        layout: as for `make_parallel`.
        interleave: as for `make_parallel`.

    Returns:
        For each name the mean (the sum, the ratio) over all examples: a float; or, if each row has
        an array, a NumPy array of float64 of the shape of one row's entry. Sums are exact until
        they are rounded once to float64 (infinity if that cannot hold them), so that they do not
        depend on the order of the examples.

    Raises:
        BatchError: no examples, arrays with different numbers of rows, a batch without rows, or an
            iterator without batches.
        OutputError: a metric without an entry per row, or a complex one; other metrics in a later
            batch than in the first; or metrics that exchange values between towers, if
            `global_batch` does not divide the number of examples.
        ArgumentError: `metrics` needs a `model_state` and there is none; it cannot be cut into so
            many stages; processes pass different numbers of rows; or it is called inside
            `jax.jit` or the like.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> metrics = lambda bound, x: {"above": x > bound}
        >>> mt.evaluate(metrics, 7.0, np.arange(10.0), global_batch=4)
        {'above': 0.2}
    """
    from multitower.training.scoring.modes import warn_of_training_mode  # noqa: PLC0415 (importing stays quick)

    check_reduction(reduction)
    refuse_traced("multitower.evaluate", params, dataset, model_state)
    where = Where(hashable_spec(devices), towers, stages, layout, interleave)
    score = cached(_scorer, metrics, where)
    state = model_state_for(metrics, model_state, "the function metrics", "evaluate")
    warn_of_training_mode(metrics, "metrics", "evaluate")
    check_same_data("evaluate", dataset, global_batch, where)
    shared = where.shared((in_evaluation_mode(params), state))
    seen: dict[str, list[ExactSums]] = {}

    def read(scores: Scores, num_real: int) -> None:
        for name, found in scores.items():
            parts = found if isinstance(found, list) else [found]
            kept = seen.setdefault(name, [ExactSums(part.shape[1:]) for part in parts])
            for part, values in zip(kept, parts, strict=True):
                part.add(whole_on_host(values)[:num_real])  # host-device sync

    each = chunks(dataset, global_batch, where)
    num_rows = for_each_chunk("metrics", lambda rows: score(*shared, rows), read, each)
    sums = {name: [part.total() for part in parts] for name, parts in seen.items()}
    divisor = num_rows if reduction == "mean" else 1
    return {name: _value(parts, num_rows, divisor) for name, parts in sums.items()}


def _value(sums: list[Any], num_rows: int, divisor: int) -> Any:
    """The value of a metric: its sum divided, or the sum of a ratio's offset and quotients.

    `sums` has one sum; for a ratio the sums of its offset, total, weight, total, weight, ...
    """
    own, *ratios = sums
    if not ratios:
        return own / divisor
    return own / num_rows + sum(map(_quotient, ratios[::2], ratios[1::2]))


def _quotient(total: float, weight: float) -> float:
    """Divides as NumPy does: NaN or infinity, not an error, if the weight is 0."""
    with np.errstate(all="ignore"):
        return float(np.divide(total, weight))


def _check(found: Any, num_rows: int) -> None:
    """Refuses what is not a dict of arrays, complex numbers, keys, and numbers averaged over rows.

    Raises:
        OutputError: `metrics` returned one of these.
    """
    if not isinstance(found, Mapping):
        raise OutputError(
            f"metrics(params, batch) returned {type_in_words(found)}: return a dict with one "
            "number per row for each name, such as {'accuracy': predicted == batch['y']}."
        )
    for name, value in found.items():
        if any(map(jnp.iscomplexobj, jax.tree.leaves(value))):
            raise OutputError(
                f"metrics[{name!r}] is complex, and scores are real numbers: return its .real and "
                ".imag by names of their own, or jnp.abs of it."
            )
        if any(map(is_key, jax.tree.leaves(value))):
            raise OutputError(
                f"metrics[{name!r}] holds PRNG keys, which have no mean. Return numbers, or leave "
                "it out."
            )
        if isinstance(value, Ratio):
            continue
        if not (hasattr(value, "shape") or isinstance(value, bool | int | float)):
            raise OutputError(
                f"metrics[{name!r}] is {type_in_words(value)}: each name has one array with one "
                "entry per row, or one mt.ratio. Give its parts names of their own, such as "
                f"{f'{name}/1'!r}, or leave it out."
            )
        # `make_parallel` checks whether arrays have one entry per row.
        if jnp.shape(value) == ():
            raise OutputError(
                f"metrics[{name!r}] has shape () for {num_rows} rows: return one entry per row, "
                "or mt.ratio(total, weight); evaluate takes the mean over the examples itself, or "
                'with reduction="sum" the sum.'
            )


def _parts(value: Any, num_rows: int) -> Any:
    """Arrays with one entry per row, to be summed; for a ratio a list, as in `Scores`."""
    if not isinstance(value, Ratio):
        return value
    offset = 0.0 if value.offset is None else value.offset
    parts = [by_row(part, num_rows) for term in value.terms for part in term]
    return [jnp.broadcast_to(offset, (num_rows,)), *parts]


@functools.lru_cache(maxsize=16)  # an evaluation after every epoch compiles once
def _scorer(metrics: Callable[..., Any], where: Where) -> Callable[..., Scores]:
    takes_state = takes_model_state(metrics, "the function metrics", "evaluate")

    def score_rows(params: Any, model_state: Any, batch: Any) -> Scores:
        with keeping_ratios():
            found = metrics(params, batch, **({"model_state": model_state} if takes_state else {}))
        # What looks like a key of jax.random.PRNGKey counts rows only if there is nothing else.
        with_axes = [leaf for leaf in jax.tree.leaves(batch) if jnp.ndim(leaf)]
        num_rows = min(with_axes, key=is_legacy_key).shape[0]
        _check(found, num_rows)
        return {name: _parts(value, num_rows) for name, value in found.items()}

    return score_in_parallel(score_rows, **where._asdict())

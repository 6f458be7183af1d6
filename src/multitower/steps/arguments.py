"""What `train_step` refuses before anything runs."""

import math
from typing import Any

import jax

from multitower.errors import ArgumentError, whole_number
from multitower.steps.parts import EmaDecay, ShardOptions
from multitower.steps.state.kept import KeptState
from multitower.towers.leaves import are_traced, as_python
from multitower.towers.refusals import is_number
from multitower.towers.rows import BatchParts


def check_numbers(
    ema_decay: Any, global_batch: Any, clip_norm: Any
) -> tuple[EmaDecay | None, int | None, float | None]:
    """The values of `ema_decay=`, `global_batch=` and `clip_norm=`, as numbers of Python.

    Raises:
        ArgumentError: a value is out of range; the message names it.
    """
    ema_decay, clip_norm = as_python(ema_decay), as_python(clip_norm)
    if is_number(ema_decay):
        ema_decay = float(ema_decay)  # one of NumPy would set the dtype of the average
    is_share = isinstance(ema_decay, float) and 0 <= ema_decay <= 1
    if not (ema_decay is None or callable(ema_decay) or is_share):
        raise ArgumentError(
            f"ema_decay={ema_decay!r}: it must be a number from 0 to 1, such as 0.999, or a "
            "function of the number of updates that returns one."
        )
    if global_batch is not None:
        more = ": the rows of a full batch"
        global_batch = whole_number("global_batch", global_batch, 1, more=more)
    if clip_norm is None:
        return ema_decay, global_batch, None
    if not (is_number(clip_norm) and 0 < clip_norm < math.inf):
        raise ArgumentError(
            f"clip_norm={clip_norm!r}: it must be a number above 0, such as 1.0, or None."
        )
    return ema_decay, global_batch, float(clip_norm)


def check_shards(
    shard_update: bool,
    shard_params: bool,
    towers: int | None,
    stages: Any,
    skip_nonfinite: bool,
) -> ShardOptions | None:
    """The options for a state that is split over devices; None if it is whole or split by towers.

    Raises:
        ArgumentError: two options exclude each other.
    """
    if shard_params and (towers is not None or stages is not None):
        given = f"towers={towers}" if stages is None else f"stages={stages}"
        raise ArgumentError(
            f"shard_params=True and {given} exclude each other: the order of sums over parts "
            "depends on the number of devices, and with towers= the bits must not. Leave "
            f"{given.partition('=')[0]} out; or keep it, leave shard_params out, and cut the model "
            "with stages= or split the optimizer state with shard_update=True."
        )
    if shard_update and towers is not None and skip_nonfinite:
        raise ArgumentError(
            "shard_update=True with towers= cannot take back a block's update, as skip_nonfinite "
            "(on_nonfinite='skip' of a Trainer) would: leave that out, or leave towers out."
        )
    if towers is None and stages is None and (shard_params or shard_update):
        return ShardOptions(shard_params)
    return None


def refuse_tracers(state: KeptState, parts: BatchParts, maker: object) -> None:
    """Refuses a call of a step inside another JAX transformation.

    Raises:
        ArgumentError: the state or the batch has values that `jax.jit`, `jax.grad`, `jax.vmap` or
            `jax.lax.scan` traces, whether they are arguments or closed over.
    """
    leaves = [*parts.rows, *parts.shared]
    if state.maker is not maker:
        leaves += jax.tree.leaves(state.contents())
    if are_traced(leaves):
        raise ArgumentError(
            "step(state, batch) was called inside jax.jit, jax.lax.scan or the like. It is "
            "compiled already and runs on all devices by itself: call it directly. Inside another "
            "transformation use mt.value_and_grad and the optimizer's own update."
        )

"""Prediction: the outputs of a model for every row of a data set, chunk by chunk."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import OutputError, refuse_foreign
from multitower.functions.parallel import score_in_parallel
from multitower.hardware.devices import DeviceSpec, hashable_spec
from multitower.models.modules import in_evaluation_mode
from multitower.processes.together import whole_on_host
from multitower.steps.loss import model_state_for, takes_model_state
from multitower.towers.leaves import is_key
from multitower.towers.surroundings import refuse_traced
from multitower.training.scoring.chunks import (
    Where,
    cached,
    check_same_data,
    chunks,
    for_each_chunk,
)

_RESULT = "fn(params, batch)"


@refuse_foreign(
    global_batch="Say how many rows to compute at a time, such as global_batch=256.",
    batch_size="The rows to compute at a time, over all towers, are global_batch=.",
)
def predict(
    fn: Callable[..., Any],
    params: Any,
    data: Any,
    *,
    global_batch: int,
    model_state: Any = None,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    stages: int | None = None,
    layout: tuple[int, int] | None = None,
    interleave: bool = False,
    progress: Callable[[int], None] | None = None,
) -> Any:
    """Returns the outputs of a model for every row of a data set, computed on all devices.

    The result equals `fn(params, data)`. The devices hold two chunks of `global_batch` rows at a
    time, and one program is compiled for all chunks.

    Args:
        fn: `fn(params, batch)` returns a pytree of arrays with one entry per row on axis 0. It may
            also take keyword-only `model_state`, like a loss.
        params: the first argument of `fn`, whole on every device. NNX and Equinox modules are
            copied and run in evaluation mode, as by `multitower.evaluate`.
        data: a pytree of arrays with one example per row on axis 0; or an iterator of such batches,
            which may differ in size. Every process must pass the same data. If there is one PRNG
            key for all rows, every tower gets a different one, in every chunk.
        global_batch: rows to compute at a time, 1 or more.
        model_state: passed to `fn`, if it takes it; whole on every device.
        devices: as for `multitower.devices`.
        towers: the number of towers; results then have the same bits on any number of devices. By
            default there is one per device, and results are equal up to rounding.
        stages: as for `multitower.make_parallel`.
        layout: as for `multitower.make_parallel`.
        interleave: as for `multitower.make_parallel`.
        progress: a function that is called after every chunk with the number of rows done so far.

    Returns:
        The tree that `fn` returns, with NumPy arrays that have one entry per row of `data` on axis
        0, in the order of the rows. With several processes, every process gets all rows.

    Raises:
        BatchError: no rows, arrays with different numbers of rows, or an iterator without batches.
        OutputError: an output without an axis of rows, or of typed PRNG keys; outputs of other
            names or shapes in a later batch than in the first; or a function that exchanges values
            between towers, if `global_batch` does not divide the number of rows.
        ArgumentError: `fn` needs a `model_state` and there is none; it cannot be cut into so many
            stages; processes pass different numbers of rows; or it is called inside `jax.jit`
            or the like.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> mt.predict(lambda w, x: w * x, 2.0, np.arange(5.0), global_batch=2)
        array([0., 2., 4., 6., 8.], dtype=float32)
    """
    from multitower.training.scoring.modes import warn_of_training_mode  # noqa: PLC0415 (importing stays quick)

    refuse_traced("multitower.predict", params, data, model_state)
    where = Where(hashable_spec(devices), towers, stages, layout, interleave)
    run = cached(_runner, fn, where)
    state = model_state_for(fn, model_state, "the function", "predict")
    warn_of_training_mode(fn, "fn", "predict")
    check_same_data("predict", data, global_batch, where)
    shared = where.shared((in_evaluation_mode(params), state))
    found: list[list[np.ndarray[Any, Any]]] = []
    treedef: Any = None
    done = 0

    def read(result: Any, num_real: int) -> None:
        nonlocal treedef, done
        leaves, treedef = jax.tree.flatten(result)
        found.append([whole_on_host(leaf)[:num_real] for leaf in leaves])  # host-device sync
        done += num_real
        if progress is not None:
            progress(done)

    each = chunks(data, global_batch, where)
    for_each_chunk(_RESULT, lambda rows: run(*shared, rows), read, each)
    return jax.tree.unflatten(treedef, [_joined(parts) for parts in zip(*found, strict=True)])


def _joined(parts: Sequence[np.ndarray[Any, Any]]) -> np.ndarray[Any, Any]:
    """The rows of all batches; where dtypes differ, in the one that JAX would take for them.

    Integers get one that holds all of them, as NumPy has for those of 32 bits and JAX has not.
    """
    dtypes = {part.dtype for part in parts}
    are_integers = all(dtype.kind in "iu" for dtype in dtypes)
    return np.concatenate(parts, dtype=(np if are_integers else jnp).result_type(*dtypes))


@functools.lru_cache(maxsize=16)  # repeated calls compile once
def _runner(fn: Callable[..., Any], where: Where) -> Callable[..., Any]:
    takes_state = takes_model_state(fn, "the function", "predict")

    def run(params: Any, model_state: Any, batch: Any) -> Any:
        found = fn(params, batch, **({"model_state": model_state} if takes_state else {}))
        for path, leaf in jax.tree_util.tree_leaves_with_path(found):
            if is_key(leaf):
                raise OutputError(
                    f"{_RESULT}{jax.tree_util.keystr(path)} has typed PRNG keys, and "
                    "predict returns NumPy arrays: return jax.random.key_data(keys) instead."
                )
        return found

    return score_in_parallel(run, **where._asdict())

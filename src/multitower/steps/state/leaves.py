"""The leaves of a training state by name: copied to the host, and back into a state like it."""

from collections.abc import Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import CheckpointError
from multitower.processes.together import whole_on_host
from multitower.steps.state.train_state import TrainState
from multitower.towers.leaves import device_dtype, is_key
from multitower.towers.split import copy_to


def named_leaves(state: TrainState) -> list[tuple[str, Any]]:
    """The leaves of a state with their paths, in canonical order.

    Values that a user wrote into it are cast as the next step would cast them.

    Raises:
        StateError: a value that was written into it does not fit.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(state)
    return [(jax.tree_util.keystr(path), leaf) for path, leaf in flat]


def on_host(leaf: Any) -> np.ndarray[Any, Any]:
    """Copies a leaf to the host; a typed key as its key data. Call it on every process."""
    if not isinstance(leaf, jax.Array):  # a state that a user built may hold Python numbers
        leaf = np.asarray(leaf)
        return leaf.astype(device_dtype(leaf), copy=False)
    data = jax.random.key_data(leaf) if is_key(leaf) else leaf
    # A copy: on a CPU it could be the device's own memory, which the next step overwrites.
    return np.array(whole_on_host(data), copy=True)


def leaf_like(leaf: np.ndarray[Any, Any], old: Any) -> Any:
    """Turns a leaf on the host into what `old` is: a NumPy or JAX array, or a typed key."""
    if isinstance(old, np.ndarray):
        return leaf
    if is_key(old):
        return jax.random.wrap_key_data(jnp.asarray(leaf), impl=jax.random.key_impl(old))
    if isinstance(old, jax.Array) and not old.is_fully_replicated:
        return copy_to([leaf], [old.sharding])[0]  # not whole on a device: it may be too large
    return jnp.asarray(leaf)


def check_same_leaves(written: Mapping[str, Any], named: list[tuple[str, Any]], where: str) -> None:
    """Refuses a checkpoint whose leaves do not match those of the state to fill.

    Args:
        written: the name of the dtype and the shape of each leaf of the checkpoint, by name.
        named: the leaves of the state with their names.
        where: the path of the checkpoint, for messages.

    Raises:
        CheckpointError: a leaf is missing, of another dtype or of another shape.
    """
    wanted = dict(named)
    missing = wanted.keys() ^ written.keys()
    for name in [*wanted, *written]:
        if name in missing:
            holder = "the model" if name in wanted else "the checkpoint"
            raise CheckpointError(
                f"{where}: only {holder} has a leaf {name}: it was saved with "
                f"{_maker_of(missing)}. Resume with the ones that it was made with."
            )
        leaf = jax.random.key_data(wanted[name]) if is_key(wanted[name]) else wanted[name]
        dtype, shape = written[name]
        if [leaf.dtype.name, list(leaf.shape)] != [dtype, list(shape)]:
            is_wider = dtype in _WIDE and jax.dtypes.canonicalize_dtype(dtype).name != dtype
            maker = "jax_enable_x64, which is off here" if is_wider else _maker_of({name})
            raise CheckpointError(
                f"{where}: {name} is {dtype}{list(shape)} in the checkpoint and "
                f"{leaf.dtype.name}{list(leaf.shape)} in the model. It was saved with {maker}."
            )


_WIDE = {"float64", "int64", "uint64", "complex128"}  # there are none without jax_enable_x64


def _maker_of(names: Set[str]) -> str:
    """In words, what was different when a checkpoint with other leaves, `names`, was saved."""
    if any(name.startswith(".local") for name in names):
        return (
            "other options of the step, which decide what towers keep of their own (towers, "
            "sync_every, updates='asynchronous', max_staleness), or, without towers=, on another "
            "number of devices, with a tower on each"
        )
    if any(name.startswith(".loss_scale") for name in names):
        return "another compute_dtype: float16 keeps a loss scale"
    if all(name.startswith(".ema_params") for name in names):
        return "another ema_decay: with one, a state has a moving average of the parameters"
    return "another model or optimizer"

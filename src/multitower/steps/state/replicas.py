"""A cheap check that all devices still hold the same variables."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import StateError
from multitower.hardware.devices import device_name
from multitower.processes.together import are_several, gathered
from multitower.steps.state.train_state import TrainState
from multitower.towers.leaves import is_key


def check_replicas(state: TrainState) -> None:
    """Compares checksums of all variables between devices. With several devices it waits for them.

    Every device adds up the bits of each of its leaves, and only these sums are copied to the host.
    Copies differ if memory or a link is faulty, or if something was written to one of them. With
    several processes, call it on every process.

    Args:
        state: the state of a training step.

    Raises:
        StateError: a device holds other bits than the first one. The message names device and leaf.

    Example:
        >>> import jax.numpy as jnp, optax
        >>> import multitower as mt
        >>> from multitower.steps.state.replicas import check_replicas
        >>> step = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=4)
        >>> check_replicas(step.init(jnp.float32(0.0)))
    """
    by_stage = getattr(state.kept.parts(), "by_stage", None)
    if by_stage is not None:
        check_replicas_of_stages(by_stage(), state.kept.parts().spans_processes)
        return
    # Leaves that are kept in blocks or by one tower, or split over the devices, have no copies.
    whole = state.kept.shared()._replace(local=None)
    every, _ = jax.tree_util.tree_flatten_with_path(whole)
    flat = [
        (path, leaf)
        for path, leaf in every
        if isinstance(leaf, jax.Array) and leaf.is_fully_replicated
    ]
    names = [jax.tree_util.keystr(path) for path, _ in flat]
    if any(isinstance(leaf, np.ndarray) for _, leaf in every):
        _check_hosts(every)  # a first state that is not yet cut into stages
        return
    blocks = [leaf.addressable_shards for _, leaf in flat]
    devices = [shard.device for shard in blocks[0]]
    several = not flat[0][1].is_fully_addressable
    if len(devices) == 1 and not several:
        return  # nothing to compare with, and no program to compile for it
    sums = [_checksums([leaf[i].data for leaf in blocks]) for i in range(len(devices))]
    on_host = np.stack([np.asarray(s) for s in sums])  # host-device sync
    _compare(on_host, names, lambda i, _: devices[i], several)


def check_replicas_of_stages(
    stages: Sequence[Sequence[Mapping[str, jax.Array]]], several: bool
) -> None:
    """Compares the replicas of a model in stages, as `check_replicas` does.

    Args:
        stages: for each stage, what every replica keeps, by its path in the state.
        several: whether other processes have replicas, too.

    Raises:
        StateError: as `check_replicas`.
    """
    kept = [copies for copies in stages if copies[0] and (several or len(copies) > 1)]
    if not kept:
        return
    started = [[_checksums(list(one.values())) for one in copies] for copies in kept]
    on_host = np.concatenate(
        [np.stack([np.asarray(s) for s in sums]) for sums in started],  # host-device sync
        axis=1,
    )
    at = [(copies, path) for copies in kept for path in copies[0]]

    def device_of(replica: int, leaf: int) -> jax.Device:
        copies, path = at[leaf]
        (found,) = copies[replica][path].devices()
        return found

    _compare(on_host, [path for _, path in at], device_of, several)


def _check_hosts(leaves: Sequence[tuple[Any, Any]]) -> None:
    """Compares leaves in the memory of the hosts, if there are several processes."""
    if not are_several():
        return
    # What another step has split over processes has no copies.
    here = lambda leaf: not isinstance(leaf, jax.Array) or leaf.is_fully_replicated
    leaves = [(path, leaf) for path, leaf in leaves if here(leaf)]
    plain = [jax.random.key_data(leaf) if is_key(leaf) else leaf for _, leaf in leaves]
    sums = np.array([zlib.crc32(np.asarray(leaf).tobytes()) for leaf in plain], np.uint32)
    _compare(sums[None], [jax.tree_util.keystr(path) for path, _ in leaves], None, several=True)


def _compare(
    on_host: np.ndarray[Any, Any],
    names: Sequence[str],
    device_of: Callable[[int, int], jax.Device] | None,
    several: bool,
) -> None:
    """Raises an error for the first difference from the first copy, in every process.

    Args:
        on_host: checksums, uint32, shape (copies of this process, leaves).
        names: the names of the leaves.
        device_of: the device of a leaf of a copy; None for the memory of the host.
        several: whether other processes have copies, too.
    """
    first = gathered(on_host[0])[0] if several else on_host[0]
    differs = np.argwhere(on_host != first)
    where = differs[0] if len(differs) else np.array([-1, -1])
    # If one process finds a difference, all raise it: else they would wait for that process.
    for process, (i, leaf) in enumerate(gathered(where) if several else [where]):
        if i < 0:
            continue
        mine = process == jax.process_index()
        name = "the host" if device_of is None else f"device {i}"
        if mine and device_of is not None:
            name = device_name(device_of(i, leaf))
        home = "the host of process 0"
        advice = "Suspect the device; resume from a checkpoint."
        if device_of is not None:
            home = "the first device of process 0" if several else device_name(device_of(0, leaf))
        if several:
            name = f"{name} of process {process}"
            advice = (
                "Either the processes were given other parameters, keys or rows: make them "
                "alike, from the same seed. Or a device is faulty: resume from a checkpoint."
            )
        shown = f" (checksums {on_host[i][leaf]:08x} and {first[leaf]:08x})" if mine else ""
        raise StateError(
            f"{name} holds other bits in state{names[int(leaf)]} than {home}{shown}: the devices "
            f"no longer train the same model. {advice}"
        )


@jax.jit
def _checksums(leaves: list[jax.Array]) -> jax.Array:
    return jnp.stack([_checksum(leaf) for leaf in leaves])


def _checksum(leaf: jax.Array) -> jax.Array:
    """A checksum, uint32: elements as whole numbers, weighted by position, summed modulo 2**32.

    Additions may be made in any order.
    """
    value: Any = leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        value = jax.random.key_data(leaf)
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        value = jnp.stack([value.real, value.imag])
    if value.dtype == jnp.bool_:
        value = value.astype(jnp.uint8)
    width = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32, 8: jnp.uint32}[value.dtype.itemsize]
    bits = jax.lax.bitcast_convert_type(value, width)  # 8 bytes become two numbers
    # Weights by position, so that exchanged elements change the sum.
    flat = bits.reshape(-1).astype(jnp.uint32)
    return jnp.sum(flat * (2 * jnp.arange(flat.size, dtype=jnp.uint32) + 1), dtype=jnp.uint32)

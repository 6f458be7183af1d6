"""Exchanges: how long it takes to send data between each pair of processes."""

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multitower.processes.together import gathered, spread

_ROUNDS = 7
# Elements of float32: one measures the latency, the other the bandwidth.
_SIZES = {"seconds": 1, "mebibyte_seconds": 2**18}


def time_exchanges() -> list[dict[str, Any]]:
    """Measures swaps of arrays between each pair of processes; call it on every process.

    The first devices of two processes send each other an array at the same time. It is the path
    of every reduction: over the network, the switch of a machine, or the loopback interface.

    Returns:
        For each pair `processes`, their two numbers, `seconds` for one number each way, and
        `mebibyte_seconds` for a mebibyte each way; medians, on the clock of the first of the two.
        Empty for a single process.
    """
    here, count = jax.process_index(), jax.process_count()
    firsts = [
        min((one for one in jax.devices() if one.process_index == process), key=lambda one: one.id)
        for process in range(count)
    ]
    own = np.zeros((count, len(_SIZES)))
    # Every process goes through the pairs in the same order, so that there is no deadlock.
    for pair in itertools.combinations(range(count), 2):
        if here in pair:
            swap, sharding = _swap(firsts[pair[0]], firsts[pair[1]])
            own[pair[1]] = [_seconds(swap, sharding, size) for size in _SIZES.values()]
    found = gathered(own)
    return [
        {"processes": [i, j], **dict(zip(_SIZES, found[i, j].tolist(), strict=True))}
        for i, j in itertools.combinations(range(count), 2)
    ]


def _seconds(swap: Callable[[jax.Array], jax.Array], sharding: Any, size: int) -> float:
    array = spread(np.zeros((2, size), np.float32), sharding)
    jax.block_until_ready(swap(array))  # connects and compiles
    times: list[float] = []
    for _ in range(_ROUNDS):
        began = time.perf_counter()
        jax.block_until_ready(swap(array))
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _swap(one: jax.Device, other: jax.Device) -> tuple[Callable[[jax.Array], jax.Array], Any]:
    """A program in which two devices swap their blocks, and the sharding of its argument."""
    mesh = Mesh(np.array([one, other]), ("pair",))
    spec = PartitionSpec("pair")
    move = functools.partial(jax.lax.ppermute, axis_name="pair", perm=[(0, 1), (1, 0)])
    program = jax.jit(jax.shard_map(move, mesh=mesh, in_specs=spec, out_specs=spec))
    return program, NamedSharding(mesh, spec)

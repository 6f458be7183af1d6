"""Together: arrays and decisions of several processes that drive the devices of one run.

Every process runs the same program. Functions marked "call it on every process" wait for the other
processes, so all processes must call them in the same order. In a single process they make a plain
copy or do nothing.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from multitower.errors import DeviceError, MultitowerError, RunError

_LONGEST_LINE = 4096  # bytes; a longer line is cut


def are_several() -> bool:
    """Whether other processes drive devices of this run."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, the only one that writes files of a run."""
    return jax.process_index() == 0


def spans_processes(target: Any) -> bool:
    """Whether a sharding includes devices of other processes."""
    return isinstance(target, Sharding) and not target.is_fully_addressable


def spread(leaf: Any, target: Sharding) -> jax.Array:
    """Copies this process's part of an array that every process has whole.

    Nothing is sent to other processes, so any thread may call it; `jax.device_put` would first
    compare the values between processes.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding == target:
            return leaf
        if not leaf.is_fully_replicated:
            return jax.device_put(leaf, target)  # every process must call it
        leaf = leaf.addressable_shards[0].data
    leaf = leaf if hasattr(leaf, "shape") else jax.device_put(leaf)
    places = target.addressable_devices_indices_map(leaf.shape)
    whole = target.is_fully_replicated
    blocks = [jax.device_put(leaf if whole else leaf[at], one) for one, at in places.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, target, blocks)


def whole_on_host(leaf: Any) -> np.ndarray[Any, Any]:
    """A NumPy array with the blocks of all processes; call it on every process."""
    if isinstance(leaf, jax.Array):
        if leaf.is_fully_replicated:  # one copy is enough
            leaf = leaf.addressable_shards[0].data
        elif not leaf.is_fully_addressable:
            leaf = gathered(leaf, tiled=True)
    return np.asarray(jax.device_get(leaf))  # host-device sync


def settle() -> None:
    """Waits until this process's CPU devices are idle; call it before JAX's own collectives.

    On CPUs XLA runs programs of one device in order, and programs of several devices in order, but
    a program of several devices may overtake one of a single device. JAX's own collectives use all
    devices. They could overtake an exchange over the first device of each process, and each of the
    two would then read what was sent for the other. A GPU runs all of its programs in order.
    """
    devices = jax.local_devices()
    if are_several() and len(devices) > 1 and devices[0].platform == "cpu":
        numbers = [jax.device_put(np.int32(0), device) for device in devices]
        # host-device sync: a device runs these when it has run what it was given before
        jax.block_until_ready([_next(number) for number in numbers])


@jax.jit
def _next(number: jax.Array) -> jax.Array:
    return number + 1


def gathered(value: Any, *, tiled: bool = False) -> Any:
    """The values of all processes, stacked along a new first axis; call it on every process.

    Args:
        value: an array or number, of the same shape and dtype in every process.
        tiled: join along axis 0 without a new axis; a global `jax.Array` becomes whole.

    Returns:
        A NumPy array, shape (processes, ...) unless `tiled`.

    Raises:
        DeviceError: the processes have different numbers of devices.
    """
    _check_equal_devices()
    settle()
    from jax.experimental import multihost_utils  # noqa: PLC0415 (slow; not for one process)

    return multihost_utils.process_allgather(value, tiled=tiled)


@functools.cache  # it is the same for as long as the processes live
def _check_equal_devices() -> None:
    counts = collections.Counter(one.process_index for one in jax.devices())
    if len(set(counts.values())) > 1:
        each = ", ".join(str(counts[process]) for process in sorted(counts))
        raise DeviceError(
            f"the processes have {each} devices, and all must have equally many. Set "
            "visible_devices=, or what the cluster gives each process."
        )


def of_first(number: int) -> int:
    """The number that process 0 has; call it on every process."""
    return int(gathered(np.int32(number))[0]) if are_several() else number


def by_first(make: Callable[[], str]) -> str:
    """Calls a function on process 0 alone; call it on every process.

    Args:
        make: returns a line for the other processes, such as the path it has made.

    Returns:
        That line, in every process.

    Raises:
        RunError: in every process, the error that process 0 raised.
    """
    if not are_several():
        return make()
    text = ""
    if is_first():
        try:
            text = f"+{make()}"
        except MultitowerError as error:
            text = f"-{error}"
    said = lines_of_all(text)[0]
    if said.startswith("-"):
        raise RunError(said[1:])
    return said[1:]


def lines_of_all(line: str) -> list[str]:
    """One line from every process, at most 4096 bytes each, in order; call it on every process."""
    if not are_several():
        return [line]
    sent = np.zeros(_LONGEST_LINE, np.uint8)
    own = np.frombuffer(line.encode()[:_LONGEST_LINE], np.uint8)
    sent[: own.size] = own
    return [bytes(one).rstrip(b"\0").decode(errors="replace") for one in gathered(sent)]


def texts_of_all(text: str) -> list[str]:
    """A text of any length from every process, in their order; call it on every process."""
    if not are_several():
        return [text]
    own = np.frombuffer(text.encode(), np.uint8)
    sizes = [int(size) for size in gathered(np.int32(own.size))]
    sent = np.zeros(max(sizes), np.uint8)
    sent[: own.size] = own
    texts = zip(gathered(sent), sizes, strict=True)
    return [bytes(one[:size]).decode(errors="replace") for one, size in texts]

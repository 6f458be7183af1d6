"""Processes: what arrays and decisions need when several processes drive the devices together.

Every process runs the same program, and calls what is marked "all together" here in the same
order: it waits for the others. In a single process all of this is a plain copy or nothing at all.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

from multitower.errors import DeviceError, MultitowerError, RunError

_LONGEST_LINE = 4096  # bytes; what is longer is cut


def are_several() -> bool:
    """Whether other processes drive devices of this run."""
    return jax.process_count() > 1


def is_first() -> bool:
    """Whether this is process 0, which alone writes what a run needs once."""
    return jax.process_index() == 0


def spans_processes(target: Any) -> bool:
    """Whether a device or sharding is, in part, another process's."""
    return isinstance(target, Sharding) and not target.is_fully_addressable


def spread(leaf: Any, target: Sharding) -> jax.Array:
    """Copies this process's part of an array that every process has whole.

    Nothing is sent to other processes, so that any thread may call it: `jax.device_put` would
    compare the values between processes first.
    """
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.sharding == target:
            return leaf
        if not leaf.is_fully_replicated:
            return jax.device_put(leaf, target)  # all together
        leaf = leaf.addressable_shards[0].data
    leaf = leaf if hasattr(leaf, "shape") else jax.device_put(leaf)
    places = target.addressable_devices_indices_map(leaf.shape)
    whole = target.is_fully_replicated
    blocks = [jax.device_put(leaf if whole else leaf[at], one) for one, at in places.items()]
    return jax.make_array_from_single_device_arrays(leaf.shape, target, blocks)


def whole_on_host(leaf: Any) -> np.ndarray[Any, Any]:
    """The whole of an array, wherever its blocks are; all together."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        if leaf.is_fully_replicated:
            leaf = leaf.addressable_shards[0].data
        else:
            leaf = gathered(leaf, tiled=True)
    return np.asarray(leaf)  # host-device sync


def gathered(value: Any, *, tiled: bool = False) -> Any:
    """What every process has, stacked along a new first axis; all together.

    Raises:
        DeviceError: they have not the same number of devices each.
    """
    _check_equal_devices()
    from jax.experimental import multihost_utils  # noqa: PLC0415 (slow; not for one process)

    return multihost_utils.process_allgather(value, tiled=tiled)


@functools.cache  # it is the same for as long as the processes live
def _check_equal_devices() -> None:
    counts = collections.Counter(one.process_index for one in jax.devices())
    if len(set(counts.values())) > 1:
        each = ", ".join(str(counts[process]) for process in sorted(counts))
        raise DeviceError(
            f"the processes have {each} devices: each must have as many as the others. Let them "
            "see equally many (visible_devices=, or what the cluster sets)."
        )


def of_first(number: int) -> int:
    """The number that process 0 has; all together."""
    return int(gathered(np.int32(number))[0]) if are_several() else number


def by_first(make: Callable[[], str]) -> str:
    """Has process 0 alone make something that is there once; all together.

    Args:
        make: returns a line that says what it has made, such as a path.

    Returns:
        That line, in every process.

    Raises:
        RunError: in every process, what was raised in process 0.
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
    """A line of every process, in their order; all together."""
    if not are_several():
        return [line]
    sent = np.zeros(_LONGEST_LINE, np.uint8)
    own = np.frombuffer(line.encode()[:_LONGEST_LINE], np.uint8)
    sent[: own.size] = own
    return [bytes(one).rstrip(b"\0").decode(errors="replace") for one in gathered(sent)]

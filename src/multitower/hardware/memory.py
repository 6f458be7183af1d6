"""Device memory: how much of it a piece of work took, where that can be known."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

ALLOCATOR = "allocator"
ARRAYS = "live arrays"


class PeakMemory(NamedTuple):
    """The most memory that a piece of work held.

    Attributes:
        per_device_bytes: for each device, None where it is not known.
        source: `"allocator"`: all memory that the device's allocator had given out;
            `"live arrays"`: the arrays alone, without what programs use while they run; or None if
            neither is known.
    """

    per_device_bytes: tuple[int | None, ...]
    source: str | None

    def largest_bytes(self) -> int | None:
        """The bytes of the device that held the most; None if one device is not known."""
        known = [one for one in self.per_device_bytes if one is not None]
        return max(known) if len(known) == len(self.per_device_bytes) else None


class MemoryWatch:
    """Watches what a piece of work adds to the memory that is in use when it begins.

    An allocator keeps its highest point since the process began, and cannot be reset. So the peak
    of a piece of work is not known if earlier work took more.

    Args:
        devices: the devices to watch.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> from multitower.hardware.memory import MemoryWatch
        >>> watch = MemoryWatch(mt.devices(1))
        >>> x = jnp.zeros(1000, jnp.float32)
        >>> watch.look()
        >>> watch.peak()
        PeakMemory(per_device_bytes=(4000,), source='live arrays')
    """

    def __init__(self, devices: Sequence[jax.Device]) -> None:
        self._devices = list(devices)
        self._stats = [_stats(device) for device in self._devices]
        self._source = None
        if all("peak_bytes_in_use" in stats for stats in self._stats):
            self._source = ALLOCATOR
        elif all(device.platform == "cpu" for device in self._devices):
            self._source = ARRAYS
        if self._source == ARRAYS:
            gc.collect()  # arrays that nobody holds would be gone in the middle of the watch
        self._before = _live_bytes(self._devices) if self._source == ARRAYS else []
        self._most = list(self._before)

    def look(self) -> None:
        """Records what is in use now; an allocator does so by itself."""
        if self._source == ARRAYS:
            now = _live_bytes(self._devices)
            self._most = [max(pair) for pair in zip(self._most, now, strict=True)]

    def peak(self) -> PeakMemory:
        """The most that was in use since the watch began, without what was there before."""
        if self._source == ARRAYS:
            grown = zip(self._most, self._before, strict=True)
            return PeakMemory(tuple(most - before for most, before in grown), ARRAYS)
        if self._source == ALLOCATOR:
            pairs = zip(self._devices, self._stats, strict=True)
            return PeakMemory(tuple(_grown(_stats(one), old) for one, old in pairs), ALLOCATOR)
        return PeakMemory((None,) * len(self._devices), None)


def _stats(device: jax.Device) -> dict[str, Any]:
    return device.memory_stats() or {}


def _grown(now: dict[str, Any], before: dict[str, Any]) -> int | None:
    if now["peak_bytes_in_use"] <= before["peak_bytes_in_use"]:
        return None
    return now["peak_bytes_in_use"] - before["bytes_in_use"]


def _live_bytes(devices: Sequence[jax.Device]) -> list[int]:
    """The bytes of all arrays of this process on each device, a shared buffer counted once."""
    buffers: dict[jax.Device, dict[int, int]] = {device: {} for device in devices}
    for array in jax.live_arrays():
        if array.is_deleted():
            continue
        for shard in array.addressable_shards:
            if shard.device in buffers:
                address = shard.data.unsafe_buffer_pointer()
                buffers[shard.device][address] = shard.data.nbytes
    return [sum(buffers[device].values()) for device in devices]

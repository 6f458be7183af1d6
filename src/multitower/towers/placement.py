"""Placement: which device runs which towers. It does not change what the towers compute."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multitower.errors import DeviceError, warn, whole_number
from multitower.hardware.configuration import warn_if_bits_depend_on_threads
from multitower.hardware.devices import DeviceSpec, hashable_spec
from multitower.hardware.devices import devices as find_devices
from multitower.processes.gpu_claims import claim_gpus
from multitower.processes.together import are_several

AXIS = "towers"


@dataclass(frozen=True)
class Placement:
    """Which device runs which towers.

    Attributes:
        devices: every device that runs a tower, in mesh order.
        owners: for each tower, the index of its device in `devices`.
    """

    devices: tuple[jax.Device, ...]
    owners: tuple[int, ...]

    @property
    def num_towers(self) -> int:
        """The number of towers, on all devices."""
        return len(self.owners)

    def tower_rows(self, num_rows: int) -> int:
        """How many of so many rows a full tower has."""
        return -(-num_rows // self.num_towers)

    @functools.cached_property
    def towers_on(self) -> tuple[tuple[int, ...], ...]:
        """For each device, its towers in ascending order; the position is the tower's slot."""
        return tuple(
            tuple(t for t, owner in enumerate(self.owners) if owner == d)
            for d in range(len(self.devices))
        )

    @functools.cached_property
    def homes(self) -> dict[int, jax.Device]:
        """The device of each tower of this process, by the tower's number."""
        return {tower: self.devices[d] for d in self.local for tower in self.towers_on[d]}

    @functools.cached_property
    def places(self) -> tuple[int, ...]:
        """Where each tower is if the slots of all devices lie one after the other."""
        most = len(self.slots)
        slots = (self.towers_on[d].index(tower) for tower, d in enumerate(self.owners))
        return tuple(d * most + slot for d, slot in zip(self.owners, slots, strict=True))

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """For each slot, the tower that every device has there: all devices exchange slot by slot.

        A device with fewer towers repeats its last one. What the repetition sends is not read.
        """
        most = max(len(towers) for towers in self.towers_on)
        return tuple(
            tuple(towers[min(slot, len(towers) - 1)] for towers in self.towers_on)
            for slot in range(most)
        )

    @functools.cached_property
    def local(self) -> tuple[int, ...]:
        """Indices of the devices that this process drives itself."""
        here = jax.process_index()
        return tuple(d for d, one in enumerate(self.devices) if one.process_index == here)

    @property
    def spans_processes(self) -> bool:
        """Whether other processes drive some of the devices."""
        return len(self.local) < len(self.devices)

    @property
    def is_default(self) -> bool:
        """Whether it is one device, on which JAX puts everything anyway."""
        # getattr: the types of JAX 0.10 do not know it.
        default = getattr(jax.config, "jax_default_device", None) or jax.local_devices()[0]
        return self.devices == (default,)

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh with one axis, `"towers"`."""
        return Mesh(np.array(self.devices), (AXIS,))

    @functools.cached_property
    def split(self) -> NamedSharding:
        """The sharding of an array that is split along axis 0, one block per device."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @functools.cached_property
    def shared(self) -> NamedSharding:
        """The sharding of an array that is whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def check_all_take_part(self) -> None:
        """Refuses a placement without a tower in this process, which could not take part in sums.

        Raises:
            DeviceError: no tower runs in this process.
        """
        if not self.local:
            there = {one.process_index for one in self.devices}
            raise DeviceError(
                f"{self.num_towers} towers run on devices of {len(there)} of "
                f"{jax.process_count()} processes, and process {jax.process_index()} has none of "
                "them. Use more towers, fewer devices of each process, or fewer processes."
            )


def place(devices: DeviceSpec | None, towers: int | None) -> Placement:
    """Puts towers on devices, neighbours together; one tower per device if `towers` is None.

    Raises:
        DeviceError: a device does not exist, `towers` is not a whole number above 0, or this
            process would have no tower.
    """
    towers = check_towers(towers)
    found = find_all(devices)
    if towers is None:
        placement = contiguous(found, len(found))
        placement.check_all_take_part()
        return placement
    warn_if_bits_depend_on_threads(found)
    if towers < len(found):
        idle = len(found) - towers
        warn(
            f"towers={towers} keep {towers} of {len(found)} devices busy and leave {idle} idle. "
            f"Use towers={len(found)} or a multiple of it to use them all, or devices={towers}."
        )
    _warn_of_several_kinds(found[:towers])
    placement = contiguous(found[:towers], towers)
    placement.check_all_take_part()
    return placement


def _warn_of_several_kinds(found: Sequence[jax.Device]) -> None:
    """Warns if devices are of several kinds: each has kernels, and so bits, of its own."""
    kinds = dict.fromkeys(one.device_kind for one in found)
    if len(kinds) > 1:
        warn(
            f"the devices are of several kinds, {' and '.join(kinds)}, whose kernels round "
            "differently: a tower's bits depend on the device that it is on. For the same bits "
            "name devices of one kind, such as devices=['gpu:0', 'gpu:1']."
        )


def find_all(devices: DeviceSpec | None) -> list[jax.Device]:
    """The devices of a run; with several processes those of each process, in their order.

    Raises:
        DeviceError: a device does not exist, or another process uses the same GPU.
    """
    devices = hashable_spec(devices)
    if not are_several():
        return find_devices(devices)
    found = _of_all_processes(devices)
    claim_gpus(found)
    return found


def _of_all_processes(spec: DeviceSpec | None) -> list[jax.Device]:
    """These devices of every process, in the order of processes; `jax.Device`s stay unchanged.

    Raises:
        DeviceError: a process has fewer devices than this one.
    """
    own = find_devices(spec)
    if isinstance(spec, jax.Device) or (
        isinstance(spec, tuple) and any(isinstance(one, jax.Device) for one in spec)
    ):
        return own
    by_process: dict[int, list[jax.Device]] = {}
    for one in sorted(jax.devices(own[0].platform), key=lambda one: one.id):
        by_process.setdefault(one.process_index, []).append(one)
    places = [by_process[jax.process_index()].index(one) for one in own]
    found: list[jax.Device] = []
    for process, there in sorted(by_process.items()):
        if max(places) >= len(there):
            raise DeviceError(
                f"devices={spec!r}: process {process} has {len(there)} devices, and process "
                f"{jax.process_index()} uses {len(own)} of its own. Every process must have "
                f"them: use devices={len(there)}, or start all processes with as many."
            )
        found.extend(there[place] for place in places)
    return found


def contiguous(devices: Sequence[jax.Device], num_towers: int) -> Placement:
    """Puts consecutive towers on each device, at most one more on one device than on another."""
    bounds = [d * num_towers // len(devices) for d in range(len(devices) + 1)]
    owners = [d for d in range(len(devices)) for _ in range(bounds[d], bounds[d + 1])]
    return Placement(tuple(devices), tuple(owners))


def check_towers(towers: Any) -> int | None:
    """The value of `towers=`, as a Python integer or None.

    Raises:
        DeviceError: it is neither None nor a whole number above 0.
    """
    if towers is None:
        return None
    return whole_number("towers", towers, 1, DeviceError, ", or None for one per device")

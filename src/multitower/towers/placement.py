"""Placement: which device runs which towers. Towers are mathematics, devices are only a place."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from multitower.errors import DeviceError, warn
from multitower.hardware.configuration import warn_if_bits_depend_on_threads
from multitower.hardware.devices import DeviceSpec
from multitower.hardware.devices import devices as find_devices
from multitower.processes.gpu_claims import claim_gpus
from multitower.processes.together import are_several

AXIS = "towers"


@dataclass(frozen=True)
class Placement:
    """Towers on devices.

    Attributes:
        devices: every device that runs a tower, in mesh order.
        owners: for each tower, the index of its device in `devices`.
    """

    devices: tuple[jax.Device, ...]
    owners: tuple[int, ...]

    @property
    def num_towers(self) -> int:
        """How many towers there are."""
        return len(self.owners)

    @functools.cached_property
    def towers_on(self) -> tuple[tuple[int, ...], ...]:
        """For each device, its towers in ascending order; the position is the tower's slot."""
        return tuple(
            tuple(t for t, owner in enumerate(self.owners) if owner == d)
            for d in range(len(self.devices))
        )

    @functools.cached_property
    def slots(self) -> tuple[tuple[int, ...], ...]:
        """For each slot the tower of every device there, for what all devices exchange at a time.

        A device with fewer towers has its last one again; nobody reads what is sent for it twice.
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

    @functools.cached_property
    def mesh(self) -> Mesh:
        """The devices as a mesh of one axis."""
        return Mesh(np.array(self.devices), (AXIS,))

    @functools.cached_property
    def split(self) -> NamedSharding:
        """Cut along the first axis, one block a device."""
        return NamedSharding(self.mesh, PartitionSpec(AXIS))

    @functools.cached_property
    def shared(self) -> NamedSharding:
        """Whole on every device."""
        return NamedSharding(self.mesh, PartitionSpec())

    def divided(self) -> "Placement":
        """This placement on the most devices that all run equally many towers."""
        count = max(d for d in range(1, len(self.devices) + 1) if self.num_towers % d == 0)
        return contiguous(self.devices[:count], self.num_towers)

    def check_all_take_part(self) -> None:
        """Refuses a placement without a tower in this process: it would have nothing to wait for.

        Raises:
            DeviceError: there is none.
        """
        if not self.local:
            there = {one.process_index for one in self.devices}
            raise DeviceError(
                f"{self.num_towers} towers run on devices of {len(there)} of "
                f"{jax.process_count()} processes, and process {jax.process_index()} has none of "
                "them. Use more towers (inside jax.jit and the like a multiple of the devices), "
                "fewer devices of each process, or fewer processes."
            )


def place(devices: DeviceSpec | None, towers: int | None) -> Placement:
    """Puts towers on devices, neighbours together; one tower per device if `towers` is None.

    Raises:
        DeviceError: the devices are not there, or `towers` is not a whole number above 0.
    """
    check_towers(towers)
    found = find_all(devices)
    if towers is None:
        placement = contiguous(found, len(found))
        placement.check_all_take_part()
        return placement
    warn_if_bits_depend_on_threads(found)
    if towers < len(found):
        idle = len(found) - towers
        warn(
            f"towers={towers} keep {towers} of {len(found)} devices busy; {idle} stay idle. Use "
            f"towers={len(found)} or a multiple of it to use them all, or devices={towers}."
        )
    placement = contiguous(found[:towers], towers)
    placement.check_all_take_part()
    return placement


def find_all(devices: DeviceSpec | None) -> list[jax.Device]:
    """The devices of a run: of several processes those of each, process by process.

    Raises:
        DeviceError: they are not there.
    """
    if not are_several():
        return find_devices(devices)
    found = _of_all_processes(devices)
    claim_gpus(found)
    return found


def _of_all_processes(spec: DeviceSpec | None) -> list[jax.Device]:
    """The same devices of every process, process by process; named ones as they are.

    Raises:
        DeviceError: a process has fewer devices than this one.
    """
    own = find_devices(spec)
    if isinstance(spec, jax.Device) or (
        isinstance(spec, Sequence) and any(isinstance(one, jax.Device) for one in spec)
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
    """Consecutive towers side by side, at most one tower more on one device than on another."""
    bounds = [d * num_towers // len(devices) for d in range(len(devices) + 1)]
    owners = [d for d in range(len(devices)) for _ in range(bounds[d], bounds[d + 1])]
    return Placement(tuple(devices), tuple(owners))


def check_towers(towers: int | None) -> None:
    """Checks `towers=`.

    Raises:
        DeviceError: `towers` is neither None nor a whole number above 0.
    """
    if towers is None:
        return
    if isinstance(towers, bool) or not isinstance(towers, int) or towers < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceError(
            f"towers={towers!r} must be a whole number, 1 or more, or None for one per device."
        )

"""Layout: which device runs which stage of which towers. It affects the speed, not the bits."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from multitower.errors import ArgumentError, DeviceError, warn, whole_number
from multitower.towers.placement import Placement, contiguous


@dataclass(frozen=True)
class Layout:
    """Stages and towers on devices.

    Attributes:
        all_replicas: the devices of each copy of the model, in all processes; the devices of a
            replica belong to one process.
        place_of: the number of the device within a replica, for each stage.
        towers: which replica runs which towers; its devices are those of the first stage.
    """

    all_replicas: tuple[tuple[jax.Device, ...], ...]
    place_of: tuple[int, ...]
    towers: Placement

    @functools.cached_property
    def replicas(self) -> tuple[tuple[jax.Device, ...], ...]:
        """The devices of each replica of this process; other methods number these from 0."""
        return tuple(self.all_replicas[r] for r in self.towers.local)

    @functools.cached_property
    def towers_on(self) -> tuple[tuple[int, ...], ...]:
        """The towers of each replica of this process."""
        return tuple(self.towers.towers_on[r] for r in self.towers.local)

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.place_of)

    def device(self, replica: int, stage: int) -> jax.Device:
        """The device that runs a stage of a replica."""
        return self.replicas[replica][self.place_of[stage]]

    def devices_of(self, stage: int) -> list[jax.Device]:
        """The device that runs a stage, for each replica of this process."""
        return [self.device(replica, stage) for replica in range(len(self.replicas))]

    @property
    def head(self) -> jax.Device:
        """The last stage's device, for values that belong to no stage, such as the step count."""
        return self.device(0, self.num_stages - 1)

    def of_segments(self, stage_of: Sequence[int]) -> "Layout":
        """The layout of segments, each on the devices of its stage."""
        return replace(self, place_of=tuple(self.place_of[stage] for stage in stage_of))

    def placement_of(self, stage: int) -> Placement:
        """The placement of towers on the devices of a stage, over all replicas and processes."""
        place = self.place_of[stage]
        return Placement(tuple(one[place] for one in self.all_replicas), self.towers.owners)


def moved(value: Any, source: jax.Device, target: jax.Device) -> Any:
    """A value on another device; without a call of JAX, which takes time, if it is there."""
    return value if source is target else jax.device_put(value, target)


def check_layout(num_stages: Any, layout: Any) -> tuple[int, tuple[int, int] | None]:
    """The values of `stages=` and `layout=` as Python integers, without looking at devices.

    Raises:
        ArgumentError: they are not whole numbers above 0, or there are more devices than stages.
    """
    num_stages = whole_number("stages", num_stages, 1)
    if layout is None:
        return num_stages, None
    try:
        replicas, each = (whole_number("layout", count, 1) for count in layout)
    except (TypeError, ValueError):  # also our own error for one of the two
        raise ArgumentError(
            f"layout={layout!r}: it must be a pair of whole numbers, 1 or more, (replicas, devices "
            "of each), such as (2, 4)."
        ) from None
    if each > num_stages:
        raise ArgumentError(
            f"layout={(replicas, each)} gives each replica {each} devices, and stages={num_stages} "
            f"keep {num_stages} of them busy. Use layout=({replicas}, {num_stages}), or more "
            "stages."
        )
    return num_stages, (replicas, each)


def lay_out(
    devices: Sequence[jax.Device],
    num_towers: int | None,
    num_stages: int,
    layout: tuple[int, int] | None,
    *,
    interleave: bool = False,
) -> Layout:
    """Puts stages and towers on devices.

    Args:
        devices: the devices to use; with several processes the same number of each, process by
            process.
        num_towers: the number of towers of all replicas; None for one in each.
        num_stages: the number of stages.
        layout: (replicas of all processes, devices of each). By default a device for each stage,
            or all devices of a process if there are fewer; and as many replicas as fit.
        interleave: stage s runs on device s mod P of its replica; else neighbouring stages share a
            device.

    Raises:
        DeviceError: the layout needs more devices or towers than there are.
    """
    by_process: dict[int, list[jax.Device]] = {}
    for one in devices:
        by_process.setdefault(one.process_index, []).append(one)
    processes, room = len(by_process), len(devices) // len(by_process)
    if num_towers is not None and num_towers < processes:
        raise DeviceError(
            f"towers={num_towers} keep {num_towers} of {processes} processes busy. Use towers="
            f"{processes} or more, or fewer processes."
        )
    num_replicas, each = layout or _as_many_as_fit(room, processes, num_towers, num_stages)
    layout = (num_replicas, each)
    _check_room(layout, processes, room)
    num_towers = num_replicas if num_towers is None else num_towers
    if num_replicas > num_towers:
        raise DeviceError(
            f"layout={layout} has {num_replicas} replicas, and towers={num_towers} keep "
            f"{num_towers} of them busy. Use layout=({num_towers}, {each}), or more towers."
        )
    replicas = tuple(
        tuple(there[r * each : (r + 1) * each])
        for there in by_process.values()
        for r in range(num_replicas // processes)
    )
    places = range(num_stages)
    place_of = tuple(s % each if interleave else s * each // num_stages for s in places)
    firsts = [replica[0] for replica in replicas]
    return Layout(replicas, place_of, contiguous(firsts, num_towers))


def _check_room(layout: tuple[int, int], processes: int, room: int) -> None:
    """Refuses a layout that does not fit into processes with `room` devices each."""
    num_replicas, each = layout
    if processes == 1 and num_replicas * each > room:
        raise DeviceError(
            f"layout={layout} needs {num_replicas * each} devices, and there are {room}. Use fewer "
            "replicas or fewer devices of each: every layout has the same bits."
        )
    if num_replicas % processes or num_replicas * each > processes * room:
        most, s = min(each, room), "" if room == 1 else "s"
        raise DeviceError(
            f"layout={layout} does not fit into {processes} processes with {room} device{s} each: "
            "all devices of a replica are in one process, and all processes have equally many "
            f"replicas. Use layout=({processes * (room // most)}, {most}), or another one with at "
            f"most {room} device{s} for each replica and a multiple of {processes} replicas: every "
            "layout has the same bits."
        )


def _as_many_as_fit(
    room: int, processes: int, num_towers: int | None, num_stages: int
) -> tuple[int, int]:
    """A device for each stage, and as many replicas as fit."""
    each, num_devices = min(num_stages, room), room * processes
    num_replicas = room // each * processes
    if num_towers is not None:
        num_replicas = min(num_towers // processes * processes or num_towers, num_replicas)
    if num_replicas * each < num_devices:
        given = f"stages={num_stages}" + (f" and towers={num_towers}" if num_towers else "")
        warn(
            f"{given} keep {num_replicas * each} of {num_devices} devices busy, with layout="
            f"{(num_replicas, each)} (replicas, devices of each). Pass another layout=, or "
            "devices=."
        )
    return num_replicas, each

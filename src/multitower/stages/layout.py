"""Layout: which device runs which stage of which towers. It decides over time, never over bits."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax

from multitower.errors import ArgumentError, DeviceError, warn
from multitower.towers.placement import Placement, contiguous


@dataclass(frozen=True)
class Layout:
    """Stages and towers on devices.

    Attributes:
        replicas: copies of the whole model: for each its devices.
        place_of: for each stage its device within a replica.
        towers: which replica runs which towers; its devices are those of the first stage.
    """

    replicas: tuple[tuple[jax.Device, ...], ...]
    place_of: tuple[int, ...]
    towers: Placement

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.place_of)

    def device(self, replica: int, stage: int) -> jax.Device:
        """Where a stage of a replica runs."""
        return self.replicas[replica][self.place_of[stage]]

    def devices_of(self, stage: int) -> list[jax.Device]:
        """Where a stage runs, for each replica."""
        return [self.device(replica, stage) for replica in range(len(self.replicas))]

    @property
    def head(self) -> jax.Device:
        """Where there is one of: what is neither a parameter nor kept for one."""
        return self.device(0, self.num_stages - 1)


def check_layout(num_stages: Any, layout: Any) -> None:
    """Refuses numbers that are none.

    Raises:
        ArgumentError: one of them.
    """
    if not _is_count(num_stages):
        raise ArgumentError(f"stages={num_stages!r}: it must be a whole number, 1 or more.")
    if layout is None:
        return
    is_pair = isinstance(layout, tuple | list) and len(layout) == 2
    if not (is_pair and all(map(_is_count, layout))):
        raise ArgumentError(
            f"layout={layout!r}: it must be a pair of whole numbers, 1 or more, (replicas, devices "
            "of each), such as (2, 4)."
        )
    if layout[1] > num_stages:
        raise ArgumentError(
            f"layout={tuple(layout)} gives each replica {layout[1]} devices, and stages="
            f"{num_stages} keep {num_stages} of them busy. Use layout=({layout[0]}, {num_stages}), "
            "or more stages."
        )


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
        devices: to use.
        num_towers: of all replicas; None for one in each.
        num_stages: of the model.
        layout: (replicas, devices of each). By default a device for each stage, or all devices if
            there are fewer; and as many replicas as there is room for.
        interleave: stage s on device s mod P of its replica; or else neighbours share a device.

    Raises:
        DeviceError: the layout needs more devices or towers than there are.
    """
    num_replicas, each = layout or _as_many_as_fit(len(devices), num_towers, num_stages)
    layout = (num_replicas, each)
    if num_replicas * each > len(devices):
        raise DeviceError(
            f"layout={layout} needs {num_replicas * each} devices, and there are "
            f"{len(devices)}. Use fewer replicas or fewer devices of each: every layout has the "
            "same bits."
        )
    num_towers = num_replicas if num_towers is None else num_towers
    if num_replicas > num_towers:
        raise DeviceError(
            f"layout={layout} has {num_replicas} replicas, and towers={num_towers} keep "
            f"{num_towers} of them busy. Use layout=({num_towers}, {each}), or more towers."
        )
    replicas = tuple(tuple(devices[r * each : (r + 1) * each]) for r in range(num_replicas))
    places = range(num_stages)
    place_of = tuple(s % each if interleave else s * each // num_stages for s in places)
    firsts = [replica[0] for replica in replicas]
    return Layout(replicas, place_of, contiguous(firsts, num_towers))


def _as_many_as_fit(num_devices: int, num_towers: int | None, num_stages: int) -> tuple[int, int]:
    """A device for each stage, and as many replicas as there is room for."""
    each = min(num_stages, num_devices)
    num_replicas = num_devices // each
    if num_towers is not None:
        num_replicas = min(num_towers, num_replicas)
    if num_replicas * each < num_devices:
        given = f"stages={num_stages}" + (f" and towers={num_towers}" if num_towers else "")
        warn(
            f"{given} keep {num_replicas * each} of {num_devices} devices busy, with layout="
            f"{(num_replicas, each)} (replicas, devices of each). Pass another layout=, or "
            "devices=."
        )
    return num_replicas, each


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

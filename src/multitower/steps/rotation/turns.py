"""Turns: which towers make which update, and where. It depends on the rotation, not on timing.

The towers are divided into groups, neighbours together. Update k belongs to group
`rotation[k mod len(rotation)]`; the towers of that group are synchronous among themselves.

Source: round-robin delayed SGD (Zinkevich, Smola, Langford 2009, "Slow Learners are Fast").
"""

import itertools
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Any

import jax

from multitower.steps.rotation.options import RotationOptions
from multitower.towers.feeding import ahead, shard_on
from multitower.towers.placement import Placement


@dataclass(frozen=True)
class Turns:
    """Groups of towers, and the order of their turns.

    Attributes:
        groups: the placement of each group, in which its towers are numbered from 0.
        rotation: the numbers of groups in the order of their turns, repeated for ever.
        home: the device that has the newest parameters and makes the updates.
    """

    groups: tuple[Placement, ...]
    rotation: tuple[int, ...]
    home: jax.Device

    @classmethod
    def of(cls, options: RotationOptions, placement: Placement) -> "Turns":
        """Divides the towers of a placement.

        Raises:
            ArgumentError: they do not divide into these groups.
        """
        num_groups = options.num_groups(placement.num_towers)
        size = placement.num_towers // num_groups
        groups = tuple(_part(placement, g * size, (g + 1) * size) for g in range(num_groups))
        return cls(groups, options.rotation or tuple(range(num_groups)), placement.devices[0])

    @property
    def num_towers(self) -> int:
        """How many towers make an update together."""
        return self.groups[0].num_towers

    def prefetch(
        self, batches: Iterable[Any], *, first: int, global_batch: int | None
    ) -> Generator[Any]:
        """Copies batches ahead of need, each to the devices of the group whose turn it is.

        Args:
            batches: the batches of updates `first`, `first` + 1, ...
            first: the number of updates made before them.
            global_batch: as for `multitower.prefetch`.
        """
        counts = itertools.count(first)

        def put(batch: Any, full: int | None) -> Any:
            return shard_on(batch, self.groups[self.group_at(next(counts))], full)

        return ahead(batches, 2, put, global_batch)

    def group_at(self, count: int) -> int:
        """The number of the group whose turn it is after `count` updates."""
        return self.rotation[count % len(self.rotation)]


def _part(placement: Placement, first: int, last: int) -> Placement:
    """The placement of towers `first` to `last - 1`, with their own devices only."""
    owners = placement.owners[first:last]
    used = sorted(set(owners))
    devices = tuple(placement.devices[d] for d in used)
    return Placement(devices, tuple(used.index(owner) for owner in owners))

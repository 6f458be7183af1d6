"""What the towers of one group return, added up along the fixed tree on the group's devices.

Arrays move from device to device and are added in the order of the tree. The host does not wait,
and other devices take no part.
"""

from collections.abc import Sequence
from typing import Any

import jax

from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.job import Job, Shared
from multitower.engines.packing import Packed
from multitower.engines.reduction import add_sums, evaluate, sum_tree
from multitower.engines.same_bits import tower_function
from multitower.engines.tracing import refuse_kept_values, trace
from multitower.towers.placement import Placement
from multitower.towers.rows import Tower
from multitower.towers.split import TowerRows

# One executable per device.
PerDevice = dict[jax.Device, Compiled]


class GroupSums:
    """Runs the towers of a group; compiles each program once for every device of all groups."""

    def __init__(self, job: Job, groups: Sequence[Placement]) -> None:
        self._tower = tower_function(job)
        self._num_towers = groups[0].num_towers
        self._devices = list(dict.fromkeys(device for one in groups for device in one.devices))
        self._compiled: dict[Any, tuple[PerDevice, PerDevice]] = {}
        self._numbers = WholeNumbers()

    def run(self, place: Placement, shared: Sequence[Shared], rows: Sequence[TowerRows]) -> Packed:
        """Runs the towers of a group, and adds up what they return.

        Args:
            place: the group.
            shared: state and shared leaves for its towers, once for each of its devices.
            rows: the split arrays, cut for the towers of the group.

        Returns:
            The totals of means and sums, packed, on the device of the group's first tower.
        """
        towers, adds = self._programs(shared[0], [leaf.piece for leaf in rows])

        def run(tower: int) -> tuple[jax.Device, Packed]:
            owner = place.owners[tower]
            device = place.devices[owner]
            pieces = [leaf.pieces[tower] for leaf in rows]
            here = self._numbers.of_tower(device, rows[0], tower)
            sums, _ = towers[device](shared[owner], pieces, here)
            return device, sums.packed

        def add(
            left: tuple[jax.Device, Packed], right: tuple[jax.Device, Packed]
        ) -> tuple[jax.Device, Packed]:
            device, total = left
            return device, adds[device](total, jax.device_put(right[1], device))

        return evaluate(sum_tree(0, self._num_towers), run, add)[1]

    def _programs(self, shared: Shared, pieces: list[Any]) -> tuple[PerDevice, PerDevice]:
        key = signature((shared, pieces))
        if key not in self._compiled:
            self._compiled[key] = self._compile(shared, pieces)
        return self._compiled[key]

    def _compile(self, shared: Shared, pieces: list[Any]) -> tuple[PerDevice, PerDevice]:
        arguments = (shared, pieces, Tower.shapes())
        traced = trace(self._tower, arguments, self._num_towers)
        refuse_kept_values(traced.program)
        towers = compile_for_each(traced.tower, arguments, self._devices)
        sums: Packed = towers[0].out_info[0].packed
        by_device = dict(zip(self._devices, towers, strict=True))
        if self._num_towers == 1:
            return by_device, {}
        adds = compile_for_each(add_sums, (sums, sums), self._devices, donate=(0,))
        return by_device, dict(zip(self._devices, adds, strict=True))

"""What towers return, added up along the fixed tree: on each device first, then between devices."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines import reduction
from multitower.engines.executable import Compiled, compile_for_each
from multitower.engines.packing import Packed
from multitower.engines.reduction import SMALL_BYTES
from multitower.towers.global_arrays import stacked
from multitower.towers.placement import Placement


class TowerSums(NamedTuple):
    """What one tower returns to be added up, or a sum of several.

    Attributes:
        packed: means and sums.
        blocks: as in `TowerResult`. In a total on a device: for each of its towers, by number, the
            tower's row of every block.
    """

    packed: Packed
    blocks: Any


class TowerTurn(NamedTuple):
    """One tower's turn to run.

    Attributes:
        i: the index of its device among the local devices.
        tower: the number of the tower.
        num_additions: how many additions along the tree follow it on its device.
    """

    i: int
    tower: int
    num_additions: int


_GUARD = "jax_transfer_guard_host_to_device"

# For each local device the sums that wait to be added; the newest one is the last.
_Stacks = list[list[TowerSums]]


class Totals:
    """Runs the towers of a placement in turn, and adds up what they return.

    Attributes:
        devices: the local devices, in the order of the placement.
        turns: the local towers, in the order in which they run.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self.devices = [placement.devices[d] for d in placement.local]
        self._towers_on = [placement.towers_on[d] for d in placement.local]
        plan = reduction.plan(placement)
        schedules = [reduction.schedule(plan.parts[d]) for d in placement.local]
        # Slot by slot over all devices, so that all of them have work from the start.
        self.turns = [
            TowerTurn(i, *schedule[slot])
            for slot in range(max(len(schedule) for schedule in schedules))
            for i, schedule in enumerate(schedules)
            if slot < len(schedule)
        ]
        self._num_parts = plan.num_parts
        self._pair = _pair(plan, self.devices) if len(placement.devices) == 2 else None
        self._reduce = reduction.make_reduction(placement) if len(placement.devices) > 1 else None

    def compile(self, sums: TowerSums) -> list[Compiled]:
        """Compiles the addition of two such sums for each local device; [] if none is needed."""
        if not any(turn.num_additions for turn in self.turns) and not self._is_copied(sums):
            return []
        return compile_for_each(reduction.add_sums, (sums, sums), self.devices, donate=(0,))

    def run(
        self, tower: Callable[[TowerTurn], TowerSums], add: Sequence[Compiled]
    ) -> list[TowerSums]:
        """Runs every local tower, and adds its sums to the others as soon as the tree allows.

        Args:
            tower: starts the tower whose turn it is, and returns its sums.
            add: from `compile`, for such sums.

        Returns:
            The totals over all towers, on every local device; empty if there are no sums.
        """
        stacks: _Stacks = [[] for _ in self.devices]
        for turn in self.turns:
            # No name here for a tower's sums: it would keep their memory until the next tower's.
            self._put(stacks, turn, tower(turn), add)
        return self._reduced(stacks, add) if stacks[0][0].packed.buffers else []

    def _put(
        self, stacks: _Stacks, turn: TowerTurn, sums: TowerSums, add: Sequence[Compiled]
    ) -> None:
        """Puts a tower's sums on its stack, and adds up what the tree allows by now."""
        num_additions = turn.num_additions if sums.packed.buffers else 0
        reduction.put(stacks[turn.i], sums, num_additions, add[turn.i] if add else None)

    def _reduced(self, stacks: _Stacks, add: Sequence[Compiled]) -> list[TowerSums]:
        """The totals on every local device, after the last tower."""
        if self._is_copied(stacks[0][0]):
            return self._copied(stacks, add)
        if self._reduce is None and not stacks[0][0].blocks:
            return [TowerSums(stacks[0][0].packed, {})]
        if self._reduce is None:
            self._reduce = reduction.make_reduction(self._placement)
        layout = stacks[0][0].packed.layout
        buffers: list[list[jax.Array]] = []
        blocks: list[list[jax.Array]] = []
        for part in range(self._num_parts):
            # A device with fewer parts sends its last one again, which is not read.
            own = [stack[min(part, len(stack) - 1)] for stack in stacks]
            buffers.append(self._stacked([sums.packed.buffers for sums in own]))
            blocks.append(self._stacked([sums.blocks for sums in own]))
        total = self._reduce(buffers, blocks)
        whole = [self._blocks(buffer) for buffer in total.buffers]
        cut = [[self._blocks(row) for row in block] for block in total.blocks]
        return [
            TowerSums(
                Packed(tuple(buffer[i] for buffer in whole), layout),
                {t: [block[slot][i] for block in cut] for slot, t in enumerate(towers)},
            )
            for i, towers in enumerate(self._towers_on)
        ]

    def of_buffers(self, stacks: Sequence[Sequence[Sequence[jax.Array]]]) -> list[list[jax.Array]]:
        """The totals of buffers, for each local device; only with several devices.

        Args:
            stacks: for each local device its parts, each a list of buffers.
        """
        assert self._reduce is not None
        parts = [
            [stack[min(part, len(stack) - 1)] for stack in stacks]
            for part in range(self._num_parts)
        ]
        given = [self._stacked(own) for own in parts]
        found = self._reduce(given, [[] for _ in parts]).buffers
        whole = [self._blocks(buffer) for buffer in found]
        return [[buffer[i] for buffer in whole] for i in range(len(self.devices))]

    def _is_copied(self, sums: TowerSums) -> bool:
        """Whether one of two devices adds these sums, and the other gets a copy of the total.

        For small sums that takes the host less time than a program that spans both devices. Above
        `SMALL_BYTES`, and with more than two devices, it saves nothing.
        """
        return self._pair is not None and not sums.blocks and _num_bytes(sums) <= SMALL_BYTES

    def _copied(self, stacks: _Stacks, add: Sequence[Compiled]) -> list[TowerSums]:
        assert self._pair is not None
        first, second = self._pair
        right = _copy(stacks[second][0], self.devices[first])
        total = add[first](stacks[first][0], right)
        totals = {first: total, second: _copy(total, self.devices[second])}
        return [TowerSums(totals[i].packed, {}) for i in range(2)]

    def _stacked(self, own: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Global arrays, from the list of arrays that every local device has."""
        return [stacked(blocks, self._placement) for blocks in zip(*own, strict=True)]

    def _blocks(self, leaf: jax.Array) -> list[jax.Array]:
        """The local blocks of a split array; much quicker than `addressable_shards`.

        Of a replicated array `addressable_data` would return the first device's copy each time.
        """
        return [leaf.addressable_data(i) for i in range(len(self.devices))]


def _pair(plan: reduction.ReductionPlan, local: Sequence[jax.Device]) -> tuple[int, int] | None:
    """For two devices of this process: whose sum is the left operand, and whose the right one."""
    if len(local) < 2 or plan.num_parts > 1:
        return None
    (first, _), (second, _) = plan.rest
    return first, second


def _copy(sums: TowerSums, device: jax.Device) -> TowerSums:
    """These sums, for programs of another device.

    A CPU device can read the host's memory. So sums that are ready are passed on without a copy, in
    a tenth of the time. Sums that are not ready are copied by the devices, so the host never waits.
    """
    buffers = sums.packed.buffers
    if _is_memory_of_host(device) and all(buffer.is_ready() for buffer in buffers):
        there = tuple(np.asarray(buffer) for buffer in buffers)
    else:
        there = jax.device_put(buffers, device)
    return sums._replace(packed=Packed(there, sums.packed.layout))


def _is_memory_of_host(device: jax.Device) -> bool:
    """Whether this device's programs read host arrays, and no transfer guard logs or forbids it."""
    return device.platform == "cpu" and getattr(jax.config, _GUARD) in (None, "allow")


def _num_bytes(sums: TowerSums) -> int:
    return sum(buffer.size * buffer.dtype.itemsize for buffer in sums.packed.buffers)


def with_one_nan(total: jax.Array) -> jax.Array:
    """Makes all NaNs equal: which of two NaNs an addition returns depends on their order."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return jnp.where(jnp.isnan(total), jnp.full_like(total, jnp.nan), total)

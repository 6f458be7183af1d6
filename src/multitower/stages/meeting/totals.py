"""Totals over towers on the devices of a stage, summed in the order of the fixed tree."""

from collections.abc import Sequence
from typing import Any

import jax

from multitower.engines import reduction
from multitower.engines.equal_programs import EqualPrograms, Executable
from multitower.engines.totals import Totals
from multitower.stages.layout import Layout


class StageTotals:
    """Sums values of towers at a stage: in each replica first, then between replicas.

    Attributes:
        additions: for each replica of this process, by tower, how many additions of two sums can be
            made once this tower has arrived.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._plan = reduction.plan(layout.towers)
        self.additions = [
            dict(reduction.schedule(self._plan.parts[r])) for r in layout.towers.local
        ]
        self._across: list[Totals] = []
        if layout.towers.spans_processes:
            places = [layout.placement_of(s) for s in range(layout.num_stages)]
            self._across = [Totals(place) for place in places]
        self._is_connected = False

    def connected(self) -> None:
        """Notes that the processes have been connected at all stages."""
        self._is_connected = True

    def total(self, stage: int, stacks: list[list[Any]], add: Sequence[Executable]) -> list[Any]:
        """The total, for each replica; it may be on another replica's device.

        Args:
            stage: the stage.
            stacks: the partial sums of each replica, from `reduction.put`.
            add: the executables from `compile_add`.
        """
        if self._across:
            return self._total_across(stage, stacks)
        device = lambda r: self._layout.device(r, stage)

        def added(left: tuple[int, Any], right: tuple[int, Any]) -> tuple[int, Any]:
            # The right sum moves to the device of the left one.
            replica, sums = left
            return replica, add[replica](sums, jax.device_put(right[1], device(replica)))

        leaf = lambda at: (at[0], stacks[at[0]][at[1]])
        return [reduction.evaluate(self._plan.rest, leaf, added)[1]] * len(stacks)

    def _total_across(self, stage: int, stacks: list[list[Any]]) -> list[Any]:
        """The total over all processes, for each replica of this one."""
        treedef = jax.tree.structure(stacks[0][0])
        if not treedef.num_leaves:
            return [stack[0] for stack in stacks]
        buffers = [[jax.tree.leaves(sums) for sums in stack] for stack in stacks]
        totals = self._across[stage].of_buffers(buffers)
        if not self._is_connected:
            # host-device sync: once. The first program connects the processes, and two stages that
            # connect at a time could wait for each other.
            jax.block_until_ready(totals)
        return [jax.tree.unflatten(treedef, leaves) for leaves in totals]


def compile_add(
    equal: EqualPrograms, sums: Any, devices: Sequence[jax.Device], num_towers: int
) -> list[Executable]:
    """Compiles the sum of two trees of these shapes for each device; empty for one tower."""
    if num_towers == 1:
        return []
    return equal.compile_for_each(reduction.add_sums, (sums, sums), devices, donate=(0,))

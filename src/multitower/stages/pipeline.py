"""A pipeline: all towers of a step through all stages, on the devices of a layout.

Single-device programs, and between them nothing but moves and additions in the order of the tree of
`engines.reduction`: so the bits are the same on any layout. Nothing here waits for a device.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from multitower.engines import reduction
from multitower.engines.packing import Packed, unpack
from multitower.engines.same_bits import current_tap
from multitower.engines.totals import Totals as BufferTotals
from multitower.stages.chain import Chain
from multitower.stages.layout import Layout
from multitower.stages.order import Turn, one_forward_one_backward
from multitower.stages.programs import Programs, StageSums
from multitower.stages.walk import Walk
from multitower.towers.split import TowerRows


class Totals(NamedTuple):
    """What a pipeline leaves.

    Attributes:
        gradients: for each replica of this process and stage the gradients of the parameters that
            live there: its own, then those of later stages in descending order.
        results: for each stage those of the tower, all on the head's device.
    """

    gradients: list[list[list[Packed]]]
    results: list[Packed]


class Pipeline:
    """Runs a chain on a layout; compiles its programs once."""

    def __init__(self, chain: Chain, layout: Layout, *, remat: bool = True) -> None:
        self.chain = chain
        self.layout = layout
        self._plan = reduction.plan(layout.towers)
        self._additions = [
            dict(reduction.schedule(self._plan.parts[r])) for r in layout.towers.local
        ]
        self._orders = [_turns(towers, layout.place_of) for towers in layout.towers_on]
        self._programs = Programs(chain, layout, remat=remat)
        self._across: list[BufferTotals] = []
        if layout.towers.spans_processes:
            places = [layout.placement_of(s) for s in range(layout.num_stages)]
            self._across = [BufferTotals(place) for place in places]
        self._is_connected = False

    def run(
        self, params: Sequence[Mapping[int, Any]], rest: Sequence[Any], rows: Sequence[TowerRows]
    ) -> Totals:
        """Runs all towers.

        Args:
            params: for each replica of this process the parameters by number, each on the device
                of its home.
            rest: the arguments of the program between parameters and rows, anywhere.
            rows: the arguments after these; three numbers follow, of the tower.
        """
        tap = current_tap()
        walks = [
            Walk(self.chain, self._programs, self.layout, r, self._additions[r], tap=tap)
            for r in range(len(self.layout.replicas))
        ]
        for walk, own in zip(walks, params, strict=True):
            walk.begin(own, rest, rows)
        # Side by side over replicas, so that all of them have work from the start.
        for turns in itertools.zip_longest(*self._orders):
            for walk, turn in zip(walks, turns, strict=True):
                if turn is not None:
                    walk.take(turn)
        totals = self._totals([walk.stacks for walk in walks])
        if tap is not None:
            for r, stages in enumerate(totals.gradients):
                by_stage = {
                    f"stage {s}": [unpack(one) for one in own] for s, own in enumerate(stages)
                }
                tap("reduction", r, by_stage)
        return totals

    def shapes_of_results(self) -> list[Packed]:
        """The shapes of `Totals.results`."""
        return [programs[0].out_info[0].results for programs in self._programs.backward]

    def _totals(self, stacks: list[list[list[StageSums]]]) -> Totals:
        """Adds the replicas' partial sums along the rest of the tree, and hands them out.

        Programs that span processes start here, after all towers and in the order of stages: in
        the same order in every process, so that none waits for one that waits for it.
        """
        stages = range(self.layout.num_stages)
        replicas = range(len(self.layout.replicas))
        total = self._total_across if self._across else self._total_here
        totals = [total(s, [stacks[r][s] for r in replicas]) for s in stages]
        self._is_connected = True
        gradients = [
            [
                jax.device_put(
                    [totals[s][r].own]
                    + [totals[u][r].away[s] for u in reversed(stages) if s in totals[u][r].away],
                    self.layout.device(r, s),
                )
                for s in stages
            ]
            for r in replicas
        ]
        results = jax.device_put([total[0].results for total in totals], self.layout.head)
        return Totals(gradients, results)

    def _total_across(self, stage: int, stacks: list[list[StageSums]]) -> list[StageSums]:
        """The total of a stage over all processes, for each replica of this one."""
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

    def _total_here(self, stage: int, stacks: list[list[StageSums]]) -> list[StageSums]:
        """The same in one process; where partial sums meet, the right one moves to the left one."""

        def add(left: tuple[int, Any], right: tuple[int, Any]) -> tuple[int, Any]:
            replica, sums = left
            moved = jax.device_put(right[1], self.layout.device(replica, stage))
            return replica, self._programs.add[stage][replica](sums, moved)

        leaf = lambda at: (at[0], stacks[at[0]][at[1]])
        return [reduction.evaluate(self._plan.rest, leaf, add)[1]] * len(stacks)


def _turns(towers: Sequence[int], place_of: Sequence[int]) -> list[Turn]:
    """The turns of a replica with these towers, one after the other."""
    ticks = one_forward_one_backward(len(towers), place_of)
    return [turn._replace(tower=towers[turn.tower]) for tick in ticks for turn in tick]

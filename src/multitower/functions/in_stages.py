"""A function of towers whose program is cut into stages on several devices; forward pass only."""

from collections.abc import Sequence
from typing import Any

import jax

from multitower.engines.executable import signature
from multitower.engines.job import Job, Shared, TowerResult
from multitower.engines.rounds import FORWARD_RULES
from multitower.engines.tracing import Traced, refuse_filled, trace
from multitower.errors import ArgumentError, OutputError
from multitower.functions.calls import Kind, TowerFunction, ragged_of
from multitower.hardware.devices import DeviceSpec
from multitower.stages.inference.forward import Forward, make_forward_chain
from multitower.stages.layout import Layout
from multitower.stages.meeting.sums import without_collectives
from multitower.stages.options import StageOptions
from multitower.towers.global_arrays import join_rows
from multitower.towers.leaves import are_traced, row_shapes, shape_of
from multitower.towers.placed import Placed
from multitower.towers.placement import Placement
from multitower.towers.rows import BatchParts, Tower
from multitower.towers.same_call import check_same_call
from multitower.towers.split import TowerRows, cut
from multitower.towers.surroundings import refuse_disabled_jit


class StagedFunction(TowerFunction):
    """A `TowerFunction` in stages; what every tower gets whole is on the stages that use it."""

    def __init__(
        self, kind: Kind, devices: DeviceSpec | None, towers: int | None, stages: StageOptions
    ) -> None:
        self._stages = stages
        self._layout: Layout | None = None
        self._placed = Placed()
        self._compiled: dict[Any, tuple[Forward, Traced]] = {}
        super().__init__(kind, devices, towers)

    def placement(self) -> Placement:
        """Which replica runs which towers; `devices` are the devices of the first stage."""
        return self._found_layout().towers

    def _found_layout(self) -> Layout:
        if self._layout is None:
            self._layout = self._stages.on(self._devices, self._towers)
        return self._layout

    def _call(self, parts: BatchParts, placement: Placement) -> Any:
        refuse_disabled_jit()
        if are_traced((*parts.shared, *parts.rows)):
            raise self._refuse_traced()
        tower_rows = placement.tower_rows(parts.num_rows)
        rows = cut(parts.rows, parts.num_rows, placement, tower_rows)
        if not self._looked_at:
            check_same_call("arguments", [*parts.shared, *parts.rows], placement)
        forward, traced = self._program(parts, rows)
        refuse_filled(traced.meets, parts.num_rows, rows[0].tower_rows, placement)
        found = {
            tower: jax.tree.unflatten(traced.treedef, leaves)
            for tower, leaves in forward.run(parts.shared, rows).items()
        }
        layout = self._found_layout()
        ends = layout.placement_of(layout.num_stages - 1)
        whole = self._whole(found, ends)
        by_tower = {tower: result.rows for tower, result in found.items()}
        return self._kind.result(whole, join_rows(by_tower, ends, parts.num_rows))

    def _whole(self, found: dict[int, Any], ends: Placement) -> Any:
        """Results without rows, which are those of tower 0; nothing is averaged."""
        first = found[min(found)]
        if not ends.spans_processes:
            return jax.device_put((first.means, first.sums), ends.shared)
        if jax.tree.leaves(first.sums):
            raise OutputError(
                "with stages= in several processes every result must have rows: return one entry "
                "for each row, or compute what has none outside."
            )
        return first.means, first.sums

    def _program(self, parts: BatchParts, rows: Sequence[TowerRows]) -> tuple[Forward, Traced]:
        """What runs a call, and the program of one tower that was cut into stages."""
        ragged = ragged_of(parts.num_rows, rows[0].placement.num_towers)
        tower_rows = rows[0].tower_rows
        shared = [shape_of(jax.typeof(leaf)) for leaf in parts.shared]
        pieces = row_shapes(rows, tower_rows)
        key = (parts.split, ragged is None, signature((shared, pieces)))
        if key not in self._compiled:
            job = self._kind.job(parts.split, tower_rows, ragged)
            self._compiled[key] = self._compile(job, shared, pieces)
        return self._compiled[key]

    def _compile(self, job: Job, shared: list[Any], rows: list[Any]) -> tuple[Forward, Traced]:
        def tower(shared: list[Any], rows: list[Any], here: Tower) -> TowerResult:
            return job.tower(Shared((), shared), rows, here)

        layout = self._found_layout()
        traced = trace(tower, (shared, rows, Tower.shapes()), self._num_towers)
        if jax.tree.leaves(traced.shapes.means):
            raise OutputError(
                "the model changes its own state, such as BatchNorm's averages, and with stages= "
                "nothing is averaged over towers. Call model.eval() before, or leave stages= out."
            )
        program = without_collectives(
            traced.program, traced.number, self._num_towers, rules=FORWARD_RULES
        )
        chain = make_forward_chain(program, len(shared), layout.num_stages)
        return Forward(chain, layout, self._placed), traced

    @property
    def _num_towers(self) -> int:
        return self.placement().num_towers

    def _refuse_traced(self) -> ArgumentError:
        """The error for a call inside another transformation, which makes a single program."""
        return ArgumentError(
            f"a function with stages={self._stages.num_stages} was called inside jax.jit, "
            "jax.grad, jax.vmap or the like. Each stage is a program of its own on its own "
            "device, and there all would be one program: call it outside, or leave stages= out. "
            "For gradients use mt.train_step(stages=)."
        )

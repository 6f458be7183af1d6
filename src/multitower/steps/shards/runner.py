"""Runs the job of a fast step on shards as one program over all devices."""

from typing import Any

import jax

from multitower.engines.held import HoldingJit
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Feeder, Metrics
from multitower.steps.shards.job import ShardsJob
from multitower.steps.shards.state import StateShards
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.leaves import is_traced
from multitower.towers.rows import BatchParts


class ShardsRunner:
    """Steps as one program over all devices, each of which keeps a part of the state."""

    def __init__(self, step: StepParts, batches: Batches, shards: StateShards) -> None:
        self._job = ShardsJob(step, batches, shards)
        self._shards = shards
        self._feeder = Feeder(shards.placement, batches.tower_rows)
        self._programs: dict[Any, Any] = {}

    def run(self, state: KeptState, parts: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        rest, rows, num_rows = self._feeder.feed(parts)
        given = state.fields()
        fields, metrics = self.program(given)(given, rest, rows, num_rows)
        if not is_traced(metrics["loss"]):  # inside jax.jit, where it is refused
            state.spend()
        return KeptState(fields, state.maker), metrics

    def program(self, fields: Fields) -> Any:
        """The jitted step for states like this one; it keeps the sharding of every leaf."""
        leaves, treedef = jax.tree.flatten(fields)
        key = (treedef, *(leaf.shape for leaf in leaves))
        if key not in self._programs:
            there = (self._shards.shardings(fields), self._shards.placement.shared)
            self._programs[key] = HoldingJit(
                self._job.__call__, self._shards.placement, donate=0, out_shardings=there
            )
        return self._programs[key]

"""Local updates in one program: from one meeting to the next, a tower's updates are one loop.

There is one tower on every device. A call is divided where towers meet; each part is one program:

    repeat: the tower's update (no device waits for another)
    add up the sums that metrics are made of, over devices
    if the part ends with a meeting: add up what towers moved, and make the outer update
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from multitower.engines.held import HoldingJit
from multitower.engines.job import Shared, TowerResult
from multitower.engines.spmd import sum_over_devices, trace_in_mesh
from multitower.steps.local.job import LocalJob, MeetingJob, Met
from multitower.steps.local.options import LocalOptions
from multitower.steps.local.state import Own
from multitower.steps.looped import Stack, StackFeeder
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Metrics
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.placement import AXIS, Placement
from multitower.towers.rows import Tower, real_rows

_WHOLE, _BY_TOWER, _ROWS = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec(None, AXIS)
_STATE = Fields(*[_WHOLE] * len(Fields._fields))._replace(local=_BY_TOWER)


class LoopParts(NamedTuple):
    """A state in parts.

    Attributes:
        fields: the whole state; `local` has a first axis for towers, split over the devices.
        step: the number of steps made, on the host, which decides when to meet.
    """

    fields: Fields
    step: int

    def state(self, maker: object) -> KeptState:
        """The training state that a user gets for these parts."""
        return KeptState.of_parts(self, lambda parts: parts.fields, maker)


class LocalLoopRunner:
    """Many local updates in one program, compiled twice: with a meeting at its end, and without."""

    def __init__(
        self, step: StepParts, batches: Batches, options: LocalOptions, placement: Placement
    ) -> None:
        assert options.most is not None
        self._job = LocalJob(step, batches.split, batches.tower_rows, placement.num_towers)
        self._meeting = MeetingJob(step, options)
        self._tower_rows = batches.tower_rows
        self._placement = placement
        self._every = options.sync_every
        self._feeder = StackFeeder(batches, placement, options.most)
        self._programs = {meets: self._program(meets) for meets in (True, False)}

    def run(self, state: KeptState, stack: Stack) -> tuple[KeptState, Metrics]:
        """Makes an update of every tower with each batch; the state is overwritten."""
        batches = self._feeder.feed(stack)
        fields, step = state.parts()
        count, done = len(stack.counts), 0
        found: list[Metrics] = []
        while done < count:
            size = min(count - done, self._every - step % self._every)
            meets = (step + size) % self._every == 0
            bounds = (self._feeder.number(done), self._feeder.number(done + size))
            fields, metrics = self._programs[meets](fields, batches, bounds)
            state.spend()
            if size < metrics["loss"].shape[0]:
                own = (done, done + size)
                metrics = jax.tree.map(
                    lambda leaf, own=own: jax.lax.slice_in_dim(leaf, *own), metrics
                )
            found.append(metrics)
            step, done = step + size, done + size
        if len(found) > 1:
            found = [jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *found)]
        return LoopParts(fields, step).state(state.maker), found[0]

    def _program(self, meets: bool) -> Callable[..., tuple[Fields, Metrics]]:
        """The jitted program of some steps; with `meets` a meeting follows the last of them."""

        def on_device(fields: Fields, batches: Any, bounds: Any) -> tuple[Fields, Metrics]:
            own: Own = jax.tree.map(lambda leaf: leaf[0], fields.local)
            fields = fields._replace(local=None)
            own, count, found = self._loop(own, fields, batches, bounds)
            means, sums = sum_over_devices(found)
            counts = batches[-1]
            scaled = jax.vmap(lambda scale, tree: jax.tree.map(lambda x: _times(x, scale), tree))
            means = scaled(self._tower_rows / counts.astype(float), means)
            fields = fields._replace(step=count)
            mets = _repeated(self._job.apart(own.params), len(counts))
            if meets:
                fields, own, met = self._meet(fields, own)
                put = lambda all_of, one: all_of.at[bounds[1] - 1].set(one)
                mets = jax.tree.map(put, mets, met)
            metrics = jax.vmap(self._job.finish)(mets, means, sums)
            return fields._replace(local=jax.tree.map(lambda leaf: leaf[None], own)), metrics

        mapped = jax.shard_map(
            on_device,
            mesh=self._placement.mesh,
            in_specs=(_STATE, (_WHOLE, _ROWS, _WHOLE), _WHOLE),
            out_specs=(_STATE, _WHOLE),
            check_vma=False,  # as in `spmd`
        )
        return HoldingJit(mapped, self._placement, donate=0)

    def _loop(self, own: Own, fields: Fields, batches: Any, bounds: Any) -> tuple[Own, Any, Any]:
        """Updates of this device's tower: its `Own` after them, the step count, and all sums."""
        index = lax.axis_index(AXIS)

        def one(number: Any, own: Own, count: Any) -> TowerResult:
            pick = lambda x: lax.dynamic_index_in_dim(x, number, 0, keepdims=False)
            rest, rows, num_rows = jax.tree.map(pick, batches)
            here = Tower(index, real_rows(index, self._tower_rows, num_rows), num_rows)
            given = (Shared(own, (count, fields.rng, rest)), rows, here)
            return trace_in_mesh(self._job.tower, given, self._placement.num_towers)(*given)

        def body(number: Any, carried: Any) -> Any:
            own, count, found = carried
            result = one(number, own, count)
            put = lambda all_of, x: lax.dynamic_update_index_in_dim(all_of, x, number, 0)
            found = jax.tree.map(put, found, (result.means, result.sums))
            return *result.rows, found

        shapes = jax.eval_shape(one, 0, own, fields.step)
        most = len(batches[-1])
        zeros = lambda x: jnp.zeros((most, *x.shape), x.dtype)
        found = jax.tree.map(zeros, (shapes.means, shapes.sums))
        first, last = bounds
        return lax.fori_loop(first, last, body, (own, fields.step, found))

    def _meet(self, fields: Fields, own: Own) -> tuple[Fields, Own, Met]:
        moved = self._meeting.moved(own, fields.params, lax.axis_index(AXIS)).packed
        totals = jax.tree.map(lambda buffer: lax.psum(buffer, AXIS), moved)
        fields, averaged, met = self._meeting.meet(fields, totals)
        return fields, self._meeting.go_on(own, fields.params, fields.model_state, averaged), met


def _repeated(met: Met, count: int) -> Met:
    return jax.tree.map(lambda leaf: jnp.repeat(jnp.asarray(leaf)[None], count, 0), met)


def _times(leaf: jax.Array, scale: jax.Array) -> jax.Array:
    return (leaf * scale).astype(leaf.dtype)

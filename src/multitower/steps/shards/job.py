"""The job of one fast step on shards: gradients in parts, and an update of global arrays.

A tower gathers the parameters that it needs, and each device ends up with its part of the summed
gradients. The update runs on arrays that span the devices, so that any optimizer works: XLA inserts
the communication that a norm over all elements needs.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from multitower.engines import spmd
from multitower.engines.gathering import Shard, on_shards, value_and_grad, whole_shapes
from multitower.engines.job import Shared, TowerResult
from multitower.steps.job import TowerStep, make_weights_job
from multitower.steps.optimizing.update import update_if_good
from multitower.steps.parts import Batches, StepParts
from multitower.steps.shards.state import StateShards
from multitower.steps.state.fields import Fields
from multitower.towers.leaf_shards import shardings_of, spec_of, split_axis
from multitower.towers.rows import Tower

# For each parameter, the dimension along which it is split; None if it is whole.
Axes = list[int | None]


class ShardsJob:
    """One step's work on arrays that span the devices; traced by `jax.jit`.

    Args:
        step: what the step is made of.
        batches: the batches that it is for.
        shards: what is split over the devices.
    """

    def __init__(self, step: StepParts, batches: Batches, shards: StateShards) -> None:
        given = (step, batches.split, batches.tower_rows)
        self._step = step
        self._shards = shards
        self._num_devices = len(shards.placement.devices)
        self._one = TowerStep(*given, self._num_devices)
        self._weights = make_weights_job(*given) if batches.has_weights else None

    def __call__(
        self, fields: Fields, rest: list[Any], rows: list[Any], num_rows: jax.Array
    ) -> tuple[Fields, dict[str, Any]]:
        """The state after one update, and the metrics."""
        means, sums, gradients = self._gradients(fields, rest, rows, num_rows)
        metrics, model_state = self._one.finish(fields.model_state, means, sums)
        there = shardings_of(fields.params, self._shards.placement)
        own = fields._replace(params=jax.lax.with_sharding_constraint(fields.params, there))
        new, metrics = update_if_good(self._step, own, gradients, metrics, model_state)
        # Parameters are gathered here, after the update, not before it.
        params = jax.lax.with_sharding_constraint(new.params, there)
        return new._replace(params=params), metrics

    def _gradients(
        self, fields: Fields, rest: list[Any], rows: list[Any], num_rows: jax.Array
    ) -> tuple[Any, Any, Any]:
        """Means and sums over towers; and the gradients, as arrays that span the devices."""
        seen = fields._replace(opt_state=None, ema_params=None)  # what a tower sees
        specs = jax.tree.map(lambda sharding: sharding.spec, self._shards.shardings(seen))
        leaves, treedef = jax.tree.flatten(fields.params)
        axes = [split_axis(leaf, self._num_devices) for leaf in leaves]
        run = functools.partial(
            spmd.run_on_shards, placement=self._shards.placement, rows=rows, num_rows=num_rows
        )
        if self._weights is not None:
            find = functools.partial(self._find_weights, axes)
            given = (Shared((), (seen, rest)), Shared((), (specs, PartitionSpec())))
            _, weights, _ = run(find, shared=given, block_specs={})
            rest = [*rest, *weights]
        blocks = {
            number: spec_of(leaf, self._num_devices)
            for number, leaf in enumerate(leaves)
            if axes[number] is not None
        }
        given = (Shared(seen, rest), Shared(specs, PartitionSpec()))
        tower = functools.partial(self._tower, axes)
        means, sums, found = run(tower, shared=given, block_specs=blocks)
        by_number = {**sums.gradients, **found}
        return means, sums, treedef.unflatten(by_number[n] for n in range(len(leaves)))

    def _tower(self, axes: Axes, shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        """One tower's results; `blocks` are its device's parts of the gradients, by leaf number."""

        def objective(params: Any) -> Any:
            return self._one.objective(params, shared, rows, here)

        params = self._with_shards(shared.state.params, axes)
        found, gradients = value_and_grad(objective, params)
        by_number = dict(enumerate(jax.tree.leaves(gradients)))
        blocks = {number: leaf for number, leaf in by_number.items() if axes[number] is not None}
        whole = {number: leaf for number, leaf in by_number.items() if axes[number] is None}
        # `results` uses the shapes of the parameters only, and needs those of the whole leaves.
        stand_ins = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), whole_shapes(params))
        shared = shared._replace(state=shared.state._replace(params=stand_ins))
        means, sums = self._one.results(shared, rows, here, found)
        return TowerResult(means=means, sums=sums._replace(gradients=whole), blocks=blocks)

    def _with_shards(self, params: Any, axes: Axes) -> Any:
        """The parameters, with a `Shard` for each that is split or whose gradient is."""

        def shard(leaf: jax.Array, axis: int) -> Shard:
            if self._shards.options.params:
                return Shard(leaf, None, axis, leaf.dtype)
            shape = [n // (self._num_devices if i == axis else 1) for i, n in enumerate(leaf.shape)]
            return Shard(jnp.zeros(shape, leaf.dtype), leaf, axis, leaf.dtype)

        leaves, treedef = jax.tree.flatten(params)
        return treedef.unflatten(
            leaf if axis is None else shard(leaf, axis)
            for leaf, axis in zip(leaves, axes, strict=True)
        )

    def _find_weights(
        self, axes: Axes, shared: Shared, rows: list[Any], here: Tower
    ) -> TowerResult:
        """The weights of a ratio in one tower."""
        assert self._weights is not None
        find = self._weights.tower
        fields, rest = shared.rest

        def weights(params: Any) -> Any:
            return find(Shared((), (fields._replace(params=params), rest)), rows, here).sums

        sums = on_shards(weights, self._with_shards(fields.params, axes))
        return TowerResult(sums=sums, blocks={})

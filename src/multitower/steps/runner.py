"""Runs one training step: as one program over all devices, or with the same bits on any number."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines import spmd
from multitower.engines.executable import WholeNumbers
from multitower.engines.job import Shared
from multitower.engines.same_bits import SameBits
from multitower.steps.job import make_job, make_weights_job
from multitower.steps.parts import Batches, StepParts
from multitower.steps.state.bundles import (
    bundled,
    bundled_job,
    first_alone,
    numbered,
    shown,
    with_leaves,
)
from multitower.steps.state.changes import Changes, with_changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.global_arrays import as_global, replicate
from multitower.towers.leaves import is_key, is_traced
from multitower.towers.placement import Placement
from multitower.towers.rows import BatchParts, Split, pad_rows
from multitower.towers.split import TowerRows, copy_to, cut, refuse_tower_rows

Metrics = dict[str, jax.Array]


class TowerFeeder:
    """Copies batches to towers, each to its device; sums the weights of a ratio over all towers."""

    def __init__(self, step: StepParts, batches: Batches, placement: Placement) -> None:
        self._weights = None
        if batches.has_weights:
            job = make_weights_job(step, batches.split, batches.tower_rows)
            self._weights = SameBits(job, placement)
        self._tower_rows = batches.tower_rows
        self._placement = placement

    def feed(
        self, parts: BatchParts, states: Sequence[Any]
    ) -> tuple[list[Shared], list[TowerRows]]:
        """What the towers get of a batch and of a state.

        Args:
            parts: the batch.
            states: the state, once per local device, on that device.

        Returns:
            State and shared leaves of the batch, with the weights after them, once per local
            device; and the rows of the towers.
        """
        rows = cut(parts.rows, parts.num_rows, self._placement, self._tower_rows)
        rest = replicate(parts.shared, self._placement)
        if self._weights is not None:
            given = [Shared((), pair) for pair in zip(states, rest, strict=True)]
            weights = self._weights.run(given, rows).results
            rest = [[*leaves, *own] for leaves, own in zip(rest, weights, strict=True)]
        return [Shared(*pair) for pair in zip(states, rest, strict=True)], rows


class SameBitsRunner:
    """Steps whose bits do not depend on the number of devices."""

    def __init__(self, step: StepParts, batches: Batches, placement: Placement) -> None:
        self._feeder = TowerFeeder(step, batches, placement)
        job = make_job(step, batches.split, batches.tower_rows, placement.num_towers)
        self._engine = SameBits(bundled_job(job), placement)
        self._placement = placement

    def run(self, state: KeptState, parts: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        copies = state.parts() or bundled(replicate(state.fields(), self._placement))
        replicas, rows = self._feeder.feed(parts, copies)
        finished = self._engine.run(replicas, rows, state.made_by)
        state.spend()
        copies = [fields for fields, _ in finished.results]
        new = _kept(copies, self._placement, state.maker)
        new.made_by = finished.programs
        return new, finished.results[0][1]


def fast_step(
    step: StepParts, split: Split, tower_rows: int, placement: Placement, *, has_weights: bool
) -> Callable[..., tuple[Fields, Metrics]]:
    """One step as a function to trace: of the state, shared leaves, rows, and their number."""
    before = make_weights_job(step, split, tower_rows) if has_weights else None
    job = make_job(step, split, tower_rows, placement.num_towers)

    def run(fields: Fields, rest: Any, rows: list[Any], num_rows: jax.Array) -> Any:
        if before is not None:
            given = Shared((), (fields, rest))
            rest = [*rest, *spmd.run(before, placement, given, rows, num_rows)[0]]
        return spmd.run(job, placement, Shared(fields, rest), rows, num_rows)[0]

    return run


class FastRunner:
    """Steps as one program over all devices; results equal those of one device up to rounding.

    Attributes:
        program: the jitted step: of the state, shared leaves, rows, and the number of real rows.
    """

    def __init__(self, step: StepParts, batches: Batches, placement: Placement) -> None:
        self._feeder = Feeder(placement, batches.tower_rows)
        given = (step, batches.split, batches.tower_rows, placement)
        run = fast_step(*given, has_weights=batches.has_weights)
        from multitower.engines.held import HoldingJit  # noqa: PLC0415 (importing stays quick)

        self.program = HoldingJit(run, placement, donate=0)

    def run(self, state: KeptState, parts: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        fields, metrics = self.program(state.fields(), *self._feeder.feed(parts))
        if not is_traced(metrics["loss"]):  # inside jax.jit, where it is refused
            state.spend()
        return KeptState(fields, state.maker), metrics


class Feeder:
    """Copies batches to the devices, for one program over all of them."""

    def __init__(self, placement: Placement, tower_rows: int) -> None:
        self._size = tower_rows * placement.num_towers
        self._placement = placement
        self._numbers = WholeNumbers()

    def feed(self, parts: BatchParts) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """The shared leaves, the rows, and the number of real rows (int32), all on the devices."""
        refuse_tower_rows(parts.rows)
        rows = [self._whole(leaf) for leaf in parts.rows]
        shared = self._placement.shared
        rest = copy_to(parts.shared, [shared] * len(parts.shared))
        return rest, rows, self._numbers.on(shared, parts.num_rows)

    def _whole(self, leaf: Any) -> jax.Array:
        """The rows, padded to those of a full batch, split over the devices."""
        leaf = pad_rows(leaf, self._size)
        if isinstance(leaf, jax.Array) and leaf.sharding == self._placement.split:
            return leaf
        return copy_to([leaf], [self._placement.split])[0]


def take_changes(state: KeptState, changes: Changes, placement: Placement) -> KeptState:
    """The state with what a user has written into it; other leaves are not copied."""
    parts = state.parts()
    if parts is None:
        placed = {name: fresh_on_all_devices(leaves, placement) for name, leaves in changes.items()}
        return KeptState(with_changes(state.fields(), placed), state.maker)
    copies = replicate(dict(changes), placement)
    parts = [
        with_leaves(part, numbered(part, Fields._fields, new))
        for part, new in zip(parts, copies, strict=True)
    ]
    return _kept(parts, placement, state.maker)


def _kept(copies: Sequence[Any], placement: Placement, maker: object) -> KeptState:
    """A state of the copies of all local devices."""

    def count(copies: Sequence[Any]) -> jax.Array:
        return as_global([first_alone(copy) for copy in copies], placement)

    return KeptState.of_parts(
        copies,
        lambda each: as_shown(each, placement),
        maker,
        join_step=None if first_alone(copies[0]) is None else count,
    )


def as_shown(copies: Sequence[Any], placement: Placement) -> Fields:
    """The state that a user sees, from the copy of each local device."""
    if placement.spans_processes:  # one of them may read its state while the others do not
        return as_global([shown(copy) for copy in copies], placement)
    return shown(as_global(copies, placement))  # one program, and not one on each device


def fresh_on_all_devices(fields: Any, placement: Placement) -> Any:
    """Copies of a tree's leaves, whole on every device; the originals are never overwritten."""
    leaves, treedef = jax.tree.flatten(fields)
    fresh = [own_copy(leaf) for leaf in leaves]
    return jax.tree.unflatten(treedef, copy_to(fresh, [placement.shared] * len(fresh)))


def fresh_on_device(tree: Any, device: jax.Device) -> Any:
    """New copies of a tree of `host_leaf`, on one device: a step overwrites them."""
    leaves, treedef = jax.tree.flatten(tree)
    fresh = [own_copy(leaf) if is_key(leaf) else leaf for leaf in leaves]
    return jax.tree.unflatten(treedef, copy_to(fresh, [device] * len(fresh)))


def own_copy(leaf: Any) -> jax.Array:
    """A new copy of a leaf, which a step may overwrite."""
    if is_key(leaf):
        data = jnp.array(jax.random.key_data(leaf), copy=True)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
    if _is_simple(leaf):
        # `jnp.array` would compile a program. Wait for the copy: JAX copies later, and the array
        # may lie in NumPy's memory, which the user may have changed by then.
        return jax.device_put(leaf, may_alias=False).block_until_ready()
    if isinstance(leaf, np.ndarray | np.generic):
        # `np.array` copies at once, for the same reason.
        return jax.device_put(np.array(leaf, jnp.result_type(leaf)), may_alias=False)
    # An explicit dtype makes it a strong type: a weak one would compile again at step two.
    return jnp.array(leaf, dtype=jnp.asarray(leaf).dtype, copy=True)


def _is_simple(leaf: Any) -> bool:
    """Whether a leaf is a concrete array of this process, of a strong type that a copy keeps."""
    if not isinstance(leaf, jax.Array) or is_traced(leaf) or leaf.weak_type:
        return False
    # An array made with jax.enable_x64 and used without it becomes float32.
    stays = leaf.dtype == jax.dtypes.canonicalize_dtype(leaf.dtype)
    return stays and leaf.is_fully_addressable

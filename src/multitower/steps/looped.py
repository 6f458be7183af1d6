"""Many steps in one call: a loop on the devices around a fast step, so that the host waits once."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from multitower.errors import ArgumentError, BatchError
from multitower.processes.together import are_several
from multitower.steps.parts import StepParts
from multitower.steps.runner import Metrics, fast_step
from multitower.steps.state.fields import Fields
from multitower.steps.state.train_state import TrainState
from multitower.towers.leaves import device_dtype, is_key
from multitower.towers.placement import AXIS, Placement
from multitower.towers.rows import Parts, Split, pad_rows, take_apart
from multitower.towers.split import copy_to, refuse_tower_rows


class LoopOptions(NamedTuple):
    """What a user says of many steps in one call.

    Attributes:
        most: how many at most.
    """

    most: int


def check_loop(
    steps_per_call: Any, others: dict[str, Any], *, is_local: bool
) -> LoopOptions | None:
    """What a user says of many steps in one call; None for one step a call.

    Args:
        steps_per_call: how many.
        others: options that exclude it, by name; those that are set are true.
        is_local: whether towers make updates of their own, which they do in any layout.

    Raises:
        ArgumentError: no such number, or options exclude each other.
    """
    if steps_per_call is None:
        return None
    is_count = isinstance(steps_per_call, int) and not isinstance(steps_per_call, bool)
    if not (is_count and steps_per_call >= 1):
        raise ArgumentError(
            f"steps_per_call={steps_per_call!r}: it must be a whole number, 1 or more."
        )
    if is_local:
        return LoopOptions(steps_per_call)
    given = [name for name, value in others.items() if value]
    if given:
        raise ArgumentError(
            f"steps_per_call= and {given[0]}= exclude each other: a loop of steps is one program "
            "over all devices, with one tower on each. Leave one of them out."
        )
    if are_several():
        raise ArgumentError(
            "steps_per_call= runs in one process, and this run has several: leave it out."
        )
    return LoopOptions(steps_per_call)


def is_one_program(towers: int | None, placement: Placement) -> bool:
    """Whether the steps of a call are one program; else each step has programs of its own."""
    return towers is None and not placement.spans_processes


class Stack(NamedTuple):
    """The batches of one call.

    Attributes:
        largest: the one with the most rows, taken apart.
        counts: for each batch its rows.
        shared: the shared leaves, each as a list with one for each batch, or stacked.
        rows: the split leaves, likewise.
    """

    largest: Parts
    counts: list[int]
    shared: list[Any]
    rows: list[Any]

    def each(self) -> Iterator[Parts]:
        """The batches one by one."""
        for number, num_rows in enumerate(self.counts):
            shared = [leaves[number] for leaves in self.shared]
            rows = [leaves[number] for leaves in self.rows]
            yield Parts(self.largest.split, shared, rows, num_rows)

    def refuse_short(self, size: int) -> None:
        """Refuses batches with rows that would be filled up, where all must be real ones.

        Raises:
            BatchError: fewer than `size` rows.
        """
        counts = self.counts
        if min(counts) < size:
            raise BatchError(
                f"the batches of the call have {min(counts)} to {max(counts)} rows, and this loss "
                "is a mean over rows of its own or compares rows: give batches of one size, or "
                "return one loss for each row."
            )


def stack_ahead(batches: list[Any], most: int, placement: Placement) -> Any:
    """The batches of one call, stacked on the devices if they are alike and fill it.

    Args:
        batches: on the host, in arrays that nobody writes into.
        most: how many fill a call.
        placement: of the step.
    """
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batches)):
        return batches
    shapes = {tuple(map(np.shape, jax.tree.leaves(batch))) for batch in batches}
    trees = {jax.tree.structure(batch) for batch in batches}
    num_rows = {shape[0] for shape in next(iter(shapes)) if shape}
    is_full = len(batches) == most and len(shapes) == len(trees) == len(num_rows) == 1
    if not is_full or num_rows.pop() % len(placement.devices):
        return batches
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *batches)
    leaves, treedef = jax.tree.flatten(stacked)
    homes = [rows_of_steps(placement) if leaf.ndim > 1 else placement.shared for leaf in leaves]
    return treedef.unflatten(copy_to(leaves, homes))


def rows_of_steps(placement: Placement) -> NamedSharding:
    """Where rows go that have a first axis for steps."""
    return NamedSharding(placement.mesh, PartitionSpec(None, AXIS))


def take_apart_each(batches: Any, most: int) -> Stack:
    """Sorts the leaves of the batches of one call into shared ones and rows.

    Args:
        batches: a list of batches; or one pytree of arrays with a first axis for the steps.
        most: how many there may be.

    Raises:
        BatchError: none, too many, or batches of different kinds.
        ArgumentError: leaves that are not numbers.
    """
    if not isinstance(batches, list):
        return _take_stacked_apart(batches, most)
    _check_count(len(batches), most)
    each = [take_apart(batch, 0, name="batch") for batch in batches]
    for number, parts in enumerate(each):
        if parts.split != each[0].split:
            raise BatchError(
                f"batch {number} of the call is another tree than batch 0: all must have the same "
                f"leaves.\nbatch 0: {each[0].split.treedef}\nbatch {number}: {parts.split.treedef}"
            )
        first, here = (_shapes_of_rows(one.rows) for one in (each[0], parts))
        if first != here:
            raise BatchError(
                f"batch {number} of the call has other rows than batch 0: a row is {here} there, "
                f"and {first} in batch 0. Pass batches of one shape, but for the number of rows."
            )
    return Stack(
        max(each, key=lambda parts: parts.num_rows),
        [parts.num_rows for parts in each],
        [list(leaves) for leaves in zip(*(parts.shared for parts in each), strict=True)],
        [list(leaves) for leaves in zip(*(parts.rows for parts in each), strict=True)],
    )


def _shapes_of_rows(rows: list[Any]) -> str:
    """Dtype and shape of a row of each array."""
    return ", ".join(f"{device_dtype(leaf)}{list(leaf.shape[1:])}" for leaf in rows)


def _take_stacked_apart(stacked: Any, most: int) -> Stack:
    leaves, treedef = jax.tree.flatten(stacked)
    counts = {np.shape(leaf)[0] if np.ndim(leaf) else None for leaf in leaves}
    if len(counts) != 1 or None in counts:
        raise BatchError(
            "with steps_per_call= a step takes a list of batches, or one batch whose arrays all "
            "have a first axis for the steps and a second one for the rows; the first axes here "
            f"are {sorted(map(str, counts))}."
        )
    (count,) = counts
    assert count is not None
    _check_count(count, most)
    first = take_apart(treedef.unflatten(map(_first_of, leaves)), 0, name="batch")
    is_row = [isinstance(kind, int) for kind in first.split.kinds]
    shared = [leaf for leaf, by_row in zip(leaves, is_row, strict=True) if not by_row]
    rows = [leaf for leaf, by_row in zip(leaves, is_row, strict=True) if by_row]
    return Stack(first, [first.num_rows] * count, shared, rows)


def _first_of(stacked: Any) -> Any:
    """The first of a stack of leaves, as far as taking apart looks at it: shape and dtype."""
    if isinstance(stacked, jax.Array) and not is_key(stacked):  # slicing it would be a program
        return np.broadcast_to(np.zeros((), stacked.dtype), stacked.shape[1:])
    return stacked[0]


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise BatchError(
            f"the call got {count} batches, and steps_per_call={most}: give 1 to {most}, as a "
            "list, or stacked along a first axis."
        )


class StackFeeder:
    """Copies the batches of a call to the devices, for one program over all of them."""

    def __init__(
        self, placement: Placement, tower_rows: int, most: int, *, must_be_full: bool
    ) -> None:
        self._placement = placement
        self.tower_rows = tower_rows
        self._size = tower_rows * placement.num_towers
        self._most = most
        self._must_be_full = must_be_full
        self._numbers: dict[int, jax.Array] = {}

    def number(self, value: int) -> jax.Array:
        """A whole number on every device, copied there once."""
        if value not in self._numbers:
            self._numbers[value] = copy_to([np.int32(value)], [self._placement.shared])[0]
        return self._numbers[value]

    def feed(self, stack: Stack) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """What all towers share, the rows, and how many are real, each for all steps.

        Raises:
            BatchError: rows that would be filled up, where all must be real ones.
        """
        counts = stack.counts
        for leaves in stack.rows:
            if isinstance(leaves, list):
                refuse_tower_rows(leaves)
        if self._must_be_full:
            stack.refuse_short(self._size)
        rest = [self._stacked(leaves) for leaves in stack.shared]
        rows = [self._stacked(self._filled(leaves)) for leaves in stack.rows]
        given = [*rest, *rows, self._stacked(np.array(counts, np.int32))]
        everywhere = self._placement.shared
        split = rows_of_steps(self._placement)
        homes = [everywhere] * len(rest) + [split] * len(rows) + [everywhere]
        placed = copy_to(given, homes)
        return placed[: len(rest)], placed[len(rest) : -1], placed[-1]

    def _filled(self, leaves: Any) -> Any:
        """The rows of all batches, each filled up to as many."""
        if isinstance(leaves, list):
            return [pad_rows(leaf, self._size) for leaf in leaves]
        num_rows = leaves.shape[1]
        return leaves if num_rows == self._size else leaves[:, np.arange(self._size) % num_rows]

    def _stacked(self, leaves: Any) -> Any:
        """One array with a place for each step; a shorter call has its last leaf there again."""
        if isinstance(leaves, list):
            on_device = any(isinstance(leaf, jax.Array) for leaf in leaves)
            leaves = jnp.stack(leaves) if on_device else np.stack(leaves)
        num_steps = leaves.shape[0]
        if num_steps == self._most:
            return leaves
        return leaves[np.minimum(np.arange(self._most), num_steps - 1)]


class LoopRunner:
    """Several fast steps in one program; compiled once for any number of them up to `most`."""

    def __init__(
        self,
        step: StepParts,
        split: Split,
        tower_rows: int,
        placement: Placement,
        feeder: StackFeeder,
        *,
        has_weights: bool,
    ) -> None:
        self._feeder = feeder
        one = fast_step(step, split, tower_rows, placement, has_weights=has_weights)

        def run(fields: Fields, rest: Any, rows: Any, num_rows: jax.Array, count: Any) -> Any:
            given = (rest, rows, num_rows)

            def at(number: Any) -> Any:
                return jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, number, 0, False), given)

            def body(number: Any, carried: Any) -> Any:
                fields, found = carried
                fields, metrics = one(fields, *at(number))
                put = lambda all_of, x: lax.dynamic_update_index_in_dim(all_of, x, number, 0)
                return fields, jax.tree.map(put, found, metrics)

            _, metrics = jax.eval_shape(one, fields, *jax.eval_shape(at, 0))
            most = len(num_rows)
            found = jax.tree.map(lambda x: jnp.zeros((most, *x.shape), x.dtype), metrics)
            return lax.fori_loop(0, count, body, (fields, found))

        self._run = jax.jit(run, donate_argnums=0)

    def run(self, state: TrainState, stack: Stack, maker: object) -> tuple[TrainState, Metrics]:
        """Makes an update with each batch; the state is overwritten."""
        batches = self._feeder.feed(stack)
        num_steps = len(stack.counts)
        fields, metrics = self._run(state.fields(), *batches, self._feeder.number(num_steps))
        state.spend()
        if num_steps < metrics["loss"].shape[0]:
            metrics = jax.tree.map(lambda leaf: leaf[:num_steps], metrics)
        return TrainState(fields, maker), metrics

"""Many steps in one call: a loop on the devices, so that the host starts one program for all."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from multitower.engines.executable import WholeNumbers
from multitower.errors import ArgumentError, BatchError, whole_number
from multitower.processes.together import are_several
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import Metrics, fast_step
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.leaves import device_dtype, is_key
from multitower.towers.placement import AXIS, Placement
from multitower.towers.rows import BatchParts, pad_rows, take_apart
from multitower.towers.split import copy_to, refuse_tower_rows


class LoopOptions(NamedTuple):
    """The options for many steps in one call.

    Attributes:
        most: the most steps of one call.
    """

    most: int


def check_loop(
    steps_per_call: Any, others: dict[str, Any], *, is_local: bool
) -> LoopOptions | None:
    """The options for many steps in one call; None for one step per call.

    Args:
        steps_per_call: the most steps of one call, 1 or more; None for one step per call.
        others: options that exclude it, by name, each true if it is set.
        is_local: whether towers make local updates; then `check_local` checks `others`, and
            `towers` may be given.

    Raises:
        ArgumentError: not a whole number above 0, or options exclude each other.
    """
    if steps_per_call is None:
        return None
    steps_per_call = whole_number("steps_per_call", steps_per_call, 1)
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
    """Whether the steps of a call run as one program; else each step runs its own programs."""
    return towers is None and not placement.spans_processes


class Stack(NamedTuple):
    """The batches of one call.

    Attributes:
        largest: the one with the most rows, taken apart.
        counts: the number of rows of each batch.
        shared: the leaves that are not rows; each is a list with one array per batch, or an array
            with a first axis for the batches.
        rows: the leaves that are rows, likewise.
    """

    largest: BatchParts
    counts: list[int]
    shared: list[Any]
    rows: list[Any]

    def each(self) -> Iterator[BatchParts]:
        """Yields the batches one by one."""
        for number, num_rows in enumerate(self.counts):
            shared = [leaves[number] for leaves in self.shared]
            rows = [leaves[number] for leaves in self.rows]
            yield BatchParts(self.largest.split, shared, rows, num_rows)

    def refuse_short(self, size: int) -> None:
        """Refuses batches that would have to be padded, where every row must be real.

        Raises:
            BatchError: a batch has fewer than `size` rows.
        """
        counts = self.counts
        if min(counts) < size:
            raise BatchError(
                f"the batches of the call have {min(counts)} to {max(counts)} rows, and this loss "
                "is a mean over rows of its own or compares rows: give batches of one size, or "
                "return one loss for each row."
            )


def stack_ahead(batches: list[Any], most: int, placement: Placement) -> Any:
    """Stacks the batches of one call on the devices, if there are `most` of one kind.

    Args:
        batches: on the host, in arrays that are not written to any more.
        most: how many batches fill a call.
        placement: of the step.

    Returns:
        One batch whose arrays have a first axis for steps; else the list as it was given.
    """
    if any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(batches)):
        return batches
    kind_of = lambda leaf: (np.shape(leaf), getattr(leaf, "dtype", type(leaf)))
    kinds = {tuple(map(kind_of, jax.tree.leaves(batch))) for batch in batches}
    trees = {jax.tree.structure(batch) for batch in batches}
    num_rows = {shape[0] for shape, _ in next(iter(kinds)) if shape}
    is_full = len(batches) == most and len(kinds) == len(trees) == len(num_rows) == 1
    if not is_full or num_rows.pop() % len(placement.devices):
        return batches
    stacked = jax.tree.map(lambda *leaves: _stack(leaves), *batches)
    leaves, treedef = jax.tree.flatten(stacked)
    homes = [rows_of_steps(placement) if leaf.ndim > 1 else placement.shared for leaf in leaves]
    return treedef.unflatten(copy_to(leaves, homes))


def _stack(leaves: Sequence[Any]) -> Any:
    """One array with an entry for each step; on the host where it can be.

    Python numbers adapt to the dtypes around them, which an array of NumPy would not.
    """
    is_number = all(type(leaf) in (int, float, complex) for leaf in leaves)
    on_device = is_number or any(isinstance(leaf, jax.Array) for leaf in leaves)
    return jnp.stack(leaves) if on_device else np.stack(leaves)


def rows_of_steps(placement: Placement) -> NamedSharding:
    """The sharding of rows with a first axis for steps: axis 1 is split over the devices."""
    return NamedSharding(placement.mesh, PartitionSpec(None, AXIS))


def take_apart_each(batches: Any, most: int) -> Stack:
    """Sorts the leaves of the batches of one call into shared ones and rows.

    Args:
        batches: a list of batches; or one pytree of arrays with a first axis for the steps.
        most: how many there may be.

    Raises:
        BatchError: no batch, more than `most`, or batches that differ in structure, dtype or shape.
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
                f"and {first} in batch 0. Pass batches of one shape and dtype, except for the "
                "number of rows."
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
    """The first entry of a stacked leaf; of an array on a device only its shape and dtype."""
    if isinstance(stacked, jax.Array) and not is_key(stacked):  # slicing it would be a program
        zero = np.zeros((), stacked.dtype)
        is_python = stacked.weak_type and stacked.ndim == 1
        return zero.item() if is_python else np.broadcast_to(zero, stacked.shape[1:])
    return stacked[0]


def _check_count(count: int, most: int) -> None:
    if not 1 <= count <= most:
        raise BatchError(
            f"the call got {count} batches, and steps_per_call={most}: give 1 to {most}, as a "
            "list, or stacked along a first axis."
        )


class StackFeeder:
    """Copies the batches of a call to the devices, for one program over all of them."""

    def __init__(self, batches: Batches, placement: Placement, most: int) -> None:
        self._placement = placement
        self._size = batches.tower_rows * placement.num_towers
        self._most = most
        self._must_be_full = batches.must_be_full
        self._numbers = WholeNumbers()

    def number(self, value: int) -> jax.Array:
        """A whole number on every device, int32, shape ()."""
        return self._numbers.on(self._placement.shared, value)

    def feed(self, stack: Stack) -> tuple[list[jax.Array], list[jax.Array], jax.Array]:
        """The shared leaves, the rows, and the numbers of real rows, with a first axis for steps.

        Raises:
            BatchError: a batch would have to be padded, and every row must be real.
        """
        for leaves in stack.rows:
            if isinstance(leaves, list):
                refuse_tower_rows(leaves)
        if self._must_be_full:
            stack.refuse_short(self._size)
        rest = [self._stacked(leaves) for leaves in stack.shared]
        rows = [self._stacked(self._filled(leaves)) for leaves in stack.rows]
        given = [*rest, *rows, self._stacked(np.array(stack.counts, np.int32))]
        everywhere = self._placement.shared
        split = rows_of_steps(self._placement)
        homes = [everywhere] * len(rest) + [split] * len(rows) + [everywhere]
        placed = copy_to(given, homes)
        return placed[: len(rest)], placed[len(rest) : -1], placed[-1]

    def _filled(self, leaves: Any) -> Any:
        """The rows of all batches, each padded to the rows of a full batch."""
        if isinstance(leaves, list):
            return [pad_rows(leaf, self._size) for leaf in leaves]
        num_rows = leaves.shape[1]
        return leaves if num_rows == self._size else leaves[:, np.arange(self._size) % num_rows]

    def _stacked(self, leaves: Any) -> Any:
        """One array with an entry for each of `most` steps; a shorter call repeats its last one."""
        if isinstance(leaves, list):
            leaves = _stack(leaves)
        num_steps = leaves.shape[0]
        if num_steps == self._most:
            return leaves
        return leaves[np.minimum(np.arange(self._most), num_steps - 1)]


class LoopRunner:
    """Several fast steps in one program; compiled once for any number of them up to `most`."""

    def __init__(self, step: StepParts, batches: Batches, placement: Placement, most: int) -> None:
        self._feeder = StackFeeder(batches, placement, most)
        given = (step, batches.split, batches.tower_rows, placement)
        one = fast_step(*given, has_weights=batches.has_weights)

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

        from multitower.engines.held import HoldingJit  # noqa: PLC0415 (importing stays quick)

        self._run = HoldingJit(run, placement, donate=0)

    def run(self, state: KeptState, stack: Stack) -> tuple[KeptState, Metrics]:
        """Makes an update with each batch; the state is overwritten."""
        batches = self._feeder.feed(stack)
        num_steps = len(stack.counts)
        fields, metrics = self._run(state.fields(), *batches, self._feeder.number(num_steps))
        state.spend()
        if num_steps < metrics["loss"].shape[0]:
            metrics = jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, 0, num_steps), metrics)
        return KeptState(fields, state.maker), metrics

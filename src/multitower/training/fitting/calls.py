"""Calls: how many steps each call makes, with batches copied to the devices ahead of time."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.steps.looped import is_one_program, stack_ahead
from multitower.steps.step import TrainStep
from multitower.towers.feeding import prefetch, run_ahead
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.placement import Placement
from multitower.training.progress import num_rows_of

_WAITING = 2


class Call(NamedTuple):
    """The argument of one call of a step.

    Attributes:
        batch: a batch, or with `steps_per_call` a list of them or a stack.
        num_rows: the number of rows of each step of the call.
    """

    batch: Any
    num_rows: list[int]


class Feeding(NamedTuple):
    """How a run groups its batches into calls.

    Attributes:
        step: the step to call.
        where: `devices` and `towers`, as for `prefetch`.
        global_batch: as for `prefetch`.
        most: the most steps per call; None for one.
        borders: a call ends at every multiple of each of these numbers; 0 stands for no end.
    """

    step: TrainStep
    where: Mapping[str, Any]
    global_batch: int | None
    most: int | None
    borders: Sequence[int]

    def calls(self, batches: Iterator[Any], first: int, last: int) -> Generator[Call]:
        """Yields the calls of steps `first` + 1 to `last`; copies their batches ahead of time."""
        if self.most is None:
            return _one_by_one(self._ahead(batches, first))
        sizes = sizes_of_calls(self.most, self.borders, first=first, last=last)
        placement = self.step.placement
        if is_one_program(self.where["towers"], placement):
            return _together(batches, sizes, self.most, placement)
        return _grouped(self._ahead(batches, first), sizes)

    def arguments(self) -> dict[str, Any]:
        """Arguments of `prefetch`; with stages, batches go to the devices of the first stage."""
        where = {**self.where, "global_batch": self.global_batch}
        if self.step.layout is not None:
            where["devices"] = list(self.step.placement.devices)
        return where

    def _ahead(self, batches: Iterator[Any], first: int) -> Generator[Any]:
        turns = self.step.turns
        if turns is not None:
            return turns.prefetch(batches, first=first, global_batch=self.global_batch)
        return prefetch(batches, _WAITING, **self.arguments())


def _one_by_one(batches: Generator[Any]) -> Generator[Call]:
    with closing(batches):
        for batch in batches:
            yield Call(batch, [num_rows_of(batch)])


def _grouped(batches: Generator[Any], sizes: Iterable[int]) -> Generator[Call]:
    """Several batches per call, each copied to the devices by itself; sizes as for `_together`."""
    with closing(batches):
        for size in sizes:
            if group := list(itertools.islice(batches, size)):
                yield Call(group, [num_rows_of(batch) for batch in group])
            del group  # else they would stay on the devices until the next group is complete


def _together(
    batches: Iterator[Any], sizes: Iterable[int], most: int, placement: Placement
) -> Generator[Call]:
    """Several batches per call, stacked: as many as `sizes` says, or fewer if they run out."""

    def groups() -> Iterator[list[Any]]:
        for size in sizes:
            # Copied at once: the loader may write the next batch into the same arrays.
            if group := [_copied(batch) for batch in itertools.islice(batches, size)]:
                yield group

    def make_ready(group: list[Any]) -> Call:
        return Call(stack_ahead(group, most, placement), [num_rows_of(batch) for batch in group])

    with closing(run_ahead(groups(), _WAITING, make_ready)) as ahead:
        yield from ahead


def _copied(batch: Any) -> Any:
    """A copy of a batch on the host, with all its rows: this runs in one process only."""
    if isinstance(batch, LazyRows):
        batch = batch.read(np.arange(batch.num_rows))
    return jax.tree.map(lambda x: x.copy() if isinstance(x, np.ndarray) else x, batch)


def sizes_of_calls(most: int, borders: Sequence[int], *, first: int, last: int) -> Iterator[int]:
    """How many steps each call makes.

    Args:
        most: the most steps per call.
        borders: a call ends at every multiple of each of these numbers; 0 stands for no end.
        first: steps made so far.
        last: steps to make in all.

    Example:
        >>> from multitower.training.fitting.calls import sizes_of_calls
        >>> list(sizes_of_calls(4, [10, 0], first=0, last=13))
        [4, 4, 2, 3]
    """
    while first < last:
        size = min([most, last - first, *(border - first % border for border in borders if border)])
        yield size
        first += size

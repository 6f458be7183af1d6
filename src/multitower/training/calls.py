"""Calls: how many steps each call of a step makes, and its batches, ahead of need."""

import itertools
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from multitower.steps.looped import stack_ahead
from multitower.towers.feeding import run_ahead
from multitower.towers.placement import Placement
from multitower.training.progress import num_rows_of

_WAITING = 2


class Call(NamedTuple):
    """What a step is called with.

    Attributes:
        batch: what it takes.
        num_rows: the rows of each of its steps.
    """

    batch: Any
    num_rows: list[int]


def one_by_one(batches: Generator[Any]) -> Generator[Call]:
    """One step a call."""
    with closing(batches):
        for batch in batches:
            yield Call(batch, [num_rows_of(batch)])


def together(
    batches: Iterator[Any], sizes: Iterable[int], most: int, placement: Placement
) -> Generator[Call]:
    """Several steps a call: so many as `sizes` say, or fewer in the last one if batches run out."""

    def groups() -> Iterator[list[Any]]:
        for size in sizes:
            if group := list(itertools.islice(batches, size)):
                yield group

    def make_ready(group: list[Any]) -> Call:
        return Call(stack_ahead(group, most, placement), [num_rows_of(batch) for batch in group])

    with closing(run_ahead(groups(), _WAITING, make_ready)) as ahead:
        yield from ahead


def sizes_of_calls(most: int, borders: Sequence[int], *, first: int, last: int) -> Iterator[int]:
    """How many steps each call makes.

    Args:
        most: at most so many.
        borders: a call ends at every multiple of these numbers; 0 has none.
        first: steps that have been made.
        last: steps to make in all.

    Example:
        >>> from multitower.training.calls import sizes_of_calls
        >>> list(sizes_of_calls(4, [10, 0], first=0, last=13))
        [4, 4, 2, 3]
    """
    while first < last:
        size = min([most, last - first, *(border - first % border for border in borders if border)])
        yield size
        first += size

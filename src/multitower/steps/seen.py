"""Kinds of batches that a step has seen: what was found out about one need not be found again."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from multitower.steps.way import Runner
from multitower.towers.rows import Parts, Split


class Seen(NamedTuple):
    """What a step knows of a kind of batch.

    Attributes:
        split: which of its leaves are rows.
        shared: the numbers of those that are not.
        rows: the numbers of those that are.
        num_rows: how many rows there are.
        runner: what runs it.
    """

    split: Split
    shared: tuple[int, ...]
    rows: tuple[int, ...]
    num_rows: int
    runner: Runner

    @classmethod
    def of(cls, parts: Parts, runner: Runner) -> "Seen":
        """Of a batch that has been run; rows are on axis 0."""
        numbers: tuple[list[int], list[int]] = ([], [])
        for number, kind in enumerate(parts.split.kinds):
            numbers[kind == 0].append(number)
        shared, rows = map(tuple, numbers)
        return cls(parts.split, shared, rows, parts.num_rows, runner)

    def parts(self, leaves: Sequence[Any]) -> Parts:
        """Another batch of this kind, taken apart."""
        return Parts(
            self.split,
            [leaves[number] for number in self.shared],
            [leaves[number] for number in self.rows],
            self.num_rows,
        )


def kind_of(leaves: Sequence[Any], treedef: Any) -> Any:
    """What batches must have in common to be taken apart and run alike; None for some that don't.

    Types are part of it: none that is refused, such as a value inside of `jax.jit`, is ever seen.
    """
    try:
        return treedef, *[(leaf.__class__, leaf.shape, leaf.dtype) for leaf in leaves]
    except AttributeError:  # Python numbers
        return None

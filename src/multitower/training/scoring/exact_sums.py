"""Exact sums over rows, element by element, which do not depend on the order of the rows."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_EXACT = 2.0**53  # whole numbers below it, and their sums, are exact in float64


class ExactSums:
    """The sums over all rows so far, of one number or array per row.

    Args:
        shape: the shape of one row's entry, () for a number.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        # For each element a few floats, mostly one or two, whose exact sum is its sum.
        self._parts: list[list[float]] = [[] for _ in range(math.prod(shape))]

    def add(self, rows: np.ndarray[Any, Any]) -> None:
        """Adds rows, shape (rows, *shape)."""
        rows = rows.reshape(len(rows), -1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            if (rows == np.rint(rows)).all() and np.abs(rows).sum() < _EXACT:
                rows = rows.sum(0, keepdims=True)  # counts, which are many in a confusion matrix
        for number, column in enumerate(rows.T.tolist()):
            self._parts[number] = _few([*self._parts[number], *column])

    def total(self) -> Any:
        """The sums, rounded once to float64: a float, or an array of `shape`."""
        sums = [_sum(parts) for parts in self._parts]
        return np.array(sums).reshape(self._shape) if self._shape else sums[0]


def _few(values: list[float]) -> list[float]:
    """A few floats with the same exact sum."""
    found: list[float] = []
    while (rest := _sum(values)) and math.isfinite(rest):
        found.append(rest)
        values = [*values, -rest]
    return [*found, rest] if rest else found


def _sum(values: Iterable[float]) -> float:
    try:
        return math.fsum(values)
    except ValueError:  # infinities of both signs
        return math.nan

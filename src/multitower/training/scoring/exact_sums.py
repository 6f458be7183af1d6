"""Exact sums over rows, number by number, so that no order of the rows changes them."""

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

_EXACT = 2.0**53  # whole numbers below it, and their sums, are exact in float64


class ExactSums:
    """The sums over all rows so far: of a number per row, or of an array per row.

    Args:
        shape: of one row's entry, () for a number.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        # For each number some floats with exactly its sum; mostly one or two.
        self._parts: list[list[float]] = [[] for _ in range(math.prod(shape))]

    def add(self, rows: np.ndarray[Any, Any]) -> None:
        """Adds rows, on axis 0."""
        rows = rows.reshape(len(rows), -1).astype(np.float64)
        with np.errstate(invalid="ignore"):
            if (rows == np.rint(rows)).all() and np.abs(rows).sum() < _EXACT:
                rows = rows.sum(0, keepdims=True)  # counts, which are many in a confusion matrix
        for number, column in enumerate(rows.T.tolist()):
            self._parts[number] = _few([*self._parts[number], *column])

    def total(self) -> Any:
        """A float, or an array of float64; each rounded once."""
        sums = [_sum(parts) for parts in self._parts]
        return np.array(sums).reshape(self._shape) if self._shape else sums[0]


def _few(values: list[float]) -> list[float]:
    """As few floats, with the same sum."""
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

"""Exact sums over rows, element by element, which do not depend on the order of the rows."""

import math
from fractions import Fraction
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
        with np.errstate(invalid="ignore", over="ignore"):
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
    if math.isinf(rest) and all(map(math.isfinite, values)):
        return [*found, *values]  # later rows may bring the sum back into the range of float64
    return [*found, rest] if rest else found


def _sum(values: list[float]) -> float:
    try:
        return math.fsum(values)
    except ValueError:  # infinities of both signs
        return math.nan
    except OverflowError:  # the sum of some of them is beyond float64
        if not all(map(math.isfinite, values)):
            return _sum([value for value in values if not math.isfinite(value)])
        total = sum(map(Fraction, values))
        try:
            return float(total)
        except OverflowError:
            return math.inf if total > 0 else -math.inf

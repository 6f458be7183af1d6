"""Compares one result of a function on the whole batch with the results of the towers."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.checks.problems import (
    BAKED,
    BESIDE,
    COUNTED,
    MEAN,
    MIXED,
    NOT_A_NUMBER,
    RATIO,
    SHAPES,
    STATISTICS,
    WHY_MIXED,
    Problem,
    summed,
)
from multitower.checks.reading.flow import Flow, operation_at
from multitower.checks.reading.row_flow import Reading
from multitower.checks.results import Results
from multitower.functions.ratio import RatioSums, join_ratio

# Tolerances relative to the largest value, far above the rounding of sums in another order. The
# second is for 16-bit floats.
_TOLERANCE, _COARSE = 1e-4, 2e-2


class Compared(NamedTuple):
    """What is known of a result before its values are compared.

    Attributes:
        name: the name of the result.
        flow: what the program does with rows on the way to it.
        read: the reading of the whole program; None if it could not be read.
        is_summed: whether it is a loss that is summed over towers.
        num_rows: rows of the whole batch.
        num_towers: the number of towers that the batch is cut into.
    """

    name: str
    flow: Flow
    read: tuple[Reading, Results] | None
    is_summed: bool
    num_rows: int
    num_towers: int

    def problems(self, whole: Any, cut: Sequence[Any], *, in_order: bool) -> list[Problem]:
        """The problems that the values show.

        Args:
            whole: the result on the whole batch.
            cut: the results of all towers.
            in_order: whether the towers have consecutive rows; if not, results with one entry per
                row are not concatenated.
        """
        numbers = numbers_of(whole)
        if numbers.size and np.isnan(numbers).all():
            return [Problem("not a number", self.name, None, NOT_A_NUMBER)]
        if isinstance(whole, RatioSums):
            total = jax.tree.map(lambda *parts: sum(parts), *cut)
            is_right = _is_close(numbers_of(total), numbers)
            return [] if is_right else [self.mixed(RATIO)]
        whole, cut = numbers, [numbers_of(part) for part in cut]
        if whole.shape == cut[0].shape:  # no rows in it
            return self._without_rows(whole, sum(cut), len(cut))
        if not in_order:
            return []
        joined = np.concatenate(cut) if cut[0].ndim else cut[0]
        if joined.shape != whole.shape:
            rows, few = self.num_rows, self.num_rows // len(cut)
            text = SHAPES.format(whole=whole.shape, rows=rows, part=cut[0].shape, few=few)
            return [Problem("row count", self.name, self.flow.origin, text)]
        return [] if _is_close(joined, whole) else [self.mixed(MIXED)]

    def mixed(self, text: str) -> Problem:
        """The problem of rows that influence each other; `text` is used if no more is known."""
        if text == MIXED and self.read and not self.flow.mixed:
            if self.flow.beside_mean:
                return Problem("sum", self.name, self.flow.beside_mean, BESIDE)
            if self.flow.is_mean and not self.flow.counted:  # every row has the same mean
                return Problem("mixed rows", self.name, self.flow.origin, MIXED)
            place = self.flow.counted or self.flow.origin
            return Problem("row count", self.name, place, COUNTED)
        if self.read and self.read[1].are_statistics(self.flow):
            text = STATISTICS.format(num=self.num_towers)
        place = next(iter(self.flow.places), None)
        if text == MIXED and place:
            text = WHY_MIXED.get(operation_at(place), MIXED)
        return Problem("mixed rows", self.name, place, text)

    def _without_rows(self, whole: Any, total: Any, num_towers: int) -> list[Problem]:
        is_mean, is_sum = _is_close(total / num_towers, whole), _is_close(total, whole)
        if is_sum if self.is_summed else is_mean:
            return []
        if not (is_sum or is_mean):
            return [self.mixed(MIXED)]
        if self.is_summed:
            return [Problem("mean", self.name, self.flow.origin, MEAN)]
        if self.read and self.read[0].baked:
            return [Problem("row count", self.name, self.read[0].baked[0], BAKED)]
        is_loss = self.name in ("output", "output[0]")
        return [summed(self.name, self.flow.origin, is_loss=is_loss)]


def numbers_of(value: Any) -> Any:
    """A result on the host: 16-bit floats as float32, others as float64 or complex128.

    A ratio is divided.
    """
    array = np.asarray(join_ratio(value) if isinstance(value, RatioSums) else value)
    if jnp.issubdtype(array.dtype, jnp.floating) and array.dtype.itemsize < 4:
        return array.astype(np.float32)
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _is_close(found: Any, wanted: Any) -> bool:
    largest = np.max(np.abs(wanted), initial=0.0, where=np.isfinite(wanted))
    is_coarse = wanted.dtype == np.float32  # `numbers_of` returns it for 16-bit floats
    tolerance = (_COARSE if is_coarse else _TOLERANCE) * (largest + 1e-12)
    return bool(np.allclose(found, wanted, rtol=0, atol=tolerance, equal_nan=True))

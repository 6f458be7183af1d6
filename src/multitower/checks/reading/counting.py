"""Counting: what the operations of a program do with the number of its rows."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from multitower.checks.changing import Changing
from multitower.checks.reading import operations
from multitower.checks.reading.along_rows import row_axes
from multitower.checks.reading.counts import (
    beside,
    counts_rows,
    divides,
    is_made_of_count,
    is_mean,
    is_of_all,
    is_share,
    is_squared,
    is_steady,
    loses_count,
    multiplies,
    numbers_of,
    per_row,
    warps,
)
from multitower.checks.reading.flow import Flow, Word, operation_at


class _Warped(str):
    """Where a value was divided by the number of rows whose tanh, say, was taken since.

    The number cannot be taken out of it again.
    """

    __slots__ = ()


class Counting:
    """Follows the number of rows through a program, one operation after the other.

    Args:
        num_rows: the number of rows.
        batch_rows: the number of rows of the real batch, to look for among constants.
        whole: the number of rows of all towers; 0 if it is not known.
        where: names an operation and its line.
        made: the constants of the program that are made of its number of rows.
        num_groups: how often `num_rows` goes into the number of rows of the tower.
        meets: whether towers exchange values.

    Attributes:
        baked: where a sum over rows was multiplied or divided by `batch_rows`.
    """

    def __init__(
        self,
        num_rows: int,
        batch_rows: int,
        whole: int,
        where: Callable[[Any], str],
        made: Changing,
        *,
        num_groups: int = 1,
        meets: bool,
    ) -> None:
        self._num_rows = num_rows
        self._tower_rows = num_rows * num_groups
        self._batch_rows = batch_rows
        self._whole = whole
        self._all_rows = whole if meets else 0
        self._where = where
        self._made = made
        self._means: dict[str | None, str] = {}  # sums of rows that were divided, and where
        self._for_good = set[str]()  # where it was divided by a root of the number, or the like
        self.baked: list[str] = []

    def added_to(self, flow: Flow, equation: Any, inputs: list[Flow]) -> Flow:
        """What is known of a result, with what the number of rows has to do with it."""
        name, rows = equation.primitive.name, (self._num_rows, self._tower_rows)
        counted = self._counted(equation, name, flow.word, inputs)
        more: dict[str, Any] = {"counted": counted}
        if flow.word in ("by row", "linear"):
            more["squared"] = self._is_squared(equation, name, inputs, counted)
        if flow.word == "linear":
            numbers = numbers_of(inputs, self._whole)
            more["is_mean"] = is_mean(name, inputs, numbers, *rows, made=self._made)
            more["beside"] = self._beside(equation, name, inputs)
        if flow.word == "free":
            more["of_all"] = is_of_all(name, inputs)
            more["is_share"] = is_share(name, inputs, self._all_rows // self._num_rows)
            more["is_steady"] = self._is_steady(equation, name, inputs)
            more["per_row"] = per_row(name, inputs, *rows, self._made)
        return replace(flow, **more)

    def look_for_baked(self, equation: Any, inputs: list[Flow]) -> None:
        """Notes an operation on a sum over rows whose constant is the batch's number of rows."""
        if self._batch_rows < 2 or self._batch_rows == self._num_rows:
            return
        for number in numbers_of(inputs):
            if number == self._batch_rows or divides(self._batch_rows, 1 / number, exact=True):
                self.baked.append(self._where(equation))

    def _is_steady(self, equation: Any, name: str, inputs: list[Flow]) -> bool:
        """Whether it is a number that every tower has, and no count of rows."""
        if self._all_rows:
            return False  # towers meet, and may share it
        shapes = [getattr(atom.aval, "shape", ()) for atom in equation.invars + equation.outvars]
        if any(row_axes(shape, self._num_rows, 0) for shape in shapes):
            return False  # it is there once for every row
        num_towers = self._whole // self._num_rows
        return is_steady(name, inputs, self._tower_rows, num_towers, self._made)

    def _beside(self, equation: Any, name: str, inputs: list[Flow]) -> str | None:
        """Where a number that every tower has was added to a sum over rows."""
        if beside(name, inputs, self._num_rows):
            return self._where(equation)
        place = next((flow.beside for flow in inputs if flow.beside), None)
        if place is None or operation_at(place) not in operations.STACKS:
            return place
        if name == "reduce_sum":  # it adds up what is side by side
            return self._where(equation)
        others = [
            atom for atom, flow in zip(equation.invars, inputs, strict=True) if not flow.beside
        ]
        by_one = name in ("mul", "div") and all(not atom.aval.shape for atom in others)
        return place if by_one or name in operations.SAME else None

    def _counted(self, equation: Any, name: str, word: Word, inputs: list[Flow]) -> str | None:
        """Where it was multiplied or divided by the number of rows; a second time cancels that."""
        is_float = all(jnp.issubdtype(atom.aval.dtype, jnp.inexact) for atom in equation.outvars)
        if self._all_rows or not is_float:
            return None  # it may be a share of the rows of all towers, or a place among them
        handed_on: set[Word] = {"free", "by row"}
        if word == "linear":
            handed_on = {"linear", "free"} if name in operations.LINEAR_TOGETHER else {"linear"}
        is_product = name in ("mul", "div")  # whose constants are looked at below
        unknown = [flow for flow in inputs if flow.value is None or not is_product]
        sums = [x for x in inputs if x.word == "linear"]
        is_sum = word == "linear" and not (sums and all(x.is_mean for x in sums))
        # To a sum over rows belongs n * log(sigma), for n rows.
        handed = [x for x in unknown if x.word in handed_on and not (is_sum and x.per_row)]
        counted = [x.counted for x in handed if x.counted]
        warped = next((place for place in counted if isinstance(place, _Warped)), None)
        if warped is None and counted and warps(name, inputs):
            warped = _Warped(counted[0])
        if word == "mixed" or (loses_count(equation, name, inputs) and not warped):
            return None
        if warped:
            return warped
        if is_product and not is_sum:
            return self._scaled(equation, name, inputs, handed)
        if not is_sum and name in ("add", "sub") and self._is_made(inputs, self._made.others):
            self._for_good.add(where := self._where(equation))
            return where
        too_often = self._counted_sum(equation, name, inputs, unknown) if is_sum else None
        return too_often or next((x.counted for x in handed if x.counted), None)

    def _counted_sum(
        self, equation: Any, name: str, inputs: list[Flow], unknown: list[Flow]
    ) -> str | None:
        """Where a sum over rows was divided by more than their number, which makes it a mean."""
        counted = [x.counted for x in unknown if x.counted]
        rows = [x.counted for x in unknown if x.counted and x.word == "by row"]
        self._means |= {self._where(equation): place for place in rows[:1]}
        numbers = numbers_of(inputs, self._whole) if name == "div" else []
        if any(number % self._num_rows**2 == 0 for number in numbers):
            return self._where(equation)
        is_too_small = bool(counted) and self._is_squared(equation, name, inputs, counted[0])
        return counted[0] if is_too_small else None

    def _is_squared(
        self, equation: Any, name: str, inputs: list[Flow], counted: str | None
    ) -> bool:
        """Whether it is the square of what was divided by the number of rows, not by its root."""
        is_of_count = counted is not None and counted not in self._for_good
        return is_of_count and is_squared(equation, name, inputs, self._num_rows)

    def _scaled(
        self, equation: Any, name: str, inputs: list[Flow], handed: list[Flow]
    ) -> str | None:
        """Where a product was multiplied or divided by the number of rows, if that was before."""
        before = next((x.counted for x in handed if x.counted), None)
        if before in self._for_good:
            return before
        numbers = [abs(number) for number in numbers_of(inputs, self._whole)]
        where = self._where(equation)
        sums = [x for x in inputs if x.word == "linear"]
        if any(counts_rows(number, self._num_rows) for number in numbers):
            if before is None:  # or where the rows of a mean were divided before
                return next((self._means.get(x.origin, where) for x in sums), where)
            # Of a square's two divisions one is left, but not of what its sum was divided by.
            is_undone = bool(sums) and multiplies(name, inputs, self._num_rows)
            return before if any(x.squared for x in handed) and not is_undone else None
        if self._is_made(inputs, frozenset[float]().union(*self._made)):
            self._for_good.add(where)
            return where
        return before

    def _is_made(self, inputs: list[Flow], made: frozenset[float]) -> bool:
        """Whether a number in it is among `made`, or made of the number of rows by its value."""
        numbers = numbers_of(inputs, self._whole)
        return any(n in made or is_made_of_count(abs(n), self._tower_rows) for n in numbers)

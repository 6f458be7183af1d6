"""Counts: the numbers of a program that are the number of its rows, or made of it."""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from multitower.checks.changing import Changing
from multitower.checks.reading import operations
from multitower.checks.reading.flow import Flow

_NOTHING = Changing()
# Smaller limits keep a quotient finite, and larger ones a number.
_EPSILON, _HUGE = 0.01, 1e4


def is_mean(
    name: str,
    inputs: Sequence[Flow],
    numbers: Sequence[float],
    num_rows: int,
    tower_rows: int = 0,
    *,
    made: Changing = _NOTHING,
) -> bool:
    """Whether an operation makes a mean of sums over rows, or of other means.

    Args:
        name: the operation.
        inputs: what is known of its inputs.
        numbers: the numbers among these; see `numbers_of`.
        num_rows: the number of rows.
        tower_rows: that of the whole tower, if `num_rows` are part of it; else 0.
        made: the constants that are made of the number of rows.
    """
    tower_rows = tower_rows or num_rows
    linear = [flow.is_mean for flow in inputs if flow.word == "linear"]
    if linear and all(linear):
        return True
    unknown = [flow for flow in inputs if flow.value is None]  # constants are looked at below
    if name not in operations.LINEAR_TOGETHER and any(flow.counted for flow in unknown):
        return True
    if name == "div":
        return inputs[1].is_share or any(
            divides(num_rows, number) or number in made.multiples for number in numbers
        )
    if name in ("mul", "dot_general", "scatter-add"):
        return any(
            divides(num_rows, 1 / n) or _is_quotient(n, tower_rows) or n in made.shares
            for n in numbers
        )
    return False


def is_of_all(name: str, inputs: Sequence[Flow]) -> bool:
    """Whether an operation keeps a sum over the rows of all towers: it makes a float of it."""
    return name == "convert_element_type" and inputs[0].of_all


def is_share(name: str, inputs: Sequence[Flow], num_towers: int) -> bool:
    """Whether an operation makes the mean over towers of a sum over rows, or keeps it.

    Args:
        name: the operation; its inputs are free of rows.
        inputs: what is known of its inputs.
        num_towers: the number of towers, 0 where they do not meet.
    """
    if name == "div" and inputs[0].of_all:
        return inputs[1].value == num_towers
    unknown = [flow.is_share for flow in inputs if flow.value is None]
    return name in operations.KEEP_THE_SIZE and bool(unknown) and all(unknown)


def counts_rows(number: float, num_rows: int) -> bool:
    """Whether a number is `N * rows`, `1 / (N * rows)` or `N / rows` for a whole number N."""
    if _is_whole(number / num_rows) or _is_whole(1 / number / num_rows):
        return True
    return _is_whole(number * num_rows) and not _is_whole(number)


def is_made_of_count(number: float, num_rows: int) -> bool:
    """Whether a number, or its reciprocal, is the root or a logarithm of `rows`, or beside it."""
    roots = math.sqrt(num_rows), math.log(num_rows), math.log2(num_rows), math.log10(num_rows)
    made = *roots, num_rows - 1, num_rows + 1
    return any(abs(n - m) < 1e-6 * m for n in (number, 1 / number) for m in made)


def is_steady(
    name: str,
    inputs: Sequence[Flow],
    num_rows: int,
    num_towers: int,
    made: Changing = _NOTHING,
) -> bool:
    """Whether an operation on what is free of rows makes a number that is the same in every tower.

    It is not one if it was multiplied by the number of rows, or by their share `rows / N` of a data
    set of N rows; nor if it was divided by the number of towers.

    Args:
        name: the operation; no axis of its inputs and results is an axis of rows.
        inputs: what is known of its inputs.
        num_rows: the number of rows.
        num_towers: the number of towers.
        made: the constants that are made of the number of rows.
    """
    if not any(flow.is_steady for flow in inputs):
        return False
    if name not in ("mul", "div"):
        return True
    if any(flow.counted for flow in inputs) or (name == "mul" and any(map(is_zero, inputs))):
        return False
    signed, by_rows = numbers_of(inputs), made.multiples if name == "mul" else made.shares
    if not by_rows.isdisjoint(signed):
        return False
    numbers = [abs(number) for number in signed]
    shares = [1 / n if name == "div" and inputs[1].value is not None else n for n in numbers]
    for share in shares:
        is_made = _is_round(share * num_towers) or _is_near_whole(num_rows / share)
        if is_made and not _is_round(share):
            return False
    return not any(counts_rows(times * n, num_rows) for n in numbers for times in (1, 2))


def per_row(
    name: str,
    inputs: Sequence[Flow],
    num_rows: int,
    tower_rows: int = 0,
    made: Changing = _NOTHING,
) -> bool:
    """Whether an operation multiplies what is free of rows by their number, or keeps such a thing.

    Args:
        name: the operation.
        inputs: what is known of its inputs.
        num_rows: the number of rows.
        tower_rows: as for `is_mean`.
        made: the constants that are made of the number of rows.
    """
    before = [flow.per_row for flow in inputs if flow.value is None]
    numbers = numbers_of(inputs)
    by_rows = name == "mul" and any(
        divides(num_rows, abs(number)) or number in made.multiples for number in numbers
    )
    if name == "div" and inputs[1].value is not None:  # by N / rows, for N rows of a data set
        by_rows = any(
            _is_quotient(number, tower_rows or num_rows) or number in made.shares
            for number in numbers
        )
    if by_rows:
        return not any(before)
    if name == "div":
        by, made_of = inputs[1], frozenset[float]().union(*made)
        counts = lambda n: counts_rows(n, num_rows) or is_made_of_count(n, num_rows)
        is_plain = by.is_steady if by.value is None else np.ndim(by.value) == 0
        is_plain &= not any(number in made_of or counts(abs(number)) for number in numbers)
        return inputs[0].per_row and is_plain
    if name == "mul":
        return before.count(True) == 1
    keeps = name in operations.KEEP_THE_SIZE or name in ("neg", "reduce_sum")
    return keeps and bool(before) and all(before)


def beside(name: str, inputs: Sequence[Flow], num_rows: int) -> bool:
    """Whether an operation adds a steady number to a sum over rows, or a mean over rows.

    Of constants only whole numbers count that are less than the number of rows, such as the 1 that
    keeps a quotient from 0 / 0: others may be made of that number, as n * log(2 * pi) is. To put a
    number beside the sum, as `jnp.stack` does, counts too.
    """
    words = [flow.word for flow in inputs]
    if name in operations.STACKS:
        has_sum = any(flow.is_sum for flow in inputs)
        return has_sum and any(flow.is_steady and not _is_zeros(flow) for flow in inputs)
    if name not in ("add", "add_any", "sub"):
        return False
    if words == ["linear", "linear"]:
        return inputs[0].is_mean != inputs[1].is_mean
    if sorted(words) != ["free", "linear"]:
        return False
    number, total = inputs[words.index("free")], inputs[words.index("linear")]
    is_small = any(abs(n) < num_rows and n == round(n) for n in numbers_of([number]))
    return (number.is_steady or is_small) and not total.is_mean


def loses_count(equation: Any, name: str, inputs: Sequence[Flow]) -> bool:
    """Whether a number of rows in its inputs is not in its result.

    `sign(x / n)` is `sign(x)`, and a gradient of a mean is often divided by its own norm.
    """
    pairs = zip(equation.invars, inputs, strict=True)
    counted = [atom for atom, flow in pairs if flow.counted and flow.value is None]
    both = len(counted) == 2 and counted[0] is not counted[1]
    return name == "sign" or (name in ("mul", "div") and both)


def warps(name: str, inputs: Sequence[Flow]) -> bool:
    """Whether a factor that was in the inputs cannot be taken out of the result again.

    To be above or below a number is such a thing, unless the number only keeps others finite.
    """
    limits = [abs(n) for n in numbers_of(inputs)] if name in ("max", "min", "clamp") else []
    return name in operations.WARPS or any(_EPSILON < n < _HUGE for n in limits)


def is_squared(equation: Any, name: str, inputs: Sequence[Flow], num_rows: int) -> bool:
    """Whether an operation squares what was divided by the number of rows, or keeps such a square.

    A root takes the square back, and so does a product with the number of rows.
    """
    if (is_square(equation, inputs) or name == "dot_general") and all(
        flow.counted for flow in inputs
    ):
        return True
    undoes = name in ("sqrt", "rsqrt", "pow") or multiplies(name, inputs, num_rows)
    return not undoes and any(flow.squared for flow in inputs)


def is_square(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether an operation squares its input."""
    name = equation.primitive.name
    if name == "mul":
        return equation.invars[0] is equation.invars[1]
    if name == "pow":
        return np.ndim(inputs[1].value) == 0 and bool(inputs[1].value == 2)
    return name == "square" or (name == "integer_pow" and equation.params["y"] == 2)


def root_of(equation: Any, inputs: Sequence[Flow]) -> Flow | None:
    """The sum over rows that a result is the root of, as a norm is; None if it is no such root."""
    name = equation.primitive.name
    if name == "sqrt" and inputs[0].word == "linear":
        return inputs[0]
    if name not in operations.SAME_NUMBERS or inputs[0].root_of is None:
        return None
    (given,), (made,) = equation.invars, equation.outvars
    is_float = jnp.issubdtype(made.aval.dtype, jnp.inexact)
    return inputs[0].root_of if is_float and made.aval.size == given.aval.size else None


def multiplies(name: str, inputs: Sequence[Flow], num_rows: int) -> bool:
    """Whether an operation is a product with the number of rows, or with a multiple of it."""
    return name == "mul" and any(divides(num_rows, abs(n)) for n in numbers_of(inputs))


def asks_whether_finite(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether an operation compares a value with itself, as `jnp.isnan` does, or with infinity.

    Or whether it joins the answers, such as those of all rows.
    """
    name = equation.primitive.name
    if name in operations.JOINS_ANSWERS:
        return all(flow.asks for flow in inputs)
    if name not in ("eq", "ne"):
        return name == "is_finite"
    left, right = equation.invars
    values = [flow.value for flow in inputs if flow.value is not None and np.ndim(flow.value) == 0]
    return left is right or not np.isfinite(values).all()


def is_zero(flow: Flow) -> bool:
    """Whether it is the number 0; not an array of zeros, which parameters may be."""
    return np.ndim(flow.value) == 0 and bool(flow.value == 0)


def _is_zeros(flow: Flow) -> bool:
    """Whether it is known to be zeros, which add nothing."""
    return flow.value is not None and not np.any(flow.value)


def _is_round(number: float) -> bool:
    """Whether a float32 number is one of few digits, as people write numbers."""
    return abs(float(f"{number:.3g}") - number) < 1e-6 * number


def _is_near_whole(times: float) -> bool:
    """Whether a float32 number may be 1, 2, 3 ...; of large numbers nobody can tell."""
    is_number = math.isfinite(times)
    return is_number and round(times) >= 1 and abs(times - round(times)) < 3e-7 * times


def _is_quotient(number: float, num_rows: int) -> bool:
    """Whether a number is N / rows, for a data set of N rows."""
    times = abs(number) * num_rows
    if not math.isfinite(times):
        return False
    is_whole = abs(times - round(times)) < 1e-6 * times and round(times) >= 1
    return is_whole and abs(number - round(number)) > 1e-6


def numbers_of(inputs: Sequence[Flow], whole: int = 0) -> list[float]:
    """The scalar constants among an equation's inputs that are finite, real and not zero.

    Args:
        inputs: what is known of the inputs.
        whole: the number of rows of all towers, where it is no multiple of a tower's by chance; its
            own multiples, and what it divides, count no rows of a tower. 0 if it is not known.
    """
    values = [flow.value for flow in inputs if np.ndim(flow.value) == 0 and flow.value]
    real = [float(np.real(value)) for value in values if not np.imag(value)]
    finite = [number for number in real if math.isfinite(number)]
    if not whole:
        return finite
    times = [(abs(number) / whole, 1 / abs(number) / whole) for number in finite]
    return [n for n, both in zip(finite, times, strict=True) if not any(map(_is_whole, both))]


def _is_whole(times: float) -> bool:
    """Whether a float32 number is 1, 2, 3 ...; False above 1e5, where too many are whole."""
    return 0.5 < times < 1e5 and abs(times - round(times)) < 3e-7 * times


def divides(rows: int, number: float, *, exact: bool = False) -> bool:
    """Whether a float32 number is `rows` or, if not `exact`, a multiple of it."""
    times = number / rows
    if not 0.5 < times < 1e5:  # above, too many numbers are near a multiple
        return False
    return abs(times - (1 if exact else round(times))) < min(1e-5 * times, 0.01)

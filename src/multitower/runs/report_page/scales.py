"""Axes: where a value lies, and which round numbers are written beside it."""

import math
from typing import NamedTuple

_TICKS = 5
# From this ratio of the largest to the smallest loss on, a linear axis shows a line at the bottom.
_LARGE_RATIO = 20
_FACTORS = (1, 2, 5)
# Below, powers of ten are no longer exact, and then zero.
_SMALLEST = 1e-300


class Scale(NamedTuple):
    """An axis.

    Attributes:
        low: the value at its beginning.
        high: the value at its end.
        ticks: value and label of each mark.
        logarithmic: whether equal distances are equal ratios.
    """

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    logarithmic: bool = False

    def place(self, value: float) -> float:
        """Where a value lies, from 0 at the beginning to 1 at the end."""
        low, high = self.low, self.high
        if self.logarithmic:
            low, high, value = math.log(low), math.log(high), math.log(value)
        return (value - low) / (high - low)


def linear(low: float, high: float, *, percent: bool = False) -> Scale:
    """An axis from a round number at or below `low` to one at or above `high`.

    Args:
        low: the smallest value.
        high: the largest value. If it is the smallest, too, the axis goes from zero to it.
        percent: whether labels are percentages of 1.

    Returns:
        The axis.

    Example:
        >>> from multitower.runs.report_page.scales import linear
        >>> [label for _, label in linear(0.17, 0.98, percent=True).ticks]
        ['0 %', '20 %', '40 %', '60 %', '80 %', '100 %']
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    step = _round_step((high - low) / _TICKS)
    marks = range(math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9) + 1)
    unit, sign = (100, " %") if percent else (1, "")
    ticks = tuple((i * step, _label(i * step * unit, step * unit) + sign) for i in marks)
    return Scale(ticks[0][0], ticks[-1][0], ticks)


def logarithmic(low: float, high: float) -> Scale:
    """An axis on which equal distances are equal ratios.

    Args:
        low: the smallest value, above 0.
        high: the largest value, several times as large.

    Returns:
        The axis.

    Example:
        >>> from multitower.runs.report_page.scales import logarithmic
        >>> [label for _, label in logarithmic(0.03, 2.4).ticks]
        ['0.02', '0.05', '0.1', '0.2', '0.5', '1', '2', '5']
    """
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    every = math.ceil((last - first) / 6)
    factors = _FACTORS if last - first <= 3 else (1,)
    marks = [f * 10.0**e for e in range(first, last + every, every) for f in factors]
    begin = max(mark for mark in marks if mark <= low)
    end = min(mark for mark in marks if mark >= high)
    ticks = tuple((mark, _label(mark, mark)) for mark in marks if begin <= mark <= end)
    return Scale(begin, end, ticks, logarithmic=True)


def for_metric(metric: str, low: float, high: float, *, percent: bool = False) -> Scale:
    """The axis of a metric: logarithmic for a loss that falls far, linear for everything else.

    The axis of a speed begins at zero, so that a small change looks small.

    Example:
        >>> from multitower.runs.report_page.scales import for_metric
        >>> for_metric("loss", 0.01, 2).logarithmic, for_metric("loss", 1, 2).logarithmic
        (True, False)
    """
    if "loss" in metric and low > _SMALLEST and high / low >= _LARGE_RATIO:
        return logarithmic(low, high)
    return linear(min(low, 0) if metric == "examples_per_s" else low, high, percent=percent)


def for_steps(last: int) -> Scale:
    """The axis of steps, from 0 to the last one, which need not be round.

    Example:
        >>> from multitower.runs.report_page.scales import for_steps
        >>> [label for _, label in for_steps(23_450).ticks]
        ['0', '5k', '10k', '15k', '20k']
    """
    last = max(last, 1)
    step = max(1, round(_round_step(last / _TICKS)))
    return Scale(0, last, tuple((mark, _label(mark, step)) for mark in range(0, last + 1, step)))


def _round_step(least: float) -> float:
    """The smallest of 1, 2 or 5 times a power of ten that is not below `least`."""
    power = 10.0 ** math.floor(math.log10(max(least, _SMALLEST)))
    return next(f * power for f in (*_FACTORS, 10) if f * power >= least * (1 - 1e-9))


def _label(value: float, step: float) -> str:
    """A mark, with as many digits as tell it from its neighbours."""
    if value == 0:
        return "0"
    sizes = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
    size, letter = next((one for one in sizes if one[0] <= step), sizes[-1])
    decimals = max(0, -math.floor(math.log10(step / size) + 1e-9))
    if decimals > 4:
        return f"{value:.2g}"
    return f"{value / size:,.{decimals}f}{letter}"

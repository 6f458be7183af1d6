"""Axes: their range, and the round numbers written beside them."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.ticker import EngFormatter, LogLocator, MaxNLocator

_TICKS = 5
# From this ratio of the largest to the smallest loss, a linear axis would show a flat line.
_LARGE_RATIO = 20
# Up to this ratio a logarithmic axis has marks between its powers of ten.
_SMALL_RATIO = 1e3


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


def linear(low: float, high: float, *, percent: bool = False, whole: bool = False) -> Scale:
    """An axis from a round number at or below `low` to one at or above `high`.

    Args:
        low: the smallest value.
        high: the largest value. If it is the smallest, too, the axis goes from zero to it.
        percent: whether labels are percentages of 1.
        whole: whether all marks are whole numbers.

    Returns:
        The axis.

    Example:
        >>> from multitower.runs.report_page.scales import linear
        >>> [label for _, label in linear(0.17, 0.98, percent=True).ticks]
        ['0 %', '20 %', '40 %', '60 %', '80 %', '100 %']
    """
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        low, high = min(low, 0.0), max(high, 0.0) or float(low == 0)
    locator = MaxNLocator(_TICKS, steps=[1, 2, 5], integer=whole)
    marks = [float(mark) for mark in locator.tick_values(low, high)]
    labels = [f"{100 * mark:.4g} %" for mark in marks] if percent else _labels(marks)
    return Scale(marks[0], marks[-1], tuple(zip(marks, labels, strict=True)))


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
    parts = (1, 2, 5) if high / low <= _SMALL_RATIO else (1,)
    with np.errstate(over="ignore"):  # marks far beyond the ends overflow
        found = LogLocator(subs=parts, numticks=7).tick_values(low, high)
    marks = [float(mark) for mark in found if 0 < mark < np.inf]
    low = max((mark for mark in marks if mark <= low), default=low)
    high = min((mark for mark in marks if mark >= high), default=high)
    shown = [mark for mark in marks if low <= mark <= high]
    return Scale(low, high, tuple((mark, f"{mark:,.10g}") for mark in shown), logarithmic=True)


def for_metric(metric: str, low: float, high: float, *, percent: bool = False) -> Scale:
    """The axis of a metric: logarithmic for a loss that falls far, linear for everything else.

    The axis of a speed begins at zero, so that a small change looks small; so does that of
    staleness, which is a number of updates.

    Example:
        >>> from multitower.runs.report_page.scales import for_metric
        >>> for_metric("loss", 0.01, 2).logarithmic, for_metric("loss", 1, 2).logarithmic
        (True, False)
    """
    if "loss" in metric and low > 0 and high / low >= _LARGE_RATIO:
        return logarithmic(low, high)
    if metric == "staleness":
        return linear(0, max(high, 1), whole=True)
    return linear(min(low, 0) if metric == "examples_per_s" else low, high, percent=percent)


def for_steps(last: int) -> Scale:
    """The axis of steps, from 0 to the last one, which need not be round.

    Example:
        >>> from multitower.runs.report_page.scales import for_steps
        >>> [label for _, label in for_steps(23_450).ticks]
        ['0', '5k', '10k', '15k', '20k']
    """
    last = max(last, 1)
    found = MaxNLocator(_TICKS, steps=[1, 2, 5], integer=True).tick_values(0, last)
    marks = [float(mark) for mark in found if mark <= last]
    return Scale(0, last, tuple(zip(marks, _labels(marks), strict=True)))


def _labels(marks: Sequence[float]) -> list[str]:
    """Short labels for large numbers that are far enough apart to stay different."""
    if 1e4 <= abs(marks[-1]) < 1e15 and marks[-1] - marks[-2] >= 1e-3 * abs(marks[-1]):
        return list(map(EngFormatter(sep="").format_eng, marks))
    return [f"{mark:,.10g}" for mark in marks]

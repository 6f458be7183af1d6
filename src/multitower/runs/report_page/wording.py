"""Numbers, names and values as text for readers."""

import json
import math
from collections.abc import Sequence
from typing import Any

ABSENT = "\N{EN DASH}"


def number(value: float | None) -> str:
    """A number with four significant digits; whole numbers keep all digits.

    Args:
        value: None for a number that is missing, or that was not finite (null in JSON).

    Returns:
        The text; a dash for None.

    Example:
        >>> from multitower.runs.report_page.wording import number
        >>> number(0.0447434), number(2152.309), number(20_000), number(1.5e-7)
        ('0.04474', '2,152', '20,000', '1.5e-07')
    """
    if value is None or not math.isfinite(value):
        return ABSENT
    if isinstance(value, int) or 1000 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def percent(share: float | None) -> str:
    """A share of 1 as a percentage.

    Example:
        >>> from multitower.runs.report_page.wording import percent
        >>> percent(0.98886), percent(1.0)
        ('98.89 %', '100 %')
    """
    if share is None or not math.isfinite(share):
        return ABSENT
    return f"{f'{100 * share:.2f}'.removesuffix('.00')} %"


def is_share(name: str) -> bool:
    """Whether a metric of this name is read as a percentage."""
    return "accuracy" in name


def score(name: str, value: float | None) -> str:
    """The value of a metric, by its name.

    Example:
        >>> from multitower.runs.report_page.wording import score
        >>> score("test_accuracy", 0.5), score("test_loss", 0.5)
        ('50 %', '0.5')
    """
    return percent(value) if is_share(name) else number(value)


def duration(seconds: float | None) -> str:
    """Seconds in the two units that matter.

    Example:
        >>> from multitower.runs.report_page.wording import duration
        >>> duration(19.389), duration(200), duration(7500)
        ('19.4 s', '3 min 20 s', '2 h 05 min')
    """
    if seconds is None or not math.isfinite(seconds):
        return ABSENT
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def name(identifier: str) -> str:
    """An identifier as words.

    Example:
        >>> from multitower.runs.report_page.wording import name
        >>> name("test_accuracy"), name("examples_per_s"), name("cpu_cores")
        ('test accuracy', 'examples per second', 'CPU cores')
    """
    words = identifier.replace("_per_s", " per second").replace("_", " ")
    return words.replace("cpu ", "CPU ")


def setting(value: Any) -> str:
    """The value of a setting: words as they are, everything else as in JSON.

    Example:
        >>> from multitower.runs.report_page.wording import setting
        >>> setting("adam"), setting(True), setting([1, 2])
        ('adam', 'true', '[1, 2]')
    """
    return value if isinstance(value, str) else json.dumps(value, default=str)


def counted(count: int, noun: str) -> str:
    """A number with its noun.

    Example:
        >>> from multitower.runs.report_page.wording import counted
        >>> counted(1, "step"), counted(2000, "step")
        ('1 step', '2,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def ends(numbers: Sequence[int], most: int = 64) -> Sequence[int | str]:
    """The numbers; if there are more than `most`, only the first and the last.

    Example:
        >>> from multitower.runs.report_page.wording import ends
        >>> list(ends(range(3))), ends(range(99))
        ([0, 1, 2], [0, '…', 98])
    """
    return numbers if len(numbers) <= most else [numbers[0], "\N{HORIZONTAL ELLIPSIS}", numbers[-1]]

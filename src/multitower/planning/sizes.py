"""Sizes: amounts of memory as text, and text as numbers of bytes."""

import math
import re
from typing import Any

from multitower.errors import ArgumentError
from multitower.towers.refusals import is_number

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}ib": 1024**n for n, letter in enumerate("kmgt", start=1)},
    **{f"{letter}b": 1000**n for n, letter in enumerate("kmgt", start=1)},
}


def memory_in_bytes(memory: Any) -> int:
    """The number of bytes of an amount such as 24e9, "24GB" or "24 GiB".

    Raises:
        ArgumentError: it cannot be read as an amount of memory.
    """
    if is_number(memory):
        amount = memory if memory % 1 == 0 else 0  # 1.5: of GiB, not of bytes
    else:
        text = memory if isinstance(memory, str) else ""
        found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
        amount = float(found[1]) * _UNITS.get(found[2].lower(), 0) if found else 0
    if not 1 <= amount < math.inf:
        raise ArgumentError(
            f"memory={memory!r} is not an amount of memory. Write a number of bytes, or a number "
            "and a unit: KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (of 1000), such as "
            "24GiB."
        )
    return int(amount)


def in_words(num_bytes: int) -> str:
    """Bytes as text with three digits and a unit, such as "1.5 GiB"."""
    value, units = float(num_bytes), ["TiB", "GiB", "MiB", "KiB", "B"]
    while value >= 999.5 and len(units) > 1:  # three digits round it up to 1000
        value /= 1024
        units.pop()
    return f"{num_bytes} B" if len(units) == 5 else f"{value:.3g} {units[-1]}"

"""Sizes: bytes in words, and words in bytes."""

import re
from typing import Any

from multitower.errors import ArgumentError

_UNITS = {"": 1, "B": 1}
_UNITS |= {f"{letter}iB": 1024**n for n, letter in enumerate("KMGT", start=1)}
_UNITS |= {f"{letter}B": 1000**n for n, letter in enumerate("KMGT", start=1)}


def memory_in_bytes(memory: Any) -> int:
    """Bytes of an amount such as 24000000000, "24GB" or "24 GiB".

    Raises:
        ArgumentError: it is none.
    """
    units = {name.lower(): factor for name, factor in _UNITS.items()}
    if isinstance(memory, int) and not isinstance(memory, bool) and memory > 0:
        return memory
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", str(memory))
    if not isinstance(memory, str) or not found or found[2].lower() not in units:
        raise ArgumentError(
            f"memory={memory!r} is no amount of memory. Write a number of bytes, or a number and a "
            "unit: KiB, MiB, GiB, TiB (powers of 1024) or KB, MB, GB, TB (of 1000), such as 24GiB."
        )
    return int(float(found[1]) * units[found[2].lower()])


def in_words(num_bytes: int) -> str:
    """Bytes with three digits and a unit."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1000:
            break
        value /= 1024
    else:
        unit = "TiB"
    return f"{num_bytes} B" if unit == "B" else f"{value:.3g} {unit}"

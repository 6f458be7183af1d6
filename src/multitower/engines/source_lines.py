"""The line of the user's program that an equation of a traced program came from."""

import linecache
import os
from pathlib import Path
from typing import Any

from multitower.errors import JAX, LIBRARIES

_OWN = str(Path(__file__).parents[1]) + os.sep  # the whole package


def line_of(equation: Any) -> str | None:
    """The line of the user's program that an equation came from, with its text.

    Args:
        equation: an equation of a jaxpr.

    Returns:
        Such as `model.py:30: y = x - x.mean(0)`; None if its traceback has only lines of libraries.
    """
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        file, line = frame.file_name, getattr(frame, "line_num", 0)
        if not _is_ours(file):
            text = linecache.getline(file, line).strip()
            return f"{file.rpartition('/')[2]}:{line}" + (f": {text}" if text else "")
    return None


def _is_ours(file: str) -> bool:
    """Whether a file belongs to JAX, to this library or to another one, and not to the user."""
    return file.startswith((_OWN, JAX, "<frozen")) or any(place in file for place in LIBRARIES)

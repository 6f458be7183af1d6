"""Equations: what can be read off one equation of a jaxpr: its line, its numbers, its program."""

import linecache
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.extend import core

_OWN = str(Path(__file__).parent)


def line_of(equation: Any) -> str | None:
    """The line of the user's program that an equation came from, with its text.

    Args:
        equation: of a jaxpr.

    Returns:
        Such as `model.py:30: y = x - x.mean(0)`; None if it is all JAX's or other libraries' own.
    """
    traceback = getattr(equation.source_info, "traceback", None)
    for frame in getattr(traceback, "frames", ()):
        file, line = frame.file_name, getattr(frame, "line_num", 0)
        if not _is_ours(file):
            text = linecache.getline(file, line).strip()
            return f"{file.rpartition('/')[2]}:{line}" + (f": {text}" if text else "")
    return None


def _is_ours(file: str) -> bool:
    """Whether a file belongs to JAX, to this library or to another one, not to the user."""
    return "/site-packages/" in file or file.startswith((_OWN, "<frozen"))


def literals(equation: Any) -> list[float]:
    """The numbers that stand in an equation, without zero."""
    values = [atom.val for atom in equation.invars if isinstance(atom, core.Literal)]
    return [float(value) for value in values if np.ndim(value) == 0 and value]


def num_same(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """How many values have as many axes outside of a loop as inside."""
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def program_inside(params: Mapping[str, Any], num_inputs: int) -> Any:
    """The program inside a call such as jit, checkpoint or a custom derivative."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        program: Any = params.get(name)
        inner: Any = getattr(program, "jaxpr", program)
        if hasattr(inner, "invars") and len(inner.invars) == num_inputs:
            return program
    return None

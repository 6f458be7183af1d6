"""Changing numbers: which constants of a program are made of its number of rows.

`0.99 ** len(x)` is one constant in a program for 211 rows and another in one for 223. A single
program does not show where its numbers come from, so two are compared.
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.extend import core

from multitower.checks.equations import programs_in

# Numbers of few digits that are small, such as 0.5 and 1e-5, are in most programs as they are.
_DIGITS = 2
_SMALL = 3


class Changing(NamedTuple):
    """Constants of a program that would be others with another number of rows.

    Attributes:
        multiples: those in proportion to the number of rows, such as `len(x) / 1000`.
        shares: those in proportion to one by that number, such as `1000 / len(x)`.
        others: all others, such as `0.99 ** len(x)`.
    """

    multiples: frozenset[float] = frozenset()
    shares: frozenset[float] = frozenset()
    others: frozenset[float] = frozenset()


def changing(
    program: Any,
    num_rows: int,
    other_rows: int,
    with_other_rows: Callable[[], Any],
    with_other_towers: Callable[[], Any],
) -> Changing:
    """The constants of a program that change with its number of rows, and with nothing else.

    A counter changes whenever the function is called. `len(x) * jax.lax.axis_size("towers")` is the
    number of rows of the batch, and changes with the number of towers, too.

    Args:
        program: a closed jaxpr, traced with `num_rows` rows.
        num_rows: its number of rows.
        other_rows: another one.
        with_other_rows: traces the program with that one. It is called only if there are constants
            to compare, besides the number of rows itself: a large model takes seconds.
        with_other_towers: traces the program once more, with another number of towers.

    Returns:
        The constants; none if these programs do not have the same operations, or if the function
        takes no other number of rows.
    """
    numbers = [*_numbers(program)]
    if all(_is_plain(number) or abs(number) in (num_rows, 1 / num_rows) for _, number in numbers):
        return Changing()
    try:
        others = [*_numbers(with_other_rows())]
        again = numbers if others == numbers else [*_numbers(with_other_towers())]
    except Exception:  # of the user's function: it may need a fixed number of rows
        return Changing()
    names, *more = ([name for name, _ in found] for found in (numbers, others, again))
    if any(found != names for found in more):
        return Changing()
    sorts: tuple[set[float], ...] = set(), set(), set()
    factors = other_rows / num_rows, num_rows / other_rows
    for (_, one), (_, two), same in zip(numbers, others, again, strict=True):
        if one != two and one == same[1]:
            are_near = [abs(two - one * factor) < 1e-6 * abs(two) for factor in factors]
            sorts[[*are_near, True].index(True)].add(one)
    return Changing(*map(frozenset, sorts))


def _numbers(program: Any) -> Iterator[tuple[str, float]]:
    """The operations of a program and those inside them, each once for every constant float."""
    jaxpr = getattr(program, "jaxpr", program)
    yield from (("", float(value)) for value in getattr(program, "consts", ()) if _is_float(value))
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        yield name, 0.0
        for atom in equation.invars:
            if isinstance(atom, core.Literal) and _is_float(atom.val):
                yield name, float(atom.val)
        for inner in programs_in(equation.params):
            yield from _numbers(inner)


def _is_float(value: Any) -> bool:
    is_scalar = isinstance(value, float | np.generic | np.ndarray) and np.ndim(value) == 0
    if not is_scalar or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return False
    return bool(np.isfinite(value))


def _is_plain(number: float) -> bool:
    rounded = float(f"{number:.{_DIGITS}g}")
    return abs(number) < _SMALL and abs(rounded - number) <= 1e-7 * abs(number)

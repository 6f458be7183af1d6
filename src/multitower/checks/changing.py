"""Changing numbers: which constants of a program are made of its number of rows.

`0.99 ** len(x)` is one constant in a program for 211 rows and another in one for 223. A single
program does not show where its numbers come from, so it is compared with others.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from multitower.checks.equations import (
    LOOPS,
    computed,
    follow,
    program_inside,
    programs_in,
    small_constant,
)

# Numbers of few digits that are small, such as 0.5 and 1e-5, are in most programs as they are.
_DIGITS = 2
_SMALL = 3


class Changing(NamedTuple):
    """Constants of a program that would be others with another number of rows.

    What the program computes of constants alone counts as one: `jnp.sqrt(x.size)` is an operation.

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
    pairs: Sequence[tuple[int, int]],
    with_rows: Callable[[int], Any],
    with_other_towers: Callable[[], Any],
) -> Changing:
    """The constants of a program that change with its number of rows, and with nothing else.

    A counter changes whenever the function is called. `len(x) * jax.lax.axis_size("towers")` is the
    number of rows of the batch, and changes with the number of towers, too.

    Args:
        program: a closed jaxpr, traced with `num_rows` rows.
        num_rows: its number of rows.
        pairs: two numbers of rows each, between which constants change or not; a pair counts if the
            function has the same operations with it as the program has, and the first one that does
            is looked at alone. `min(len(x), 32)` changes between 16 and 64, and not above 32.
        with_rows: traces the program with another number of rows. It is called only if there are
            constants to compare, besides multiples of the number of rows itself, which most
            programs have: a large model takes seconds.
        with_other_towers: traces the program once more, with another number of towers.

    Returns:
        The constants; none if no pair counts.
    """
    numbers = _numbers(program)
    names, here = [name for name, _ in numbers], [number for _, number in numbers]
    is_own = [number % num_rows == 0 or abs(number) == 1 / num_rows for number in here]
    if all(own or _is_plain(number) for number, own in zip(here, is_own, strict=True)):
        return Changing()

    def like(other: Any) -> list[float] | None:
        """Another program's numbers, those of rows left out; None if its operations differ."""
        found = _numbers(other)
        if [name for name, _ in found] != names:
            return None
        each = zip(here, found, is_own, strict=True)
        return [number if own else other for number, (_, other), own in each]

    at = lambda rows: here if rows == num_rows else like(with_rows(rows))
    for few, many in pairs:
        try:
            ones = at(few)
            if ones == here and few != num_rows:
                return Changing()
            twos = at(many)
            again = here if ones == twos else like(with_other_towers())
        except Exception:  # of the user's function: it may need a fixed number of rows
            continue
        if ones is not None and twos is not None and again is not None:
            changes = [x for *x, same in zip(here, ones, twos, again, strict=True) if x[0] == same]
            return _sorted(changes, many / few)
    return Changing()


def _sorted(changes: Iterable[Sequence[float]], factor: float) -> Changing:
    """Sorts constants by how they change.

    Args:
        changes: a constant; what it is with few and with many rows.
        factor: how many times more rows these are.
    """
    sorts: tuple[set[float], ...] = set(), set(), set()
    for here, one, two in changes:
        if one != two:
            are_near = [abs(two - one * by) < 1e-6 * abs(two) for by in (factor, 1 / factor)]
            sorts[[*are_near, True].index(True)].add(here)
    return Changing(*map(frozenset, sorts))


def _numbers(program: Any) -> list[tuple[str, float]]:
    """The operations of a program and those inside them, and the floats among their constants.

    A float that an operation computes of constants comes with the operation's name.
    """
    found: list[tuple[str, float]] = []

    def constant(value: Any, _: Any) -> Any:
        if _is_float(value):
            found.append(("", float(value)))
        return small_constant(value)

    def results(equation: Any, given: list[Any]) -> Sequence[Any]:
        name, params = equation.primitive.name, equation.params
        found.append((name, 0.0))
        inside = program_inside(params, len(given))
        if inside is not None and name not in LOOPS:
            return follow(inside, given, constant, results)
        for inner in programs_in(params):
            arguments = getattr(inner, "jaxpr", inner).invars
            follow(inner, [None] * len(arguments), constant, results)
        value = computed(equation, given)
        if _is_float(value):
            found.append((name, float(value)))
        return [value] * len(equation.outvars)

    follow(program, [None] * len(program.jaxpr.invars), constant, results)
    return found


def _is_float(value: Any) -> bool:
    is_scalar = isinstance(value, float | np.generic | np.ndarray) and np.ndim(value) == 0
    if not is_scalar or not jnp.issubdtype(jnp.result_type(value), jnp.floating):
        return False
    return bool(np.isfinite(value))


def _is_plain(number: float) -> bool:
    rounded = float(f"{number:.{_DIGITS}g}")
    return abs(number) < _SMALL and abs(rounded - number) <= 1e-7 * abs(number)

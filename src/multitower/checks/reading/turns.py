"""What one turn of a loop does with each of the values that the loop carries."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from multitower.checks.equations import follow, program_inside
from multitower.checks.reading import operations

# What a turn of a loop does with a value that it hands on to the next one.
Turn = Literal["counts", "adds", "writes"]
_DOES: Mapping[str, Sequence[Turn]] = {
    **dict.fromkeys(operations.SAME, ()),
    **dict.fromkeys(("add", "add_any"), ("adds",)),
    **dict.fromkeys(("scatter", "dynamic_update_slice"), ("writes",)),
}


def sums_up(program: Any, num_shared: int, num_carried: int) -> list[bool]:
    """For each value that a scan carries, whether a turn only adds to it.

    Args:
        program: the body, a closed jaxpr.
        num_shared: the number of its arguments that are the same in every turn.
        num_carried: the number of those that are carried, which come next.
    """
    return [what == "adds" for what in does_in_a_turn(program, num_shared, num_carried)]


def does_in_a_turn(
    program: Any, num_shared: int, num_carried: int, counts: Sequence[bool] = ()
) -> list[Turn | None]:
    """For each value that a scan carries, what a turn does with it, and nothing else.

    Args:
        program: as for `sums_up`.
        num_shared: as for `sums_up`.
        num_carried: as for `sums_up`.
        counts: for each value whether it is the number of the turn, which may be used everywhere.
    """
    jaxpr = getattr(program, "jaxpr", program)
    num_rest = len(jaxpr.invars) - num_shared - num_carried
    counts = counts or [False] * num_carried
    carried = [_Sum() if is_turn else _Sum(frozenset([n]), n) for n, is_turn in enumerate(counts)]
    given = [*[_Sum()] * num_shared, *carried, *[_Sum()] * num_rest]
    outputs = follow(program, given, lambda *_: _Sum(), _added)
    used = frozenset[int]().union(*(found.uses for found in outputs[num_carried:]))

    def turn(number: int) -> Turn | None:
        one = outputs[number]
        if counts[number]:
            return "counts"
        if one.of != number or number in used or len(one.does) > 1:
            return None
        return "writes" if "writes" in one.does else "adds"

    return [turn(number) for number in range(num_carried)]


def changes(program: Any, num_shared: int, num_carried: int) -> list[bool]:
    """For each value that a scan carries, whether it is another one in every turn, `scale * 0.9`.

    A key may change, since numbers are drawn from it; and a sum that nothing in the loop looks at.

    Args:
        program: as for `sums_up`.
        num_shared: as for `sums_up`.
        num_carried: as for `sums_up`.
    """
    jaxpr = getattr(program, "jaxpr", program)
    made_by = {atom: equation for equation in jaxpr.eqns for atom in equation.outvars}
    carried = jaxpr.invars[num_shared : num_shared + num_carried]
    does = does_in_a_turn(program, num_shared, num_carried)
    return [
        what is None and not _may_be_key(before.aval) and _unchanged(after, made_by) is not before
        for before, after, what in zip(carried, jaxpr.outvars, does, strict=False)
    ]


def _may_be_key(aval: Any) -> bool:
    """Whether it may be a key, one of `jax.random.PRNGKey`, or the number of draws so far."""
    return aval.dtype == jnp.uint32 or jnp.issubdtype(aval.dtype, jax.dtypes.prng_key)


class _Sum(NamedTuple):
    """Which carried values a value in a loop depends on, and what it only does to which one."""

    uses: frozenset[int] = frozenset()
    of: int | None = None
    does: frozenset[Turn] = frozenset()


def _added(equation: Any, given: list[_Sum]) -> list[_Sum]:
    name, inside = equation.primitive.name, program_inside(equation.params, len(given))
    if inside is not None and name not in operations.RUN_PROGRAMS:  # jax.checkpoint, jax.jit
        return follow(inside, given, lambda *_: _Sum(), _added)
    uses = frozenset[int]().union(*(one.uses for one in given))
    depend = [one for one in given if one.uses]
    does = _DOES.get(name)
    if does is not None and len(depend) == 1 and ("writes" not in does or given[0].uses):
        return [depend[0]._replace(does=depend[0].does.union(does))]
    return [_Sum(uses)] * len(equation.outvars)


def frozen_by_row(program: Any) -> list[bool]:
    """For each value that a loop carries, whether rows that are done stay unchanged.

    `jax.vmap` writes loops in this way: `select(is_done, new, old)` for every value with rows.

    Args:
        program: the body, a closed jaxpr.
    """
    jaxpr = getattr(program, "jaxpr", program)
    made_by = {atom: equation for equation in jaxpr.eqns for atom in equation.outvars}
    return [_selects(atom, made_by) for atom in jaxpr.outvars]


def _selects(atom: Any, made_by: Mapping[Any, Any]) -> bool:
    equation = _made(atom, made_by)
    if equation is None:
        return True  # carried unchanged
    if equation.primitive.name == "select_n":
        return bool(getattr(equation.invars[0].aval, "shape", ()))
    inside = program_inside(equation.params, len(equation.invars))
    if inside is None:
        return False
    place = list(equation.outvars).index(_unchanged(atom, made_by))
    return frozen_by_row(inside)[place]


def _made(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    """The equation that made a value, without those that do not change it; or None."""
    found = _unchanged(atom, made_by)
    return None if isinstance(found, core.Literal) else made_by.get(found)


def _unchanged(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    while not isinstance(atom, core.Literal):
        equation = made_by.get(atom)
        if equation is None or equation.primitive.name not in operations.SAME:
            break
        atom = equation.invars[0]
    return atom

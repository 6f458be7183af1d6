"""Loops of a program: which of the values that they carry only add up, or stay as they are."""

from collections.abc import Mapping
from typing import Any

from jax.extend import core

from multitower.checks.equations import program_inside

# What leaves a value what it is.
_SAME = ("convert_element_type", "copy", "stop_gradient", "reshape", "squeeze")


def sums_up(program: Any, num_shared: int, num_carried: int) -> list[bool]:
    """For each value that a scan carries, whether a turn only adds to it.

    Args:
        program: the body, a closed jaxpr.
        num_shared: its arguments that are the same in every turn.
        num_carried: those that are carried.
    """
    jaxpr = getattr(program, "jaxpr", program)
    carried = jaxpr.invars[num_shared : num_shared + num_carried]
    made_by = {atom: equation for equation in jaxpr.eqns for atom in equation.outvars}

    def adds(number: int) -> bool:
        own, new = carried[number], jaxpr.outvars[number]
        if new is own:
            return True
        equation = _made(new, made_by)
        if equation is None or equation.primitive.name not in ("add", "add_any"):
            return False
        parts = [_unchanged(atom, made_by) for atom in equation.invars]
        others = [atom for atom in parts if atom is not own]
        return len(others) == 1 and not _roots(others[0], made_by, set(carried))

    stacked = jaxpr.outvars[num_carried:]
    used = set[Any]().union(*(_roots(atom, made_by, set(carried)) for atom in stacked))
    return [adds(number) and carried[number] not in used for number in range(num_carried)]


def frozen_by_row(program: Any) -> list[bool]:
    """For each value that a loop carries, whether rows that are done are left alone.

    So `jax.vmap` writes a loop: `select(is_done, new, old)` for every value with rows.

    Args:
        program: the body, a closed jaxpr.
    """
    jaxpr = getattr(program, "jaxpr", program)
    made_by = {atom: equation for equation in jaxpr.eqns for atom in equation.outvars}
    return [_selects(atom, made_by) for atom in jaxpr.outvars]


def _selects(atom: Any, made_by: Mapping[Any, Any]) -> bool:
    equation = _made(atom, made_by)
    if equation is None:
        return True  # carried on as it is
    if equation.primitive.name == "select_n":
        return bool(getattr(equation.invars[0].aval, "shape", ()))
    inside = program_inside(equation.params, len(equation.invars))
    if inside is None:
        return False
    place = list(equation.outvars).index(atom)
    return frozen_by_row(inside)[place]


def _made(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    """The equation that made a value, without those that change nothing."""
    found = _unchanged(atom, made_by)
    return None if isinstance(found, core.Literal) else made_by.get(found)


def _unchanged(atom: Any, made_by: Mapping[Any, Any]) -> Any:
    while not isinstance(atom, core.Literal):
        equation = made_by.get(atom)
        if equation is None or equation.primitive.name not in _SAME:
            break
        atom = equation.invars[0]
    return atom


def _roots(atom: Any, made_by: Mapping[Any, Any], wanted: set[Any]) -> set[Any]:
    """Which of the wanted values a value depends on."""
    found: set[Any] = set()
    seen: set[Any] = set()
    waiting = [atom]
    while waiting:
        one = waiting.pop()
        if isinstance(one, core.Literal) or one in seen:
            continue
        seen.add(one)
        if one in wanted:
            found.add(one)
        equation = made_by.get(one)
        waiting.extend(equation.invars if equation is not None else ())
    return found

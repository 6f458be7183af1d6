"""Copies: which outputs of a program are its arguments, or other values of it, unchanged."""

from collections.abc import Mapping
from typing import Any

from multitower.checks.equations import program_inside
from multitower.engines.segments import num_same
from multitower.engines.source_lines import line_of

# Calls that change nothing; each result is the input with the same number.
_SAME = ("copy", "copy_p", "name", "optimization_barrier")


class Sources:
    """Finds what values of programs are copies of; every program is looked through once."""

    def __init__(self) -> None:
        self._made_by: dict[Any, dict[Any, tuple[Any, int]]] = {}  # by the program
        self._arguments: dict[Any, dict[Any, int]] = {}

    def of(self, jaxpr: Any, atom: Any) -> Any:
        """The value that a value of a program is a copy of, through calls, loops and branches.

        Args:
            jaxpr: an open jaxpr.
            atom: a variable or constant of it.

        Returns:
            An argument, a constant or the result of an equation that computes something.
        """
        if jaxpr not in self._made_by:
            self._made_by[jaxpr] = {
                out: (equation, number)
                for equation in jaxpr.eqns
                for number, out in enumerate(equation.outvars)
            }
        made_by = self._made_by[jaxpr]
        while not hasattr(atom, "val") and atom in made_by:  # constants are not hashable
            equation, number = made_by[atom]
            same = self._input_of(equation, number)
            if same is None:
                return atom
            atom = equation.invars[same]
        return atom

    def _input_of(self, equation: Any, number: int) -> int | None:
        """The input that a result of an equation is a copy of, by its number, or None."""
        name, params, num_inputs = equation.primitive.name, equation.params, len(equation.invars)
        if name in _SAME:
            return number
        if name == "scan":
            inner = getattr(params["jaxpr"], "jaxpr", params["jaxpr"])
            # Counted by axes, as where rows are followed through loops.
            num_carried = num_same(equation.outvars, inner.outvars)
            num_shared = num_same(equation.invars, inner.invars) - num_carried
            found = self._argument_of(params["jaxpr"], number)
            if number < num_carried:
                return found if found == num_shared + number else None
            return found if found is not None and found >= num_shared + num_carried else None
        if name == "while":
            before = params["cond_nconsts"]
            found = self._argument_of(params["body_jaxpr"], number)
            return before + found if found == params["body_nconsts"] + number else None
        if name == "cond":
            ways = {self._argument_of(branch, number) for branch in params["branches"]}
            found = ways.pop()
            return None if ways or found is None else 1 + found
        inside = program_inside(params, num_inputs)
        return None if inside is None else self._argument_of(inside, number)

    def _argument_of(self, program: Any, number: int) -> int | None:
        """The argument that an output of a program is a copy of, by its number."""
        jaxpr = getattr(program, "jaxpr", program)
        if jaxpr not in self._arguments:
            self._arguments[jaxpr] = {one: n for n, one in enumerate(jaxpr.invars)}
        source = self.of(jaxpr, jaxpr.outvars[number])
        return None if hasattr(source, "val") else self._arguments[jaxpr].get(source)


def writes_in(program: Any, written: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    """The parameters that a program writes other values into, and the lines that compute these.

    Args:
        program: a closed jaxpr, from `jax.make_jaxpr`; its last outputs are the leaves of
            `written`.
        written: for each parameter what it was and what it is then.
    """
    names = sorted(written)  # the order of the leaves of a dict
    jaxpr = program.jaxpr
    outputs = jaxpr.outvars[len(jaxpr.outvars) - 2 * len(names) :]
    sources = Sources()
    found: list[tuple[str, str | None]] = []
    for name, old, new in zip(names, outputs[::2], outputs[1::2], strict=True):
        source = sources.of(jaxpr, new)
        if source is not sources.of(jaxpr, old):
            lines = (line_of(one) for one in jaxpr.eqns if source in one.outvars)
            found.append((name, next(lines, None)))
    return found

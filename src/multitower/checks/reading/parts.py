"""Parts: results that treat the chunks of a batch in different ways.

`s = z.reshape(2, -1)` has two halves of the rows. `f(s[0]) + f(s[1])` is a sum over all rows, in
two pieces. `f(s[0]) + g(s[1])` is none: which rows `f` gets depends on how many there are.
"""

import math
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

from jax.extend import core

from multitower.checks.equations import computed, follow, program_inside, small_constant
from multitower.checks.reading import operations
from multitower.checks.reading.chunks import axis_cut, moved, pairing
from multitower.checks.reading.flow import place_of
from multitower.engines.source_lines import line_of
from multitower.towers.leaves import is_key


class _Term(NamedTuple):
    """A term of a sum: the number of its chunk, what was made of this, and how often it counts."""

    chunk: int
    made: int
    factor: float = 1.0


_Terms = tuple[_Term, ...]

# Factors that differ by less, in proportion, were rounded.
_SMALL = 1e-4
# Of a sum over several chunks these make one.
_EACH = operations.LINEAR_ALONE - {"fft", "cumsum", "reduce_window_sum"}


class _Part(NamedTuple):
    """What is known of a value.

    Attributes:
        made: how it was made; the same for two values that are made alike of two chunks.
        axis: the axis of the chunks, if it has all of them.
        terms: its terms, if it is made of chunks, one by one; empty also if that is not known.
        place: where the chunks came together, or else where the chunk was taken.
        is_drawn: whether it is a key or made of one: chunks may draw what they want.
        value: its value, if it is a constant.
    """

    made: int
    axis: int | None = None
    terms: _Terms = ()
    place: str = ""
    is_drawn: bool = False
    value: Any = None

    @property
    def chunks(self) -> set[int]:
        """The chunks that it is made of."""
        return {term.chunk for term in self.terms}


def unlike_parts(program: Any, tower_rows: int) -> list[str | None]:
    """Where a program's results treat chunks of the rows in different ways, or have one alone.

    Args:
        program: a closed jaxpr.
        tower_rows: the size of an axis of all rows of the tower, a multiple of the chunks' number.

    Returns:
        For each output the place; None if it treats them alike, or that is not known.
    """
    if not _has_chunks(program, tower_rows):
        return [None] * len(program.jaxpr.outvars)
    reader = _Reader(tower_rows)
    inputs = [_Part(reader.number("argument", n)) for n in range(len(program.jaxpr.invars))]
    return [None if _are_alike(part.terms) else part.place for part in reader.call(program, inputs)]


def _has_chunks(program: Any, tower_rows: int) -> bool:
    return any(
        (one.primitive.name == "reshape" and axis_cut(one, tower_rows) is not None)
        or any(_has_chunks(inner, tower_rows) for inner in core.jaxprs_in_params(one.params))
        for one in getattr(program, "jaxpr", program).eqns
    )


def _are_alike(terms: _Terms) -> bool:
    """Whether the sum treats all chunks alike; true also if it has none."""
    if not terms:
        return True
    sums: dict[int, dict[int, float]] = {term.chunk: {} for term in terms}
    for chunk, made, factor in terms:
        sums[chunk][made] = sums[chunk].get(made, 0.0) + factor
    first, *others = ({made: n for made, n in one.items() if n} for one in sums.values())
    are_near = lambda one, made: math.isclose(one[made], first[made], rel_tol=_SMALL)
    return (len(others) > 0 or not first) and all(
        one.keys() == first.keys() and all(are_near(one, made) for made in first) for one in others
    )


class _Reader:
    def __init__(self, tower_rows: int) -> None:
        self._tower_rows = tower_rows
        self._numbers: dict[Hashable, int] = {}
        self._calls: list[Any] = []

    def call(self, program: Any, inputs: Sequence[_Part]) -> list[_Part]:
        return follow(program, inputs, self._constant, self._equation)

    def number(self, *what: Hashable) -> int:
        return self._numbers.setdefault(what, len(self._numbers))

    def _constant(self, value: Any, _: Any) -> _Part:
        small = small_constant(value)
        if small is None:
            return _Part(self.number("constant", id(value)), is_drawn=is_key(value))
        return _Part(self.number(small.tobytes(), small.shape, str(small.dtype)), value=small)

    def _equation(self, equation: Any, given: list[_Part]) -> list[_Part]:
        inside = program_inside(equation.params, len(given))
        if inside is not None and equation.primitive.name not in ("scan", "while", "cond"):
            self._calls.append(equation)
            found = self.call(inside, given)
            self._calls.pop()
            return found
        return [self._result(equation, given, n) for n in range(len(equation.outvars))]

    def _result(self, equation: Any, given: list[_Part], number: int) -> _Part:
        name = equation.primitive.name
        taken = self._taken(equation, given, number)
        if taken is not None:
            return taken
        if name == "reshape" and not given[0].terms and given[0].axis is None:
            axis = axis_cut(equation, self._tower_rows)
        else:
            moves = [
                moved(equation, n, one.axis) for n, one in enumerate(given) if one.axis is not None
            ]
            axis = next((one for one in moves if one is not None), None)
        is_drawn = name in operations.DRAWS or any(one.is_drawn for one in given)
        has_chunk = any(one.terms or one.axis is not None for one in given)
        if is_drawn and not has_chunk:
            made = self.number("drawn", str(equation.outvars[number].aval))
        else:
            made = self._made(equation, given, number)
        terms, place = self._terms(equation, given, made)
        value = computed(equation, [one.value for one in given])
        return _Part(made, axis, terms, place, is_drawn, value)

    def _made(self, equation: Any, given: list[_Part], number: int) -> int:
        before = (one.made for one in given)
        return self.number(equation.primitive.name, str(equation.params), number, *before)

    def _taken(self, equation: Any, given: list[_Part], number: int) -> _Part | None:
        """One chunk of an array of all of them; None if the operation takes none."""
        name, params = equation.primitive.name, equation.params
        axis = given[0].axis if given else None
        if axis is None:
            return None
        shape, whole = (one.aval.shape for one in (equation.outvars[0], equation.invars[0]))
        chunk = None
        if name == "slice" and shape[axis] == 1:
            chunk = params["start_indices"][axis]
        elif len(equation.outvars) == whole[axis] and params.get("axis") == axis:  # z1, z2 = z
            chunk = number
        if chunk is None:
            return None
        made = self.number("chunk", given[0].made, shape)
        terms = (_Term(chunk, made),)
        return _Part(made, None, terms, self._where(equation), given[0].is_drawn)

    def _terms(self, equation: Any, given: list[_Part], made: int) -> tuple[_Terms, str]:
        """The terms of a result, and their place."""
        name, with_terms = equation.primitive.name, [one for one in given if one.terms]
        place = next((one.place for one in with_terms), "")
        if name in operations.LINEAR_TOGETHER - {"select_n"}:
            terms = tuple(
                term._replace(factor=-term.factor) if name == "sub" and number else term
                for number, part in enumerate(given)
                for term in part.terms
            )
            chunks = {term.chunk for term in terms}
            meet_now = len(chunks) > 1 and all(len(one.chunks) < 2 for one in given)
            return terms, self._where(equation) if meet_now else place
        if len(with_terms) != 1:
            chunks = {chunk for one in with_terms for chunk in one.chunks}
            return tuple(_Term(chunk, made) for chunk in chunks if len(chunks) == 1), place
        (part,) = with_terms
        factor = _factor(equation, given, part)
        if factor is not None:
            return tuple(one._replace(factor=factor * one.factor) for one in part.terms), place
        if name not in _EACH and name != "mul" and not (name == "div" and given[0] is part):
            is_one = len(part.chunks) == 1
            return ((_Term(part.terms[0].chunk, made),), place) if is_one else ((), "")

        def of(term: _Term) -> _Term:
            of_term = [one._replace(made=term.made) if one is part else one for one in given]
            return term._replace(made=self._made(equation, of_term, 0))

        return tuple(map(of, part.terms)), place

    def _where(self, equation: Any) -> str:
        lines = (line_of(one) for one in [*self._calls, equation])
        line = next((line for line in lines if line), None)
        return pairing(place_of(equation.primitive.name, line))


def _factor(equation: Any, given: list[_Part], part: _Part) -> float | None:
    """By what a known number an operation multiplies one of its inputs; None if it does not."""
    name = equation.primitive.name
    if name == "neg":
        return -1.0
    if name not in ("mul", "div") or (name == "div" and given[0] is not part):
        return None
    other = given[1] if given[0] is part else given[0]
    if other.value is None or other.value.ndim or not other.value:
        return None
    return float(other.value) if name == "mul" else 1 / float(other.value)

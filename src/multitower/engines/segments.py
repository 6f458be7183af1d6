"""Segments: one traced program as several, cut between its equations.

The caller decides what happens between two segments: a move to another device, or an exchange with
other towers. Values have numbers, by which later segments find them.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from jax.extend import core

from multitower.engines.source_lines import line_of
from multitower.errors import ArgumentError

# Calls that only give a name to a program, and the parameter that has the program.
_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr"}


class Step(NamedTuple):
    """One equation on numbered values.

    Attributes:
        equation: an equation of a jaxpr.
        inputs: the number of each of its inputs, or a literal.
        outputs: the number of each of its results.
    """

    equation: Any
    inputs: list[Any]
    outputs: list[int]


class Program(NamedTuple):
    """A traced program as a list of steps.

    Attributes:
        inputs: the numbers of its arguments.
        consts: the values of numbers that are neither arguments nor results of steps.
        steps: in an order in which they can be taken.
        outputs: for each of its results a number, or a literal.
    """

    inputs: list[int]
    consts: dict[int, Any]
    steps: list[Step]
    outputs: list[Any]


@dataclass(frozen=True)
class Segment:
    """Some steps as a function of arrays.

    Attributes:
        steps: what it computes.
        inputs: numbers of what it needs from before, in ascending order.
        outputs: numbers of what is needed after it, in ascending order. In a slice: what was asked
            for, in that order, with literals.
        consts: the values of constants, by number.
    """

    steps: tuple[Step, ...]
    inputs: tuple[int, ...]
    outputs: tuple[Any, ...]
    consts: Mapping[int, Any]

    def __call__(self, values: Sequence[Any]) -> list[Any]:
        """The values of `outputs`, from those of `inputs`; traceable and differentiable."""
        known = {**self.consts, **dict(zip(self.inputs, values, strict=True))}
        ends = (*self.inputs, *self.outputs)
        for step in self.steps:
            _refuse_refs_among(ends, step)
            results = compute(step.equation, values_of(step.inputs, known))
            known.update(zip(step.outputs, results, strict=True))
        return values_of(self.outputs, known)


def numbers_in(values: Iterable[Any]) -> list[int]:
    """The numbers among a step's inputs or a program's outputs; the others are literals."""
    return [x for x in values if isinstance(x, int)]


def slice_of(program: Program, wanted: Sequence[Any]) -> Segment:
    """The steps that some values of a program need, as a function.

    Args:
        program: the program.
        wanted: the numbers of the values, or literals.
    """
    needed = set(numbers_in(wanted))
    steps: list[Step] = []
    for step in reversed(program.steps):
        if needed.intersection(step.outputs):
            _refuse_refs_among(step.inputs, step)
            steps.append(step)
            needed.update(numbers_in(step.inputs))
    consts = {number: program.consts[number] for number in sorted(needed & program.consts.keys())}
    inputs = tuple(x for x in program.inputs if x in needed)
    return Segment(tuple(steps[::-1]), inputs, tuple(wanted), consts)


def values_of(inputs: Sequence[Any], known: Mapping[int, Any]) -> list[Any]:
    """The values of a step's inputs, from the values that are known so far."""
    return [known[x] if isinstance(x, int) else x.val for x in inputs]


def compute(equation: Any, given: Sequence[Any]) -> Sequence[Any]:
    """The results of an equation for these values; traceable and differentiable."""
    params = equation.primitive.get_bind_params(equation.params)
    with equation.ctx.manager:
        found = equation.primitive.bind(*given, **params)
    return found if equation.primitive.multiple_results else [found]


def num_same(outer: Sequence[Any], inner: Sequence[Any]) -> int:
    """How many values have as many axes outside of a loop as inside: these are not scanned over."""
    pairs = zip(outer, inner, strict=True)
    return sum(len(a.aval.shape) == len(b.aval.shape) for a, b in pairs)


def read_program(
    closed: Any,
    is_mark: Callable[[Any], bool],
    refuse: Callable[[Any, Any], Exception],
    *,
    rules: Mapping[str, str] = MappingProxyType({}),
) -> Program:
    """Reads a closed jaxpr, and opens every call that has a mark in it, however deep.

    Args:
        closed: a closed jaxpr, from `jax.make_jaxpr`.
        is_mark: whether an equation is a mark, where the program may have to be cut.
        refuse: what to raise for an equation with a mark inside that cannot be opened (a loop, a
            branch, a rule of differentiation), given that equation and the mark.
        rules: calls with a rule of differentiation that may be opened, because the program is not
            differentiated any more: the call's name to the parameter that has its program.

    Returns:
        The program; calls without a mark are one step each.
    """
    calls = {**_CALLS, **rules}

    def opens(equation: Any) -> bool:
        mark = next(_marks(equation, is_mark), None)
        if mark is None or mark is equation:
            return False
        if equation.primitive.name not in calls:
            raise refuse(equation, mark)
        return True

    return open_calls(closed, opens, calls)


def is_call(equation: Any) -> bool:
    """Whether an equation only gives a name to a program inside of it."""
    return equation.primitive.name in _CALLS


def constants_in(program: Any) -> Iterator[Any]:
    """The constants of a program, closed or not, and of all that it calls by name."""
    yield from _consts(program)
    for equation in getattr(program, "jaxpr", program).eqns:
        yield from constants_of_call(equation)


def constants_of_call(equation: Any) -> Iterator[Any]:
    """The constants of the program that an equation calls by name; none for other equations."""
    if is_call(equation):
        yield from constants_in(equation.params[_CALLS[equation.primitive.name]])


def open_calls(
    closed: Any, opens: Callable[[Any], bool], calls: Mapping[str, str] = _CALLS
) -> Program:
    """Reads a closed jaxpr, with the steps of some calls in place of these.

    Args:
        closed: a closed jaxpr, from `jax.make_jaxpr`.
        opens: whether to open an equation; true only if it is a call.
        calls: for each kind of call, by name, the parameter that has its program.
    """
    consts: dict[int, Any] = {}
    steps: list[Step] = []
    count = iter(range(10**9))

    def descend(program: Any, given: Sequence[Any], values: Iterable[Any]) -> list[Any]:
        names = dict(zip(program.invars, given, strict=True))
        for var, value in zip(program.constvars, values, strict=True):
            names[var] = next(count)
            consts[names[var]] = value

        def named(atom: Any) -> Any:
            return atom if isinstance(atom, core.Literal) else names[atom]

        for equation in program.eqns:
            inputs = [named(atom) for atom in equation.invars]
            if opens(equation):
                inner = equation.params[calls[equation.primitive.name]]
                results: list[Any] = descend(getattr(inner, "jaxpr", inner), inputs, _consts(inner))
            else:
                results = [next(count) for _ in equation.outvars]
                steps.append(Step(equation, inputs, results))
            names.update(zip(equation.outvars, results, strict=True))
        return [named(atom) for atom in program.outvars]

    inputs = [next(count) for _ in closed.jaxpr.invars]
    outputs = descend(closed.jaxpr, inputs, closed.consts)
    return Program(inputs, consts, steps, outputs)


def needs_of(program: Program) -> dict[int, frozenset[int]]:
    """For each number, the numbers of the program's inputs that it depends on."""
    needs = {number: frozenset({number}) for number in program.inputs}
    needs.update((number, frozenset()) for number in program.consts)
    for step in program.steps:
        found = frozenset[int]().union(*(needs[x] for x in numbers_in(step.inputs)))
        needs.update((number, found) for number in step.outputs)
    return needs


def without_dead_steps(program: Program) -> Program:
    """The program without steps that nothing needs and that have no effects."""
    needed = set(numbers_in(program.outputs))
    steps: list[Step] = []
    for step in reversed(program.steps):
        # JAX counts it as an "effect" that a collective names an axis. It has no consequence.
        effects = [x for x in step.equation.effects if "NamedAxis" not in type(x).__name__]
        if effects or not needed.isdisjoint(step.outputs):
            steps.append(step)
            needed.update(numbers_in(step.inputs))
    return program._replace(steps=steps[::-1])


def cut(program: Program, places: Sequence[int], num_segments: int) -> list[Segment]:
    """Cuts a program into segments.

    Args:
        program: what to cut.
        places: for each of its steps the number of its segment, or -1 for a step that the caller
            takes between two segments.
        num_segments: the number of segments.

    Returns:
        The segments. What the caller takes between them, and the program's results, are outputs of
        the segments that compute them.
    """
    made_in: dict[int, int] = {}
    needed = set(numbers_in(program.outputs))
    for step, place in zip(program.steps, places, strict=True):
        made_in.update(dict.fromkeys(step.outputs, place))
        inputs = numbers_in(step.inputs)
        needed.update(x for x in inputs if place < 0 or made_in.get(x) != place)
    return [
        _segment(
            program, [s for s, at in zip(program.steps, places, strict=True) if at == n], needed
        )
        for n in range(num_segments)
    ]


def _segment(program: Program, steps: list[Step], needed: set[int]) -> Segment:
    made = {number for step in steps for number in step.outputs}
    used = {x for step in steps for x in numbers_in(step.inputs)} - made
    consts = {number: program.consts[number] for number in sorted(used & program.consts.keys())}
    inputs = sorted(used - consts.keys())
    return Segment(tuple(steps), tuple(inputs), tuple(sorted(made & needed)), consts)


def is_ref(atom: Any) -> bool:
    """Whether an input or a result of an equation is a reference, as `jax.new_ref` makes it."""
    return type(atom.aval).__name__ == "AbstractRef"


def _refuse_refs_among(numbers: Sequence[Any], step: Step) -> None:
    """Refuses a step that makes, reads or writes a `jax.new_ref` which other parts use, too.

    Raises:
        ArgumentError: one of these numbers is such a reference.
    """
    of_step, equation = [*step.inputs, *step.outputs], step.equation
    for number, atom in zip(of_step, [*equation.invars, *equation.outvars], strict=True):
        if is_ref(atom) and number in numbers:
            line = line_of(equation)
            raise ArgumentError(
                f"a jax.new_ref is used{f' at {line}' if line else ''}, and this program is cut "
                "into parts (for stages=, where towers exchange values, or where devices make "
                "their parts of the parameters): what one part writes would be lost to the others. "
                "Write with arrays: x = x.at[i].set(value)."
            )


def _marks(equation: Any, is_mark: Callable[[Any], bool]) -> Iterator[Any]:
    """The marks among an equation and the equations of the programs inside of it."""
    if is_mark(equation):
        yield equation
    for inner in core.jaxprs_in_params(equation.params):
        for one in inner.eqns:
            yield from _marks(one, is_mark)


def _consts(inner: Any) -> Sequence[Any]:
    return getattr(inner, "consts", ())  # those of a jaxpr that is not closed are its arguments

"""Rounds: a tower's program as single-device programs, between which the towers meet.

A value's round is the number of exchanges that it depends on, one after another. All exchanges at
the end of a round happen together: sums along the fixed tree, and values of all towers on a new
axis. So a second collective in a round adds no round, and an exchange computes only additions.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.engines.collectives import (
    check,
    is_axis_index,
    is_collective,
    is_sum,
    needs_axis,
    received,
    refuse_inside,
    sent,
)
from multitower.engines.packing import Packed, pack, unpack
from multitower.engines.segments import (
    Program,
    Segment,
    Step,
    cut,
    numbers_in,
    read_program,
    without_dead_steps,
)
from multitower.engines.totals import with_one_nan

# Calls with a derivative rule that may be opened once the program is not differentiated any more.
FORWARD_RULES = {"custom_jvp_call": "call_jaxpr", "custom_vjp_call": "call_jaxpr"}


class Sent(NamedTuple):
    """What a tower sends at the end of a round; or what arrives from all towers.

    Attributes:
        sums: values to add up over towers.
        every: values to put side by side: each of shape (1, ...) when it is sent, and of shape
            (towers, 1, ...) when it arrives.
    """

    sums: Packed
    every: list[Any]


class Round(NamedTuple):
    """One round of a tower: a function of arrays for one device.

    Attributes:
        arrivals: the collectives whose exchanges come before it.
        segment: what it computes.
        departures: the collectives whose exchanges follow it.
        inputs: numbers of values of earlier rounds that it needs.
        outputs: numbers of its own values that later rounds need.
        program: the program that all of these belong to.
    """

    arrivals: list[Step]
    segment: Segment
    departures: list[Step]
    inputs: list[int]
    outputs: list[int]
    program: Program

    def __call__(
        self, values: Sequence[Any], arrived: Sent, number: jax.Array
    ) -> tuple[list[Any], Sent]:
        """The values of `outputs`, and what is sent, from the values of `inputs`."""
        known: dict[int, Any] = {
            **self.program.consts,
            **dict(zip(self.inputs, values, strict=True)),
        }
        self._receive(known, arrived, number)
        found = self.segment([known[x] for x in self.segment.inputs])
        known.update(zip(self.segment.outputs, found, strict=True))
        left = [
            (is_sum(step.equation), sent(step.equation, _value(x, known)))
            for step in self.departures
            for x in step.inputs
        ]
        sums = [value for added, value in left if added]
        every = [value for added, value in left if not added]
        return [known[x] for x in self.outputs], Sent(pack(sums), every)

    def last(self, values: Sequence[Any], arrived: Sent, number: jax.Array) -> list[Any]:
        """The results of the whole program; for its last round only."""
        results = dict(zip(self.outputs, self(values, arrived, number)[0], strict=True))
        known = {**self.program.consts, **dict(zip(self.inputs, values, strict=True)), **results}
        return [_value(x, known) for x in self.program.outputs]

    def _receive(self, known: dict[int, Any], arrived: Sent, number: jax.Array) -> None:
        sums, every = iter(jax.tree.map(with_one_nan, unpack(arrived.sums))), iter(arrived.every)
        for step in self.arrivals:
            values = sums if is_sum(step.equation) else every
            for output in step.outputs:
                known[output] = received(step.equation, next(values), number)


class Rounds(NamedTuple):
    """A tower's program.

    Attributes:
        rounds: the rounds, in order.
        inputs: the numbers of its arguments.
        number: the position of the tower's own number among its arguments.
        treedef: the structure of what it returns.
    """

    rounds: list[Round]
    inputs: list[int]
    number: int
    treedef: Any


def cut_into_rounds(program: Any, number: int, treedef: Any, *, final: bool) -> Rounds | None:
    """Cuts a tower's program at its collectives.

    Args:
        program: a closed jaxpr, traced where the axis exists.
        number: the position of the tower's own number among its arguments.
        treedef: the structure of what it returns.
        final: whether the program is not differentiated any more.

    Returns:
        Its rounds; None if it has no collectives, and does not ask for the tower's number either.

    Raises:
        OutputError: a collective that towers do not have, or one where towers cannot meet.
    """
    read = read_program(program, needs_axis, refuse_inside, rules=FORWARD_RULES if final else {})
    if not any(needs_axis(step.equation) for step in read.steps):
        return None
    for step in read.steps:
        if is_collective(step.equation):
            check(step.equation)
    read = without_dead_steps(_with_number(read, read.inputs[number]))
    places, rounds_of = _places(read)
    num_rounds = 1 + max([0, *places, *(after for _, after in rounds_of)])
    return Rounds(_rounds(read, places, rounds_of, num_rounds), read.inputs, number, treedef)


def _with_number(program: Program, number: int) -> Program:
    """The program with the tower's number in place of every `jax.lax.axis_index`."""
    same = {s.outputs[0]: number for s in program.steps if is_axis_index(s.equation)}
    named = lambda x: same.get(x, x) if isinstance(x, int) else x
    steps = [
        step._replace(inputs=[named(x) for x in step.inputs])
        for step in program.steps
        if not is_axis_index(step.equation)
    ]
    return program._replace(steps=steps, outputs=[named(x) for x in program.outputs])


def _places(program: Program) -> tuple[list[int], list[tuple[Step, int]]]:
    """The round of each step, -1 for a collective; and each collective with the round after it."""
    round_of: dict[int, int] = {}
    places: list[int] = []
    collectives: list[tuple[Step, int]] = []
    for step in program.steps:
        place = max((round_of.get(x, 0) for x in numbers_in(step.inputs)), default=0)
        meets = is_collective(step.equation)
        places.append(-1 if meets else place)
        if meets:
            place += 1
            collectives.append((step, place))
        round_of.update(dict.fromkeys(step.outputs, place))
    return places, collectives


def _rounds(
    program: Program, places: list[int], collectives: list[tuple[Step, int]], num_rounds: int
) -> list[Round]:
    found: list[Round] = []
    needed = set(numbers_in(program.outputs))
    for n, segment in reversed(list(enumerate(cut(program, places, num_rounds)))):
        arrivals = [step for step, after in collectives if after == n]
        departures = [step for step, after in collectives if after == n + 1]
        own = {*segment.outputs, *(x for step in arrivals for x in step.outputs)}
        sent = (x for step in departures for x in numbers_in(step.inputs))
        used = {*segment.inputs, *sent}
        outputs = sorted(own & needed)
        if n == num_rounds - 1:
            used |= needed
        inputs = sorted(used - own - program.consts.keys())
        needed = (needed - own) | set(inputs)
        found.append(Round(arrivals, segment, departures, inputs, outputs, program))
    return found[::-1]


def _value(x: Any, known: dict[int, Any]) -> Any:
    """A known value, or a literal as an array of its type."""
    if isinstance(x, int):
        return known[x]
    return jnp.asarray(x.val, x.aval.dtype)

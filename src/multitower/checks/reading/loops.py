"""Loops and branches: what becomes of rows where a program runs other programs."""

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

from jax.extend import core

from multitower.checks.changing import Changing
from multitower.checks.reading.chunks import in_a_turn, of_all_turns, pairing
from multitower.checks.reading.counts import is_zero
from multitower.checks.reading.flow import (
    SUM_OF_CHUNKS,
    Chunks,
    Flow,
    Word,
    all_places,
    join,
    join_all,
    roots_of,
)
from multitower.checks.reading.operations import RUN_PROGRAMS
from multitower.checks.reading.turns import changes, does_in_a_turn, frozen_by_row, sums_up
from multitower.engines.segments import num_same


class Reader(Protocol):
    """Reads the rest of the program; see `row_flow`."""

    num_rows: int
    tower_rows: int
    real_rows: int
    all_rows: int
    num_towers: int
    made: Changing

    def run(self, program: Any, inputs: Sequence[Flow]) -> list[Flow]:
        """What is known of a program's outputs."""
        ...

    def where(self, equation: Any) -> str:
        """The operation and its line."""
        ...

    def row_axes(self, atom: Any) -> list[int]:
        """The axes of rows of a value."""
        ...

    def count(self) -> int:
        """The number of a sort."""
        ...


def _scan(reader: Reader, equation: Any, inputs: list[Flow]) -> list[Flow]:
    program = equation.params["jaxpr"]
    inner = getattr(program, "jaxpr", program)
    # Counted by axes, because JAX's names for these counts differ between versions: what is
    # scanned over, and what is stacked, has one axis more outside.
    num_carried = num_same(equation.outvars, inner.outvars)
    num_shared = num_same(equation.invars, inner.invars) - num_carried
    xs = equation.invars[num_shared + num_carried :]
    over_rows = any(0 in reader.row_axes(atom) for atom in xs)
    num_given = num_shared + num_carried
    is_count = _counts_rows(reader, equation, inputs, num_shared, num_carried)
    if any(is_count):
        place = reader.where(equation)
        over_rows, row_number = True, Flow(is_index=True, is_number=True, placed=place)
        carried = zip(inputs[num_shared:], is_count, strict=False)
        numbered = [row_number if counts else flow for flow, counts in carried]
        inputs = [*inputs[:num_shared], *numbered, *inputs[num_given:]]
    scanned = inputs[num_given:]
    over_chunks = any(isinstance(x.chunk, Chunks) and x.chunk.axis == 0 for x in scanned)
    inputs = [*inputs[:num_given], *map(_in_a_turn, scanned)]
    outputs = _loop(reader, program, inputs, num_shared, num_carried, is_count=is_count)
    if places := _carried_places(reader, equation, outputs, num_shared, num_carried):
        marked = [replace(x, placed=places.get(n, x.placed)) for n, x in enumerate(inputs)]
        outputs = _loop(reader, program, marked, num_shared, num_carried, is_count=is_count)
    stacked = [
        replace(x, chunk=of_all_turns(x.chunk), apart=frozenset()) for x in outputs[num_carried:]
    ]
    outputs = [*outputs[:num_carried], *stacked]
    if over_chunks:
        return _scan_chunks(reader, equation, outputs, sums_up(program, num_shared, num_carried))
    is_carried = any(flow.word != "free" for flow in outputs[:num_carried])
    if not (over_rows and is_carried):
        return outputs
    # One row after another: what is carried brings rows together, unless it only adds them up, or
    # only puts each one in its place, `out.at[i].set(row)`.
    place = reader.where(equation)
    does = does_in_a_turn(program, num_shared, num_carried, is_count)
    has_places = [bool(reader.row_axes(atom)) for atom in equation.outvars[:num_carried]]
    if all(t and (t != "writes" or has) for t, has in zip(does, has_places, strict=True)):
        totals = [
            _sum_of_turns(flow, place) if what == "adds" else flow
            for flow, what in zip(outputs, does, strict=False)
        ]
        return [*totals, *outputs[num_carried:]]
    return [
        flow
        if flow.word == "free"
        else Flow(
            _mixed(reader, atom),
            None,
            all_places([flow], [place]),
            roots_of([flow], place),
            varies=True,
            ends=frozenset([place]),
            bent=place,
        )
        for atom, flow in zip(equation.outvars, outputs, strict=True)
    ]


def _in_a_turn(flow: Flow) -> Flow:
    """What is known of what a loop takes in one turn of an array, along axis 0."""
    apart = frozenset(axis - 1 for axis in flow.apart if axis)
    return replace(flow, chunk=in_a_turn(flow.chunk), apart=apart)


def _sum_of_turns(flow: Flow, place: str) -> Flow:
    """What is known of the sum over a loop's turns; a mean if each divides by their number."""
    is_mean = flow.counted is not None
    return replace(flow, word="linear", origin=place, is_mean=is_mean, counted=None, varies=True)


def _counts_rows(
    reader: Reader, equation: Any, inputs: list[Flow], num_shared: int, num_carried: int
) -> list[bool]:
    """For each value that a loop carries, whether it is the number of a row, as in `fori_loop`."""
    if equation.params["length"] % reader.num_rows:
        return [False] * num_carried
    jaxpr = getattr(equation.params["jaxpr"], "jaxpr", equation.params["jaxpr"])
    one_more = {
        one.outvars[0]: one.invars[0]
        for one in jaxpr.eqns
        if one.primitive.name == "add" and getattr(one.invars[1], "val", None) == 1
    }
    results = [None if isinstance(atom, core.Literal) else atom for atom in jaxpr.outvars]
    carried = slice(num_shared, num_shared + num_carried)
    trios = zip(inputs[carried], jaxpr.invars[carried], results, strict=False)
    return [is_zero(flow) and one_more.get(after) is now for flow, now, after in trios]


def _carried_places(
    reader: Reader, equation: Any, outputs: list[Flow], num_shared: int, num_carried: int
) -> dict[int, str]:
    """The inputs that have another value for each row, though they have no rows: `scale * 0.9`.

    Returns:
        The loop's line, for the number of each such input.
    """
    if equation.params["length"] % reader.num_rows:
        return {}
    changing = changes(equation.params["jaxpr"], num_shared, num_carried)
    is_placed = [
        flow.word == "free" and is_new for flow, is_new in zip(outputs, changing, strict=False)
    ]
    place = reader.where(equation)
    return {num_shared + number: place for number, yes in enumerate(is_placed) if yes}


def _scan_chunks(
    reader: Reader, equation: Any, outputs: list[Flow], adds: Sequence[bool]
) -> list[Flow]:
    """What a loop over chunks of rows gives: it brings chunks together if it carries rows on.

    Args:
        reader: knows the operation's line.
        equation: the loop.
        outputs: what is known of its results, as if chunks were nothing special.
        adds: for each value that it carries, whether a turn only adds to it.
    """
    carried = zip(adds, outputs, strict=False)
    if any(flow.word == "by row" and not only_adds for only_adds, flow in carried):
        place = pairing(reader.where(equation))
        return [
            flow
            if flow.word == "free"
            else replace(flow, mixed=all_places([flow], [place]), roots=roots_of([flow], place))
            for flow in outputs
        ]
    place, carried = reader.where(equation), zip(adds, equation.outvars, strict=False)
    are_totals = [only_adds and not atom.aval.shape for only_adds, atom in carried]
    outputs = [
        _sum_of_turns(flow, place) if is_total and flow.word == "by row" else flow
        for is_total, flow in itertools.zip_longest(are_totals, outputs)
    ]
    stacked = [atom.aval.shape for atom in equation.outvars[len(adds) :]]
    is_by_row = [shape[1:] and shape[0] * shape[1] == reader.tower_rows for shape in stacked]
    of_all = [Chunks(0, 1) if is_whole else None for is_whole in is_by_row]
    return [
        replace(flow, chunk=chunk) if flow.word == "by row" else flow
        for flow, chunk in zip(outputs, [SUM_OF_CHUNKS] * len(adds) + of_all, strict=True)
    ]


def _while(reader: Reader, equation: Any, inputs: list[Flow]) -> list[Flow]:
    params = equation.params
    num_asked, num_shared = params["cond_nconsts"], params["body_nconsts"]
    rest = inputs[num_asked:]
    outputs = _loop(reader, params["body_jaxpr"], rest, num_shared, len(rest) - num_shared)
    (goes_on,) = reader.run(params["cond_jaxpr"], [*inputs[:num_asked], *outputs])
    # If there is an answer for each row, rows that are done do not change any more.
    if not goes_on.places or params["cond_jaxpr"].out_avals[0].shape:
        return outputs
    # The loop runs until all rows are done. Under vmap, rows that are done do not change any more.
    # Otherwise each row changes for as long as the slowest row of its tower needs, and so does what
    # has no rows, such as the number of turns.
    stays = frozen_by_row(params["body_jaxpr"])
    place = reader.where(equation)
    return [
        flow
        if stays[number]
        else replace(
            flow,
            word=_mixed(reader, atom),
            mixed=all_places([flow], [place]),
            roots=roots_of([flow], place),
            varies=True,
            summed=flow.a_sum,
            ends=flow.last or frozenset([place]),
            bent=place,
        )
        for number, (atom, flow) in enumerate(zip(equation.outvars, outputs, strict=True))
    ]


def _cond(reader: Reader, equation: Any, inputs: list[Flow]) -> list[Flow]:
    decision, *rest = inputs
    branches = [reader.run(branch, rest) for branch in equation.params["branches"]]
    joined = [join_all(flows) for flows in zip(*branches, strict=True)]
    if decision.word in ("free", "by row"):
        return joined
    return [
        replace(
            flow,
            word=_mixed(reader, atom),
            mixed=all_places([flow, decision], decision.places),
            roots=flow.all_roots | decision.all_roots,
            varies=True,
            summed=flow.a_sum,
            ends=flow.last | decision.last,
            bent=decision.places[0] if decision.places else flow.bent,
        )
        for atom, flow in zip(equation.outvars, joined, strict=True)
    ]


def _linear_solve(reader: Reader, equation: Any, inputs: list[Flow]) -> list[Flow]:
    """Of `jax.lax.custom_linear_solve` the program that solves, such as the loop of `cg`."""
    lengths = equation.params["const_lengths"]
    before = lengths.matvec + lengths.vecmat
    constants = inputs[before : before + lengths.solve]
    return reader.run(equation.params["jaxprs"].solve, [*constants, *inputs[sum(lengths) :]])


# By the names of JAX's operations.
INSIDE: Mapping[str, Callable[[Reader, Any, list[Flow]], list[Flow]]] = dict(
    zip(RUN_PROGRAMS, (_scan, _while, _cond, _linear_solve), strict=True)
)


def _loop(
    reader: Reader,
    program: Any,
    inputs: list[Flow],
    num_shared: int,
    num_carried: int,
    *,
    is_count: Sequence[bool] = (),
) -> list[Flow]:
    is_count = is_count or [False] * num_carried
    # What is carried or scanned over has another value in every turn.
    shared, turning = inputs[:num_shared], [replace(x, value=None) for x in inputs[num_shared:]]
    carried, rest = turning[:num_carried], turning[num_carried:]
    outputs: list[Flow] = []
    for _ in range(4):  # words only get worse, and there are four of them
        outputs = reader.run(program, [*shared, *carried, *rest])
        turns = zip(carried, outputs, is_count, strict=False)
        joined = [a if counts else join(a, b) for a, b, counts in turns]
        if joined == carried:
            break
        carried = joined
    return [*carried, *outputs[num_carried:]]


def _mixed(reader: Reader, atom: Any) -> Word:
    """The word for a value in which rows have been brought together."""
    return "by row" if reader.row_axes(atom) else "mixed"

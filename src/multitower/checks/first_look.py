"""First look: the cheap part of `check_parallel`, which every entry point runs once.

It reads the program of one tower and runs nothing. It only warns, because a program may do such
things on purpose.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from multitower.checks.changing import changing
from multitower.checks.copies import writes_in
from multitower.checks.equations import shapes_of_constants
from multitower.checks.problems import (
    COUNTED_CALLS,
    FAILED,
    NOT_READ,
    OF_NO_ROW,
    ONE_BY_ONE,
    WHOLE_BESIDE_ONE_ROW,
    Problem,
    backward,
    counting_rules,
    of_one_row,
    same_numbers,
    table,
    unread,
)
from multitower.checks.reading.chunks import axes_apart
from multitower.checks.reading.flow import Flow, operation_at, rows_of
from multitower.checks.reading.one_by_one import all_one_by_one
from multitower.checks.reading.operations import FINDS
from multitower.checks.reading.parts import unlike_parts
from multitower.checks.reading.row_flow import Reading, read, unused_size
from multitower.checks.results import STATES, Results
from multitower.checks.weights import uses_of_weights
from multitower.engines.collectives import axis_of
from multitower.errors import OutputError, listed, warn
from multitower.models.counters import counters_of
from multitower.models.writes import Writes, noting_writes
from multitower.towers.leaves import row_shapes
from multitower.towers.rows import Tower

# Unusual numbers of towers, so that an axis with the rows of all towers is known by its size.
_TOWERS = (11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67)
# Numbers of rows for a function that takes no more than its batch has.
_FEW = (
    199, 197, 193, 191, 181, 179, 173, 167, 163, 157, 151, 149, 139, 137, 131, 127, 113, 109, 107,
    103, 101, 97, 89, 83, 79, 73, 71, 67, 61, 59, 53, 47, 43, 41, 37, 31, 29, 23, 19, 17, 13, 11, 7,
    5, 3,
)  # fmt: skip
# A divisor of this is tried if a function does not work with a prime number of rows.
_GROUPS = 5040

_T = TypeVar("_T")
# What a program does with rows, and what its results show of that.
Read = tuple[Reading, Results]
_Outputs = Callable[[list[Any], Tower, Any], dict[str, Any]]


def look(
    outputs: _Outputs,
    rows: Sequence[Any],
    others: Any,
    *,
    averages: bool,
    num_devices: int,
    named: Callable[[int], tuple[str, str]],
    real_rows: int,
    has_all: bool = False,
    exchange: bool = True,
    beside_one_row: Sequence[Any] = (),
    fun: Any = None,
) -> str:
    """Warns if a function is not safe to run data parallel, as far as its program shows.

    Args:
        outputs: what one tower computes from its rows and from `others`: kinds of results ("loss",
            "aux", ...) to trees.
        rows: the arrays that are cut, or their shapes and dtypes; rows on axis 0.
        others: a pytree of everything else that the program is made of. Its values play no part,
            and its sizes are not numbers of rows.
        averages: whether results without rows are averaged over towers.
        num_devices: the number of towers, one per device, if `towers` was not given; else 0.
        named: what the user calls an array that is cut, by its number; and what to write so that
            every tower gets the whole of it.
        real_rows: the number of rows of a full tower.
        has_all: whether there is one tower on any machine, which always has all rows and no copies
            of any, so that what is done with them is right.
        exchange: whether towers may exchange values.
        beside_one_row: if a tower has one row, what is closed over with an entry for every row of
            the batch.
        fun: the user's function, to see whether it counts its calls.

    Returns:
        The names of the results in which copies of rows count, where these fill up a tower: means
        over all its rows, such as BatchNorm's. Empty if there are none.

    Raises:
        OutputError: the loss has as many entries as a tower has rows, and none of them is a row's.

    Warns:
        MultitowerWarning: rows are mixed, a sum is averaged, also in a state, a state holds rows or
            is a quotient or a decision of a tower's sums, a result or a state depends on the number
            of rows, a sum over rows and a number make an mt.ratio or are added, one is taken apart,
            towers add up a loss that is the same in all of them, all towers draw the same numbers,
            a table is cut, the number of devices decides over how many rows BatchNorm works, a
            backward rule brings rows together or counts them, a parameter of a module is written
            into, a number is kept for the next call, rows are written into a jax.new_ref, all_rows
            or row_index is called on one row, or out_axes=None takes what depends on rows from the
            first tower. Or nothing is known of the function: it takes no other number of rows than
            its own, or goes through them one by one in Python.
    """

    def problems(reading: Reading, results: Results) -> list[Problem]:
        return [
            *(table(*named(n), place) for n, place in reading.tables.items()),
            *same_numbers(reading.draws),
            *unread(reading.unread),
            *of_one_row(reading.of_one_row),
            *(backward(reading.backward) if averages else ()),
            *counting_rules(reading.counting_rules),
            *results.mixed_or_summed(averages, {*reading.tables.values()}),
            *results.kept_in_states(exchange=exchange),
            *results.written_parameters(),
            *results.of_one_tower(),
            *results.wrong_terms(),
            *results.ratios_apart(),
            *results.same_in_all(),
            *(results.statistics(num_devices)[:1] if num_devices > 1 else ()),
        ]

    def problems_of_one(reading: Reading, results: Results) -> list[Problem]:
        return [*of_one_row(reading.of_one_row), *results.written_parameters()]

    reader = functools.partial(read_tower, real_rows=real_rows)
    counters = counters_of(fun)
    first = reader(outputs, rows, others)
    now = counters_of(fun).items()
    if counted := [name for name, number in now if number != counters.get(name)]:
        warn(COUNTED_CALLS.format(names=listed(counted)))
    takes_all = first is not None and first[0].taken == {rows[0].shape[0]}
    if first is None or takes_all or first[1].has_state_by_row():
        # It has a buffer for so many rows as the batch has, or takes x[:64] of a batch of 64 rows:
        # in a tower, too, that is all rows. Or it has one for the rows of all towers together.
        num_rows = rows[0].shape[0]
        of_all = {"most": max(real_rows - 1, 1), "num_towers": -(-num_rows // real_rows)}
        for few in ({"most": num_rows}, of_all):
            with_few = functools.partial(reader, **few)
            if (found := with_few(outputs, rows, others)) is not None:
                reader, first = with_few, found
                break
    if first is None:
        reader = functools.partial(_read_in_groups, real_rows=real_rows)
        first = reader(outputs, rows, others)
    if first is None:
        _tell_what_is_not_read(outputs, rows, others, real_rows, beside_one_row)
        return ""
    if first[0].unknown:
        warn(first[0].unknown)
        return ""
    again = lambda: reader(outputs, rows, others, again=True)
    if names := surely(lambda _, results: results.of_no_row(real_rows), first, again):
        raise OutputError(OF_NO_ROW.format(what=names[0], rows=real_rows))
    found = surely(problems_of_one if has_all else problems, first, again)
    for problem in _once_for_each_cause(found):
        warn(f"{problem} (mt.check_parallel looks closer.)")
    return listed([*dict.fromkeys(first[1].counting_copies())])


def _tell_what_is_not_read(
    outputs: _Outputs,
    rows: Sequence[Any],
    others: Any,
    real_rows: int,
    beside_one_row: Sequence[Any],
) -> None:
    """Warns of a function that takes no other number of rows than its own, so that none is read.

    If it does not take that one either, it has a mistake, which the call itself reports.
    """
    num_rows = rows[0].shape[0]
    if num_rows == real_rows:
        return  # one tower has all rows
    try:
        make = jax.make_jaxpr(outputs, axis_env=axis_of(-(-num_rows // real_rows)))
        program = make(row_shapes(rows, real_rows), Tower.shapes(), others)
    except Exception:
        return
    if real_rows > 1:
        warn(NOT_READ.format(rows=real_rows))
        return
    # A row alone meets no other, but it may meet an array of all rows.
    shapes = [jnp.shape(one) for one in beside_one_row] or shapes_of_constants(program)
    for shape in shapes:
        if shape[:1] == (num_rows,):
            warn(WHOLE_BESIDE_ONE_ROW.format(shape=shape))
            return


def _once_for_each_cause(problems: Sequence[Problem]) -> list[Problem]:
    """The problems, with one for all results that one line makes wrong in the same way."""
    names: dict[Problem, dict[str, None]] = {}  # each once: leaves of a module share a name
    for one in problems:
        names.setdefault(one._replace(output=""), {})[one.output] = None
    return [cause._replace(output=listed([*found])) for cause, found in names.items()]


def look_at_key(
    outputs: _Outputs,
    apart: _Outputs,
    rows: Sequence[Any],
    others: Any,
    name: str,
) -> None:
    """Warns of a key that is the same in all towers, if random numbers are drawn from it.

    Args:
        outputs: what one tower computes.
        apart: what it would compute if each tower had a key of its own.
        rows: as for `look`.
        others: as for `look`.
        name: what shares the key, for the message.

    Warns:
        MultitowerWarning: all towers draw the same numbers.
    """
    alike, own = read_tower(outputs, rows, others), read_tower(apart, rows, others)
    if alike is None or own is None:
        return
    draws = [place for place in alike[0].draws if place not in own[0].draws]
    if draws:
        warn(
            f"{name} as it is, so that all towers draw the same random numbers, dropout masks for "
            f"example ({draws[0]}). Say 0 for the key there, or pass it as an argument of its own."
        )


def read_tower(
    outputs: _Outputs,
    rows: Sequence[Any],
    others: Any,
    *,
    batch_rows: int = 0,
    real_rows: int = 0,
    times: int = 1,
    num_towers: int = 0,
    most: int = 0,
    again: bool = False,
) -> Read | None:
    """What the program of one tower does with rows, and what its results show.

    Args:
        outputs: as for `look`.
        rows: as for `look`.
        others: as for `look`.
        batch_rows: as for `row_flow.read`.
        real_rows: as for `row_flow.read`.
        times: the number of rows will be a multiple of this.
        num_towers: the number of towers; 0 for an unusual one.
        most: the number of rows will not be above this, unless it is 0.
        again: take another number of rows, and of towers, than the first time.

    Returns:
        None if the function fails with a number of rows that the reader chooses, or if there is
        no such number.
    """
    sizes = [size for x in jax.tree.leaves(others) for size in getattr(x, "shape", ())]
    sizes += [size for x in rows for size in x.shape[1:]]
    sizes.append(times)
    few = [n for n in _FEW if n <= most]

    def unused(sizes: list[int]) -> tuple[int, int]:
        prime = unused_size(sizes, few) if few else unused_size(sizes)
        return prime, unused_size([*sizes, prime], _TOWERS)

    prime, unusual = unused([*sizes, *unused(sizes)]) if again else unused(sizes)
    num_towers = num_towers or unusual
    if prime > most > 0:
        return None
    num_rows = times * prime
    other_prime = unused([*sizes, prime])[0]

    def run(rows: list[Any], number: jax.Array, others: Any) -> tuple[dict[str, Any], Writes]:
        with noting_writes() as written:
            num_rows = jnp.int32(rows[0].shape[0])
            return outputs(rows, Tower(number, num_rows, num_rows), others), written

    def trace(num_rows: int, num_towers: int) -> Any:
        anew = functools.partial(run)  # JAX keeps the program of a function
        make = jax.make_jaxpr(anew, axis_env=axis_of(num_towers), return_shape=True)
        return make(row_shapes(rows, num_rows), Tower.shapes().number, others)

    try:
        program, (tree, written) = trace(num_rows, num_towers)
    except Exception:
        return None
    not_known = lambda why: Reading([Flow() for _ in program.jaxpr.outvars], unknown=why)
    if (place := all_one_by_one(program, num_rows)) is not None:
        reading = not_known(ONE_BY_ONE.format(place=place))
        return reading, Results.of(reading, tree, num_rows, writes_in(program, written))
    flows = [*(rows_of(number) for number in range(len(rows))), Flow(varies=True)]
    flows += [
        Flow(is_steady=True, apart=axes_apart(jnp.shape(leaf))) for leaf in jax.tree.leaves(others)
    ]
    try:
        tower_and_batch, near = (real_rows, rows[0].shape[0]), (num_rows, times * other_prime)
        pairs = [tower_and_batch] if 0 < real_rows < rows[0].shape[0] else []
        made = changing(
            program,
            num_rows,
            [*pairs, near] if not most or other_prime <= most else pairs,
            lambda num_rows: trace(num_rows, num_towers)[0],
            lambda: trace(num_rows, num_towers + 1)[0],
        )
        numbers = {"batch_rows": batch_rows, "num_towers": num_towers, "real_rows": real_rows}
        reading = read(program, flows, num_rows, made=made, **numbers)
        if times > 1:
            chunks = read(program, flows, prime, num_groups=times, made=made, **numbers)
            kinds = [path[0].key for path, _ in jax.tree_util.tree_flatten_with_path(tree)[0]]
            reading = _with_parts(_with_chunks(reading, chunks), kinds, program, num_rows)
        more = writes_in(program, written), uses_of_weights(program)
        return reading, Results.of(reading, tree, num_rows, *more)
    except Exception as error:  # a fault of the reader is no reason to end a training
        reading = not_known(FAILED.format(kind=type(error).__name__, error=error))
        return reading, Results.of(reading, tree, num_rows)


def _with_chunks(reading: Reading, chunks: Reading) -> Reading:
    """A reading of rows that come in groups, with what becomes of chunks of rows.

    `x.reshape(4, -1)` has no axis of all rows. Read with a number of rows that divides that of a
    chunk, each chunk has its rows, and it is known what a loop over chunks adds up.

    Args:
        reading: the reading, with axes of all rows.
        chunks: the same, with axes of part of the rows, too.
    """
    operations_of = lambda flow: {operation_at(place) for place in flow.mixed}
    is_cut = lambda flow: operations_of(flow) == {"reshape"}
    is_known = lambda flow: not operations_of(flow) & {*FINDS, "slice"}  # it takes one chunk
    is_of_pairs = lambda flow: flow.word == "mixed" and not flow.mixed  # z[0::2] - z[1::2]
    is_better = lambda a, b: (is_cut(a) and is_known(b)) or (is_of_pairs(a) and b.is_sum)
    pairs = zip(reading.outputs, chunks.outputs, strict=True)
    return reading._replace(outputs=[b if is_better(a, b) else a for a, b in pairs])


def _with_parts(reading: Reading, kinds: list[str], program: Any, num_rows: int) -> Reading:
    """A reading of rows that come in groups, with results that treat chunks in different ways.

    Args:
        reading: the reading.
        kinds: of the first outputs; statistics may be those of one chunk after the other.
        program: what was read.
        num_rows: the number of rows that it was read with.
    """
    outputs = list(reading.outputs)
    for number, (place, kind) in enumerate(
        zip(unlike_parts(program, num_rows), kinds, strict=False)
    ):
        if place is not None and kind not in STATES and not outputs[number].mixed:
            outputs[number] = Flow("mixed", mixed=(place,), roots=frozenset([place]), varies=True)
    return reading._replace(outputs=outputs)


def _read_in_groups(
    outputs: _Outputs,
    rows: Sequence[Any],
    others: Any,
    *,
    real_rows: int,
    again: bool = False,
) -> Read | None:
    """The reading of a function that needs an even number of rows, or whole groups of them.

    A reshape that makes groups of rows, or chunks for a loop, is meant and causes no warning.
    """
    times = math.gcd(rows[0].shape[0], _GROUPS)
    read_some = functools.partial(read_tower, real_rows=real_rows, again=again)
    # Halves of three rows, z[:1] and z[1:], broadcast; those of 3 x 211 do not. Groups of 64 rows
    # are whole in as many rows as a tower has. Rows that go to tower 3 need four towers.
    num_towers = -(-rows[0].shape[0] // real_rows)
    tries = (times, 0), (2 * times, 0), (real_rows, 0), (real_rows, num_towers)
    found = None
    for number, towers in dict.fromkeys(tries):
        found = found or read_some(outputs, rows, others, times=number, num_towers=towers)
    if found is None:
        return None
    reading, results = found
    no_reshape = lambda flow: tuple(p for p in flow.mixed if operation_at(p) != "reshape")
    leaves = [
        one._replace(flow=replace(one.flow, mixed=no_reshape(one.flow))) for one in results.leaves
    ]
    return reading, results._replace(leaves=leaves)


def surely(
    problems: Callable[[Reading, Results], list[_T]],
    first: Read,
    again: Callable[[], Read | None],
) -> list[_T]:
    """The problems that are no accident of the number of rows that the reader chose.

    A size that the function itself makes, such as an image's after a crop, or a number in it, may
    be a multiple of the number of rows, or of towers. With other numbers it is none.

    Args:
        problems: what is wrong with a program, from what was read.
        first: the first reading.
        again: reads with other numbers; called only if there are problems.

    Returns:
        What both readings show; all of the first one's, if there is no second.
    """
    found = problems(*first)
    second = again() if found else None
    if second is None:
        return found
    confirmed = problems(*second)
    return [problem for problem in found if problem in confirmed]

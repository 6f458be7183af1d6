"""Row flow: what becomes of a batch's rows inside a function, read off its program.

A function is safe to run data parallel when every row of a result depends on the same row of the
batch, and every result without rows is a mean over them. `Flow` says what is known of each value.

The program is traced with a number of rows that appears nowhere else, so that an axis of rows is
known by its size. The reader takes unknown operations for harmless: it may miss a mistake, but it
should not report one that is not there.
"""

import itertools
import math
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any, NamedTuple

from multitower.checks.changing import Changing
from multitower.checks.equations import (
    computed,
    differs_along,
    follow,
    is_empty,
    number_of,
    program_inside,
    small_constant,
    steps_of,
)
from multitower.checks.problems import MEETINGS, NO_ROWS
from multitower.checks.reading import operations
from multitower.checks.reading.along_rows import batches_of_rows, row_axes
from multitower.checks.reading.backward_rules import read_backward_rule
from multitower.checks.reading.chunks import apart_in, axes_apart, with_chunks
from multitower.checks.reading.counting import Counting
from multitower.checks.reading.counts import asks_whether_finite, is_square, root_of
from multitower.checks.reading.flow import Flow, all_places, ends_of, place_of, roots_of, settled
from multitower.checks.reading.layout import with_inner
from multitower.checks.reading.loops import INSIDE
from multitower.checks.reading.no_means import bent, held, no_norm, summed
from multitower.checks.reading.orders import in_order
from multitower.checks.reading.places import placed
from multitower.checks.reading.row_numbers import (
    is_index,
    is_number,
    place_beside_number,
    rows_of_each,
)
from multitower.checks.reading.words import word_of_result
from multitower.engines.collectives import first_collective, needs_axis
from multitower.engines.source_lines import line_of

_NUMBERS_OF_ROWS = (
    211, 223, 227, 229, 233, 239, 241, 251, 257, 263, 269, 271, 277, 281, 283, 293,
)  # fmt: skip

# A constant with more elements is not copied from its device to be compared.
_LARGE = 1 << 16


class Reading(NamedTuple):
    """What a program does with rows.

    Attributes:
        outputs: for each output what is known of it.
        draws: operations that draw the same random numbers in every tower.
        baked: operations that multiply or divide a sum over rows by the batch's number of rows,
            although that is not the number of rows here.
        tables: arguments with rows that are looked up like a table, by number, and where.
        taken: how many rows are taken from the beginning, `x[:64]`.
        unread: where rows are written into a `jax.new_ref`; what is read from it is not known.
        backward: where backward rules bring rows together.
        counting_rules: where backward rules, or their functions but not they, divide by the number
            of rows, or multiply by it.
        of_one_row: functions of all rows that are called on one row, inside `jax.vmap`, and where.
        made: the constants of the program that are made of its number of rows.
        unknown: why nothing else is known, if that is so; a warning.
    """

    outputs: list[Flow]
    draws: Sequence[str] = ()
    baked: Sequence[str] = ()
    tables: Mapping[int, str] = {}
    taken: Set[int] = frozenset()
    unread: Sequence[str] = ()
    backward: Sequence[str] = ()
    counting_rules: Sequence[str] = ()
    of_one_row: Sequence[tuple[str, str]] = ()
    made: Changing = Changing()
    unknown: str = ""


def read(
    program: Any,
    inputs: Sequence[Flow],
    num_rows: int,
    batch_rows: int = 0,
    num_towers: int = 0,
    *,
    num_groups: int = 1,
    real_rows: int = 0,
    made: Changing | None = None,
) -> Reading:
    """Reads what a program does with rows.

    Args:
        program: a closed jaxpr, from `jax.make_jaxpr`.
        inputs: what is known of its arguments; for one with rows it is `rows_of(number)`.
        num_rows: the size of every axis of rows, which no other axis has.
        batch_rows: the number of rows of the real batch, to look for among constants.
        num_towers: the number of towers, which divides the size of no other axis; 0 if the function
            cannot tell. Where towers meet, an axis with the rows of all towers does not count as an
            axis of rows: a function that asks for these means to bring rows together.
        num_groups: how often `num_rows` goes into the number of rows of the tower.
        real_rows: the number of rows of a real tower, whose groups of 2 rows are those of the
            batch if it is even; 0 if it is not known.
        made: the constants of the program that are made of its number of rows.

    Returns:
        The reading.
    """
    meets = first_collective(program) is not None
    numbers = num_rows, batch_rows, num_towers, num_groups, real_rows
    reader = _Reader(*numbers, made=made or Changing(), meets=meets)
    outputs = reader.run(program, list(inputs))
    found = reader.draws, reader.counting.baked, reader.tables, reader.taken, reader.unread
    rules = reader.backward, reader.counting_rules
    return Reading(outputs, *found, *rules, reader.of_one_row, reader.made)


class _Reader:
    def __init__(
        self,
        num_rows: int,
        batch_rows: int,
        num_towers: int,
        num_groups: int,
        real_rows: int,
        *,
        made: Changing,
        meets: bool,
    ) -> None:
        whole = num_rows * num_towers
        numbers = num_rows, batch_rows, num_towers, num_groups, real_rows
        self._anew = lambda: _Reader(*numbers, made=made, meets=meets)
        self.num_towers = num_towers
        self._is_of_rule = False  # a rule may call its function again: it is not read twice
        self.num_rows = num_rows
        self.real_rows = real_rows
        self.made = made
        self.tower_rows = num_rows * num_groups
        self.all_rows = whole if meets else 0
        self._calls: list[Any] = []
        self.batches = set[Any]()
        self.counting = Counting(
            num_rows, batch_rows, whole, self.where, made, num_groups=num_groups, meets=meets
        )
        self._sorts = itertools.count()
        self.draws: list[str] = []
        self.tables: dict[int, str] = {}
        self.taken = set[int]()
        self.unread: list[str] = []
        self.backward: list[str] = []
        self.counting_rules: list[str] = []
        self.of_one_row: list[tuple[str, str]] = []

    def run(self, program: Any, inputs: Sequence[Flow]) -> list[Flow]:
        return [settled(flow) for flow in self._call(program, inputs)]

    def count(self) -> int:
        """The number of a sort."""
        return next(self._sorts)

    def _call(self, program: Any, inputs: Sequence[Flow]) -> list[Flow]:
        self.batches |= batches_of_rows(program, self.num_rows)
        return follow(program, inputs, self._constant, self._equation)

    def _constant(self, value: Any, kind: Any) -> Flow:
        """What is known of a constant; `numpy.arange(len(x))` is the numbers of the rows."""
        shape = getattr(kind, "shape", ())
        size = math.prod(shape)
        step = steps_of(value, size) if size and size % self.num_rows == 0 else 0
        axes = row_axes(shape, self.num_rows, self.all_rows)
        rows = [shape[axis] // self.num_rows * self.real_rows for axis in axes]
        is_placed = any(map(differs_along, [value] * len(axes), axes, rows))
        place = "an array with an entry for every row" if is_placed else None
        known = small_constant(value)
        is_steady = (known is None or bool(shape)) and not axes  # a number may count rows
        differs = lambda axis: size > _LARGE or differs_along(value, axis)
        if axes and size <= _LARGE and (number := number_of(value)) is not None:
            known = number
        return Flow(
            value=known,
            is_index=step > 0,
            is_number=step == 1,
            placed=place,
            is_steady=is_steady,
            apart=frozenset(filter(differs, axes_apart(shape))),
        )

    def _equation(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        name = equation.primitive.name
        self._look_for_one_row(equation, inputs)
        if name in operations.HANDS_ON:
            return inputs
        if needs_axis(equation):
            is_drawn = any(flow.is_drawn for flow in inputs)
            place = placed(equation, "mixed", inputs, self)
            own = Flow(varies=name not in operations.ALIKE, is_drawn=is_drawn, placed=place)
            if name not in operations.SUMS or len(inputs) != len(equation.outvars):
                return [own] * len(equation.outvars)
            # What has mixed rows is no sum over them, and a sum of such values is none either.
            place = self.where(equation)
            return [
                replace(
                    own,
                    of_all=flow.is_sum,
                    mixed=all_places([Flow(mixed=(place,)), flow]) if flow.mixed else (),
                    roots=flow.roots if flow.mixed else frozenset(),
                )
                for flow in inputs
            ]
        inside, program = INSIDE.get(name), program_inside(equation.params, len(inputs))
        if inside is not None or program is not None:
            self._calls.append(equation)
            if inside:
                found = inside(self, equation, [settled(flow) for flow in inputs])
            else:
                found = self._call(program, inputs)
            if name == operations.WITH_A_RULE and not self._is_of_rule:
                self._read_rule(equation, inputs, found)
            self._calls.pop()
            return found
        if name in operations.INTO_REFS and any(flow.word != "free" for flow in inputs):
            self.unread.append(self.where(equation))
        if not equation.outvars:  # a callback that returns nothing
            return []
        inputs = self._without_empty(equation, inputs)
        plain = lambda flows: self._result(equation, name, flows)
        found = in_order(equation, inputs, plain, self)
        found = found or [plain([settled(flow) for flow in inputs])] * len(equation.outvars)
        found = with_inner(equation, inputs, found, self)
        return with_chunks(equation, inputs, found, self.tower_rows)

    def _look_for_one_row(self, equation: Any, inputs: list[Flow]) -> None:
        """Notes mt.all_rows and mt.row_index if the axis that they work on is not that of rows."""
        name, params = equation.primitive.name, equation.params
        if name == "all_gather" and params["tiled"] and inputs[0].word == "by row":
            axes = self.row_axes(equation.invars[0])
            if axes and params["all_gather_dimension"] not in axes:
                self.of_one_row.append(("mt.all_rows", self.where(equation)))
        if name == "name" and params["name"] == NO_ROWS and self.row_axes(equation.invars[0]):
            self.of_one_row.append(("mt.row_index", self.where(equation)))

    def _read_rule(self, equation: Any, inputs: list[Flow], results: list[Flow]) -> None:
        def read(program: Any, flows: list[Flow]) -> list[Flow]:
            reader = self._anew()
            reader._calls, reader._is_of_rule = self._calls, True
            return reader.run(program, flows)

        rule = read_backward_rule(equation, inputs, results, self.num_towers, read)
        if rule.mixing is not None:
            self.backward.append(rule.mixing)
        if rule.counting is not None:
            self.counting_rules.append(rule.counting)

    def _result(self, equation: Any, name: str, inputs: list[Flow]) -> Flow:
        """What is known of the results of an operation, whatever order its inputs are in."""
        if inputs and inputs[0].root_of is not None and is_square(equation, inputs):
            return inputs[0].root_of
        varies = any(flow.varies for flow in inputs)
        if name in operations.DRAWS and not varies and self._is_for_rows(equation):
            self.draws.append(self.where(equation))
        word, origin, mixing = word_of_result(equation, inputs, self)
        flow = Flow(
            word,
            origin,
            all_places(inputs, [mixing] if mixing else ()),
            roots_of(inputs, mixing),
            varies=varies,
            is_drawn=name in operations.DRAWS or any(flow.is_drawn for flow in inputs),
            is_index=is_index(equation, inputs, self.num_rows, self.real_rows),
            is_number=is_number(equation, inputs, self.num_rows),
            placed=placed(equation, word, inputs, self),
            sources=frozenset[int]().union(*(flow.sources for flow in inputs)),
            value=computed(equation, [flow.value for flow in inputs]),
            held=held(name, word, mixing, inputs),
            bent=bent(equation, word, inputs, self),
            summed=summed(name, inputs) if word == "mixed" else None,
            ends=ends_of(inputs, mixing) if word == "mixed" else frozenset(),
            no_norm=no_norm(equation, inputs, self),
            apart=apart_in(equation, inputs) if word == "free" else frozenset[int](),
            asks=asks_whether_finite(equation, inputs),
            each=rows_of_each(equation, inputs),
            beside_number=place_beside_number(equation, inputs),
            root_of=root_of(equation, inputs),
        )
        return self.counting.added_to(flow, equation, inputs)

    def _is_for_rows(self, equation: Any) -> bool:
        """Whether there is a result for each row of a tower, or it is in a loop, perhaps over rows.

        Where there is one for each row of all towers, it should be alike in them.
        """
        in_loop = any(one.primitive.name in INSIDE for one in self._calls)
        by_row = any(self.row_axes(atom) for atom in equation.outvars)
        sizes = [size for atom in equation.outvars for size in atom.aval.shape if size]
        for_all = self.all_rows > 0 and any(size % self.all_rows == 0 for size in sizes)
        return (in_loop or by_row) and not for_all

    def _without_empty(self, equation: Any, inputs: list[Flow]) -> list[Flow]:
        """The inputs; an array without elements brings no rows to a result that has none."""
        for atom in equation.outvars:
            if is_empty(atom) or self.row_axes(atom):
                return inputs
        atoms = zip(equation.invars, inputs, strict=True)
        return [Flow() if is_empty(atom) else flow for atom, flow in atoms]

    def where(self, equation: Any) -> str:
        """The operation and its line: `reduce_sum at model.py:30: y = x - x.mean(0)`."""
        # The equations in a library's jitted function have the line of its first call, which may be
        # another one. The call itself has the right line, so the outermost call comes first.
        lines = (line_of(one) for one in [*self._calls, equation])
        name = equation.primitive.name
        if name in MEETINGS and not needs_axis(equation):
            name += " over rows"  # in a jax.vmap with an axis_name of its own, and not over towers
        return place_of(name, next((line for line in lines if line), None))

    def row_axes(self, atom: Any) -> list[int]:
        """The axes of rows of a value."""
        return row_axes(getattr(atom.aval, "shape", ()), self.num_rows, self.all_rows)


def unused_size(sizes: Sequence[int], primes: Sequence[int] = _NUMBERS_OF_ROWS) -> int:
    """A number of rows, or one of `primes`, that divides the size of no other axis.

    Args:
        sizes: the sizes of all axes that are not axes of rows.
        primes: what to choose from; small ones, because the function may loop over them in Python.

    Returns:
        One of them; or, if they all divide something, the next odd number that does not.
    """
    numbers = itertools.chain(primes, itertools.count(primes[-1] + 2, 2))
    return next(n for n in numbers if all(size % n for size in sizes if size))

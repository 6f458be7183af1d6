"""Words: what an operation makes of rows, and of sums over them; the words are those of `Flow`."""

from typing import Any, NamedTuple, Protocol

from multitower.checks.reading import operations
from multitower.checks.reading.along_rows import (
    first_rows,
    takes_one_of_each_group,
    works_along_rows,
)
from multitower.checks.reading.chunks import pairing, pairs_chunks
from multitower.checks.reading.counting import Counting
from multitower.checks.reading.counts import asks_whether_finite
from multitower.checks.reading.flow import Flow, Word, worst_of
from multitower.checks.reading.layout import laid_apart, pairs_layouts
from multitower.checks.reading.loops import Reader


class WordReader(Reader, Protocol):
    """A reader that notes what becomes of rows; see `row_flow.Reading`."""

    tables: dict[int, str]
    taken: set[int]
    counting: Counting
    batches: set[Any]


class Became(NamedTuple):
    """What rows became.

    Attributes:
        word: the result's word.
        origin: the operation that summed over rows.
        mixing: the operation that mixes them now.
    """

    word: Word
    origin: str | None = None
    mixing: str | None = None


def word_of_result(equation: Any, inputs: list[Flow], reader: WordReader) -> Became:
    """What an operation makes of the rows in its inputs.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        reader: knows the axes of rows; what is looked up, taken and counted is noted in it.
    """
    name = equation.primitive.name
    if name in operations.WHETHER_ANY:
        return Became("free")
    words = {flow.word for flow in inputs}
    has_rows = any(reader.row_axes(atom) for atom in equation.outvars)
    of_all = name in operations.ANY_OR_ALL and bool(reader.row_axes(equation.invars[0]))
    is_one = not has_rows and ("by row" not in words or of_all)
    if is_one and asks_whether_finite(equation, inputs):
        return Became("free")  # as if it were: what is not finite is an error anyway
    if words <= {"free"}:  # noise that is drawn for every row is rows
        return Became("by row" if name in operations.DRAWS and has_rows else "free")
    if "mixed" in words and "by row" not in words:
        return Became("by row" if has_rows else "mixed")
    if "linear" in words and "mixed" not in words:
        return _from_linear(equation, inputs, reader, has_rows=has_rows)
    return _from_rows(equation, inputs, reader, has_rows=has_rows)


def _from_rows(equation: Any, inputs: list[Flow], reader: WordReader, *, has_rows: bool) -> Became:
    """What becomes of rows: still by row, summed up, or mixed."""
    name = equation.primitive.name
    rows_in = max(len(reader.row_axes(atom)) for atom in equation.invars)
    rows_out = max((len(reader.row_axes(atom)) for atom in equation.outvars), default=0)
    together = pairing if pairs_chunks(equation, inputs) else None
    if together is None and pairs_layouts(equation, inputs, reader):
        together = laid_apart
    if together is not None:
        return Became("by row" if has_rows else "mixed", mixing=together(reader.where(equation)))
    if works_along_rows(equation, inputs, reader.num_rows, reader.all_rows):
        if not any(flow.sources for flow in inputs):
            return Became("free")  # noise alone, such as what makes a permutation
        place = reader.where(equation)
        # A sorted array, as of a quantile, is no table; nor is one whose neighbours are taken,
        # or whose rows a mask chooses.
        is_plain = len(inputs[0].sources) == 1 and not inputs[0].mixed
        if name == "gather" and is_plain and not (inputs[1].placed or inputs[1].mixed):
            reader.tables.setdefault(next(iter(inputs[0].sources)), place)
        return Became("by row" if has_rows else "mixed", mixing=place)
    # jax.vmap draws for all rows from the first one's key, if the keys are such.
    is_drawn_together = name == "random_bits" and "rbg" in str(equation.invars[0].aval.dtype)
    if rows_out > rows_in or (is_drawn_together and rows_in):  # every row with every row
        return Became("by row", mixing=reader.where(equation))
    if rows_out == 0 and rows_in > 0:
        return _without_rows(equation, inputs, reader)
    return Became("by row")


def _without_rows(equation: Any, inputs: list[Flow], reader: WordReader) -> Became:
    """What becomes of rows in a result that has no axis of rows."""
    name = equation.primitive.name
    if name in ("gather", "dynamic_slice") and any(flow.is_index for flow in inputs[1:]):
        return Became("by row")  # x[i] in a loop over the numbers of the rows
    if name == "slice":
        reader.taken |= {first_rows(equation, n) for n in reader.row_axes(equation.invars[0])}
    rows = reader.num_rows, reader.tower_rows, reader.real_rows
    is_group = takes_one_of_each_group(equation, *rows)
    if is_group or equation.outvars[0] in reader.batches:
        return Became("mixed")  # x[0::2] of pairs that are neighbours, or batches
    place = reader.where(equation)
    is_sum = name in operations.SUMS and worst_of(inputs).word == "by row"
    return Became("linear", origin=place) if is_sum else Became("mixed", mixing=place)


def _from_linear(
    equation: Any, inputs: list[Flow], reader: WordReader, *, has_rows: bool
) -> Became:
    """What becomes of sums over rows: still one, or mixed."""
    name = equation.primitive.name
    origin = next(flow.origin for flow in inputs if flow.word == "linear")
    words = [flow.word for flow in inputs]
    if "by row" in words:  # a sum over rows goes back into the rows
        return Became("by row" if has_rows else "mixed", mixing=origin)
    if has_rows and any(flow.is_sum for flow in inputs):  # likewise, jnp.full(n, total)
        return Became("by row", mixing=origin)
    is_first_alone = words.count("linear") == 1 and words[0] == "linear"
    scaled = words.count("linear") == 1 and name in operations.LINEAR_WITH_FREE
    scaled = scaled or (is_first_alone and name == "div")
    if scaled:
        reader.counting.look_for_baked(equation, inputs)
    chooses = name == "select_n" and words[0] == "linear"
    together = name in operations.LINEAR_TOGETHER and not chooses
    written = operations.WRITTEN.get(name, ())
    together |= all(n in written for n, word in enumerate(words) if word == "linear")
    if scaled or together or (is_first_alone and name in operations.LINEAR_ALONE):
        return Became("linear", origin)
    return Became("mixed", mixing=reader.where(equation))

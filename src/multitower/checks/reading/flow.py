"""What is known of one value of a program: whether it has rows, and what has become of them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, NamedTuple

from multitower.checks.reading import operations

Word = Literal["free", "by row", "linear", "mixed"]
ORDER: tuple[Word, ...] = ("free", "by row", "linear", "mixed")

# At most so many places are kept for messages.
_PLACES = 8
# A value's chunk if it is a sum of several.
SUM_OF_CHUNKS = -1


class Chunks(NamedTuple):
    """Where a value has all chunks of the rows.

    Attributes:
        axis: the axis of the chunks.
        rows: the axis of the rows in a chunk; None in a loop over these rows.
        is_reversed: whether the last chunk comes first.
    """

    axis: int
    rows: int | None
    is_reversed: bool = False


class Order(NamedTuple):
    """An order of rows, and what a value has of it.

    Attributes:
        place: where they were sorted, or laid out.
        number: which time that was; equal for rows that were laid out alike.
        what: rows: its rows are in this order. numbers: it is made of the rows' numbers in this
            order, and finds row i. undoes: it is made of the places in this order where row i is.
        step: None if they were sorted. If they were laid out, how many elements there are from one
            row to the next; 0 for a sum of several rows' values. See `layout`.
        turned: the chunks and the number of rows in each, if chunks were laid out one row of each
            after the other. See `chunks`.
    """

    place: str
    number: int | Fraction
    what: Literal["rows", "numbers", "undoes"]
    step: int | None = None
    turned: tuple[Chunks, int] | None = None


@dataclass(frozen=True)
class Flow:
    """What is known of one value.

    Attributes:
        word: how it depends on rows.
            free: it does not depend on them.
            by row: row i of it belongs to row i of the batch.
            linear: a sum or a mean over rows, added to or multiplied by what is free.
            mixed: anything else without rows.
        origin: the operation that summed over rows, and its line.
        mixed: the operations that brought rows together, and their lines: one of its rows depends
            on several rows of the batch.
        roots: the first operations that summed over rows or mixed them, on the way to this value.
        ends: for a mixed value without rows, the operations that brought the rows together that are
            in it, last; see `last`.
        is_mean: whether a linear value was divided by the number of rows.
        counted: the operation that divided or multiplied it by the number of rows, and its line. A
            second such operation cancels the first, unless it was by a root or a logarithm of that
            number, or by one less. A sum over rows of a counted value is a mean.
        squared: whether it is the square of a counted value. A sum over rows of it is no mean: it
            is divided by the number of rows once too often.
        varies: whether it differs from tower to tower by its rows or keys.
        is_drawn: whether random numbers went into it.
        is_index: whether it depends on the numbers of the rows, 0, 1, 2 ..., and so may be an index
            that finds row i.
        is_number: whether it is such a number itself, and not 3 * i, which may find one of the
            entries of row i.
        placed: where the numbers of the rows come from, if they are part of the value itself: it
            depends on a row's place in the batch.
        sources: the numbers of the arguments with rows that it depends on.
        summed: for a mixed value, the operation that summed over rows, and its line, if it may be
            that sum: some of its entries were replaced, or it is the sum in one case of several.
        of_all: whether it is a sum over the rows of all towers. Divided by their number, it is as
            large as one tower's sum: `is_share`.
        is_share: whether it is the mean over towers of a sum over rows, `jax.lax.pmean(mask.sum(),
            "towers")`. A sum over rows divided by it is a mean.
        is_steady: whether it is free of rows, the same in every tower for all that is known, and no
            constant: such as a penalty on the parameters.
        per_row: whether it is free of rows, and was multiplied by the number of rows: a sum over
            rows of what is the same for each.
        beside: for a linear value, the operation that added a steady number to a sum over rows, and
            its line. Every tower adds that number. Or the one that put them side by side, as
            `jnp.stack` does, as long as nothing has added these up.
        held: for a mixed value, the operation that wrote rows into it, took one of them or their
            largest, and its line: it is no mean over rows.
        bent: for a mixed value, the operation that made it of sums over rows, and its line, if the
            mean over towers of such values is another number; but a variance is meant.
        no_norm: the operation that used a sum over rows as normalising rows does not, on the way to
            this value, and its line: its logarithm, a quotient of two, rows divided by a mean, or
            products of two, added up over features.
        order: the order that its rows are in, if they were sorted or laid out; see `orders`.
        chunk: the number of the chunk whose rows it has, `Chunks` for all of them, or
            SUM_OF_CHUNKS, if the rows were laid out in chunks; see `chunks`.
        apart: for a value that is free of rows, the axes along which its entries differ, as far as
            that is known: such as weights of four tasks, which meet four chunks of the rows.
        inner: for an axis with several values of each row, how many of them lie side by side, if
            that is known; see `layout`.
        asks: whether it says that something is a finite number, or is not.
        beside_number: for an index that has other numbers beside that of the row, where one of
            these comes from, if it is a place.
        each: for numbers of rows, how many rows have the same, if that is known: 4 for i // 4.
        root_of: what it is the root of, if that is a sum over rows: a norm. Its square is that sum.
        value: its value, if it is a constant: Keras, for example, computes the number of rows in
            the program, as the product of a shape. A scalar for an array of equal elements.
    """

    word: Word = "free"
    origin: str | None = None
    mixed: tuple[str, ...] = ()
    roots: frozenset[str] = frozenset()
    is_mean: bool = False
    counted: str | None = None
    squared: bool = False
    varies: bool = False
    is_drawn: bool = False
    is_index: bool = False
    is_number: bool = False
    placed: str | None = None
    sources: frozenset[int] = frozenset()
    value: Any = field(default=None, compare=False)
    held: str | None = None
    bent: str | None = None
    summed: str | None = None
    ends: frozenset[str] = frozenset()
    of_all: bool = False
    is_share: bool = False
    is_steady: bool = False
    per_row: bool = False
    beside: str | None = None
    no_norm: str | None = None
    order: Order | None = None
    chunk: int | Chunks | None = None
    apart: frozenset[int] = frozenset()
    inner: int | None = None
    asks: bool = False
    each: int = 1
    beside_number: str | None = None
    root_of: "Flow | None" = None

    @property
    def is_sum(self) -> bool:
        """Whether it is a sum over rows, and no mean."""
        return self.word == "linear" and not self.is_mean

    @property
    def a_sum(self) -> str | None:
        """Where it was summed over rows, if it is or may be such a sum, and no mean."""
        return self.origin if self.is_sum else self.summed

    @property
    def beside_mean(self) -> str | None:
        """Where a steady number was added, if it is a mean now: the number was divided too."""
        return self.added if self.is_mean else None

    @property
    def added(self) -> str | None:
        """Where a steady number was added to a sum over rows, and not put beside it alone."""
        return (
            None if self.beside and operation_at(self.beside) in operations.STACKS else self.beside
        )

    @property
    def all_roots(self) -> frozenset[str]:
        """The roots, with its own sum over rows."""
        return self.roots | ({self.origin} if self.origin else set[str]())

    @property
    def last(self) -> frozenset[str]:
        """Where the rows that are in it were brought together last: a mean's own sum over rows.

        Of what the rows themselves had been made of before, nothing is in it.
        """
        return frozenset([self.origin]) if self.word == "linear" and self.origin else self.ends

    @property
    def places(self) -> tuple[str, ...]:
        """Where rows were mixed, or else where they were summed up."""
        return self.mixed or ((self.origin,) if self.origin else ())


def rows_of(number: int) -> Flow:
    """What is known of argument `number`, whose rows are cut into towers."""
    return Flow("by row", varies=True, sources=frozenset([number]))


def place_of(operation: str, line: str | None) -> str:
    """Where something happens: `reduce_sum at model.py:30: y = x - x.mean(0)`."""
    return f"{operation} at {line}" if line else operation


def operation_at(place: str) -> str:
    """The operation of a place, such as `reduce_sum`."""
    return place.partition(" at ")[0]


def line_at(place: str) -> str:
    """The line of a place, such as `model.py:30: y = x - x.mean(0)`; or its operation."""
    return place.partition(" at ")[2] or place


def worst_of(flows: Iterable[Flow]) -> Flow:
    """The one that is farthest from rows, in the order of `ORDER`."""
    return max(flows, key=lambda flow: ORDER.index(flow.word), default=Flow())


def all_places(flows: Sequence[Flow], more: Iterable[str] = ()) -> tuple[str, ...]:
    """Where any of these was mixed, and `more` places, each place once."""
    places = dict.fromkeys(place for flow in flows for place in flow.mixed)
    places |= dict.fromkeys(more)
    return tuple(places)[:_PLACES]


def roots_of(flows: Sequence[Flow], mixing: str | None) -> frozenset[str]:
    """The roots of a value that is made of these.

    If the operation `mixing` mixes rows now, the sums over rows that go into it are roots, or if
    there are no such sums, `mixing` itself.
    """
    before = frozenset[str]().union(*(flow.roots for flow in flows))
    if mixing is None:
        return before
    sums = {flow.origin for flow in flows if flow.word == "linear" and flow.origin}
    return before | (sums or {mixing})


def ends_of(flows: Sequence[Flow], mixing: str | None) -> frozenset[str]:
    """The `ends` of a mixed value that is made of these, or by the operation `mixing` of rows."""
    last = frozenset[str]().union(*(flow.last for flow in flows))
    has_rows = any(flow.word == "by row" for flow in flows)
    return frozenset([mixing]) if mixing and (has_rows or not last) else last


def settled(flow: Flow) -> Flow:
    """What is known of sorted rows, or of their order, that are not put back: they are mixed."""
    if flow.order is None:
        return flow
    place = flow.order.place
    mixed, roots = all_places([flow], [place]), roots_of([flow], place)
    return replace(flow, mixed=mixed, roots=roots, order=None)


def join(a: Flow, b: Flow) -> Flow:
    """What is known of a value that is one or the other."""
    worse = worst_of([a, b])
    word, more = worse.word, ()
    if {a.word, b.word} == {"by row", "linear"}:
        word, more = "mixed", tuple(place for place in (worse.origin,) if place)
    chunks = {flow.chunk for flow in (a, b) if flow.word != "free"}
    both_mean = a.is_mean and b.is_mean
    is_mean = both_mean or (worse.is_mean and "free" in (a.word, b.word))
    return Flow(
        word,
        worse.origin,
        all_places([a, b], more),
        a.roots | b.roots | frozenset(more),
        is_mean,
        a.counted or b.counted,
        a.squared or b.squared,
        a.varies or b.varies,
        a.is_drawn or b.is_drawn,
        a.is_index and b.is_index,
        a.is_number and b.is_number,
        a.placed or b.placed,
        a.sources | b.sources,
        held=(a.held or b.held) if word == "mixed" else None,
        bent=(a.bent or b.bent) if word == "mixed" else None,
        summed=(a.a_sum or b.a_sum) if word == "mixed" else None,
        ends=a.last | b.last if word == "mixed" else frozenset(),
        of_all=a.of_all and b.of_all,
        is_share=a.is_share and b.is_share,
        is_steady=a.is_steady and b.is_steady,
        per_row=a.per_row and b.per_row,
        beside=(a.beside or b.beside) if word == "linear" else None,
        no_norm=a.no_norm or b.no_norm,
        chunk=chunks.pop() if len(chunks) == 1 else None,
    )


def join_all(flows: Sequence[Flow]) -> Flow:
    """What is known of a value that is one of these."""
    joined = flows[0]
    for flow in flows[1:]:
        joined = join(joined, flow)
    return joined

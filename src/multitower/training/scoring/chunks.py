"""Chunks: the rows of a data set, or of an iterator of batches, `global_batch` at a time."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines.tracing import some_rows_repeat
from multitower.errors import BatchError, OutputError, whole_number
from multitower.hardware.devices import host_device
from multitower.towers.feeding import shard
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.placement import place
from multitower.towers.refusals import path_of
from multitower.towers.rows import KEY, BatchParts, take_apart
from multitower.towers.same_call import check_alike
from multitower.towers.split import on_one_device, rows_at


class Where(NamedTuple):
    """Where a model is scored; arguments of `make_parallel`, which can be the key of a cache."""

    devices: Any
    towers: int | None
    stages: int | None
    layout: tuple[int, int] | None
    interleave: bool

    def place(self, rows: LazyRows) -> Any:
        """Copies each tower's rows to its device."""
        return shard(rows, devices=self.devices, towers=self.towers)

    def shared(self, tree: Any) -> Any:
        """What all chunks share; for stages as JAX arrays, which they copy only once."""
        return tree if self.stages is None else jax.tree.map(_unchanging, tree)


class Chunk(NamedTuple):
    """Some rows, padded with copies of rows to the size that the program was compiled for.

    Attributes:
        rows: a batch for `make_parallel`.
        num_real: the number of real rows, which come first; the rest are copies.
        may_repeat: whether this chunk, or the last chunk of the same batch, has copies.
    """

    rows: Any
    num_real: int
    may_repeat: bool

    def told(self) -> AbstractContextManager[None]:
        """A context for a call with this chunk: towers must not exchange values if rows repeat."""
        return some_rows_repeat() if self.may_repeat else nullcontext()


def is_iterator(data: Any) -> bool:
    """Whether data come batch by batch: from an iterator, or a loader of another library."""
    if isinstance(data, Iterator):
        return True
    is_leaf = jax.tree.structure(data) == jax.tree.structure(0)
    is_batch = isinstance(data, Mapping) or hasattr(data, "shape")
    return is_leaf and isinstance(data, Iterable) and not is_batch


def chunks(data: Any, global_batch: int, where: Where) -> Iterator[Chunk]:
    """Yields the rows in their order, each once, in chunks.

    Args:
        data: a pytree of arrays with one example per row, or an iterator of such batches. A PRNG
            key beside them is another one in every chunk.
        global_batch: rows of a chunk, 1 or more; chunks are smaller if the data, or the first
            batch, have fewer rows.
        where: where they will be scored; for stages they stay on the host.

    Raises:
        BatchError: no rows, arrays with different numbers of rows, a wrong `global_batch`, or an
            iterator without batches.
    """
    global_batch = whole_number("global_batch", global_batch, 1, BatchError)
    place = None if where.stages else where.place
    size: int | None = None
    numbers = itertools.count()
    for batch in data if is_iterator(data) else [data]:
        parts = take_apart(batch, 0, name="data")
        size = size or min(global_batch, parts.num_rows)
        yield from _of_batch(jax.tree.map(on_one_device, batch), parts, size, place, numbers)
    if size is None:
        raise BatchError("the iterator of batches is empty: there is no example to look at.")


class Repeatable:
    """Data that can be read again from the start after the first batch has been looked at.

    Attributes:
        can_repeat: whether it still can be: no batch of an iterator after the first has been read.
    """

    def __init__(self, data: Any) -> None:
        self._data = data
        self._rest = iter(data) if is_iterator(data) else None
        self._first = list(itertools.islice(self._rest or (), 1))
        self.can_repeat = True

    def again(self) -> Any:
        """The data, from the start."""
        if self._rest is None:
            return self._data
        return itertools.chain(self._first, self._others(self._rest))

    def _others(self, rest: Iterator[Any]) -> Iterator[Any]:
        self.can_repeat = False
        yield from rest


def num_rows_of_all(data: Any) -> int | None:
    """The number of rows of all data; None for an iterator, whose length is unknown."""
    return None if is_iterator(data) else take_apart(data, 0, name="data").num_rows


def _of_batch(
    batch: Any,
    parts: BatchParts,
    size: int,
    place: Callable[[LazyRows], Any] | None,
    numbers: Iterator[int],
) -> Iterator[Chunk]:
    num_rows, (given, treedef) = parts.num_rows, jax.tree.flatten(batch)
    kinds = parts.split.kinds
    has_rows = [isinstance(kind, int) for kind in kinds]
    name = lambda number: lambda: path_of(batch, number, "data")
    for start in range(0, num_rows, size):
        # The last chunk is padded with rows of the same batch, so that it fits the compiled
        # program; their results are dropped when they are read.
        places = np.arange(start, start + size) % num_rows
        number = next(numbers)
        leaves = [
            _key_of(number, leaf) if kind == KEY else leaf
            for leaf, kind in zip(given, kinds, strict=True)
        ]

        def some(
            own: np.ndarray[Any, Any],
            places: np.ndarray[Any, Any] = places,
            leaves: list[Any] = leaves,
        ) -> Any:
            each = enumerate(zip(leaves, has_rows, strict=True))
            return treedef.unflatten(
                [rows_at(x, places[own], name(n)) if by_row else x for n, (x, by_row) in each]
            )

        rows = some(np.arange(size)) if place is None else place(LazyRows(size, some))
        yield Chunk(rows, min(size, num_rows - start), num_rows % size != 0)


def _key_of(number: int, key: Any) -> jax.Array:
    """The key of a chunk: with one key for all, every chunk would draw the same numbers."""
    with jax.transfer_guard("allow"):  # the number is copied to the key's device
        return jax.random.fold_in(key, number)


def cached(make: Any, fn: Callable[..., Any], where: Where) -> Any:
    """What a function with a cache makes of `fn`; it is made anew if `fn` is not hashable."""
    try:
        return make(fn, where)
    except TypeError:  # an unhashable callable cannot be cached
        return make.__wrapped__(fn, where)


def for_each_chunk(
    name: str, run: Callable[[Any], Any], read: Callable[[Any, int], None], each: Iterable[Chunk]
) -> int:
    """Runs a function on chunks, and reads each result while the devices have the next chunk.

    Args:
        name: what the result is called in messages.
        run: a function of a chunk's rows; its results are trees of arrays with rows on axis 0.
        read: called with each result and its number of real rows, in the order of the chunks.
        each: the chunks.

    Returns:
        The number of real rows of all chunks.

    Raises:
        OutputError: a result with other names, or other shapes of a row, than that of the first
            chunk.
    """
    num_rows = 0
    first: dict[str, tuple[int, ...]] | None = None
    waiting: tuple[Any, int] | None = None
    for chunk in each:
        with chunk.told():
            result = run(chunk.rows)
        shapes = _row_shapes(result)
        if first is None:
            first = shapes
        elif list(shapes.items()) != list(first.items()):
            raise _other_result(name, first, shapes)
        if waiting:
            read(*waiting)
        waiting = (result, chunk.num_real)
        num_rows += chunk.num_real
    assert waiting
    read(*waiting)
    return num_rows


def _row_shapes(result: Any) -> dict[str, tuple[int, ...]]:
    """The shape of one row of each array in a result, by path."""
    flat = jax.tree_util.tree_leaves_with_path(result)
    return {jax.tree_util.keystr(path): tuple(leaf.shape[1:]) for path, leaf in flat}


def _other_result(name: str, first: dict[str, Any], shapes: dict[str, Any]) -> OutputError:
    """The error for batches whose results cannot be put together."""
    for path in [*first, *shapes]:
        if path not in first or path not in shapes:
            which = "the first batch" if path in first else "a later batch"
            return OutputError(
                f"{name}{path} is in the result of {which} only, so it is not known for every row. "
                "Return the same names for all batches, or make one call for each kind of batch."
            )
        if first[path] != shapes[path]:
            return OutputError(
                f"{name}{path} has shape {shapes[path]} for a row of one batch, and {first[path]} "
                "for a row of the first batch. Pad the rows of all batches to one length, or make "
                "one call for each length."
            )
    return OutputError(
        f"{name} has its entries in another order for one batch than for the first batch. Return "
        "them in the same order for all batches."
    )


def _unchanging(leaf: Any) -> Any:
    """A NumPy array as a JAX array in the host's memory, which stages copy only once."""
    if not isinstance(leaf, np.ndarray):
        return leaf
    return jax.device_put(leaf, host_device())


def check_same_data(call: str, data: Any, global_batch: int, where: Where) -> None:
    """Compares the numbers of rows; call it on every process.

    A process with more rows than another one would wait for it for ever.

    Args:
        call: the name of the function that scores.
        data: as for `chunks`. How many batches an iterator has is not known.
        global_batch: as for `chunks`.
        where: where they will be scored.

    Raises:
        ArgumentError: in every process, if they have different numbers of rows.
        BatchError: arrays with different numbers of rows.
    """
    placement = place(where.devices, where.towers)
    if placement.spans_processes:
        settings = {"global_batch": str(global_batch), "the number of rows": num_rows_of_all(data)}
        advice = "Each of them passes all rows, not a part of them."
        check_alike(call, settings, placement, advice)

"""Data: batch number s is a pure function of the data set, the seed, the batch size and s.

This holds for the order of the examples and for random distortions of them.

A batch does not depend on devices, towers, processes or earlier batches. So a run that resumes at
step s asks for batch s and continues as if it had never stopped.
"""

import functools
import itertools
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import jax
import numpy as np

from multitower.data.augmentation import KEYS
from multitower.errors import BatchError, refuse_foreign, whole_number
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.refusals import path_of
from multitower.towers.rows import Split, take_apart
from multitower.towers.split import on_one_device, rows_at

Distort = Callable[[Any, np.random.Generator], Any]


def make_batch(
    dataset: Any,
    *,
    global_batch: int,
    seed: int,
    step: int,
    distort: Distort | None = None,
    keyed: bool = False,
    places: np.ndarray[Any, Any] | None = None,
) -> Any:
    """Makes the batch of one step, or some of its rows.

    The examples are shuffled anew in every epoch, and the epochs follow each other without a gap.
    Batch s holds the places `s * global_batch` to `(s + 1) * global_batch - 1` of this sequence. So
    every batch is full, and no example is seen more than once more often than another.

    Args:
        dataset: a pytree of arrays with one example per row on axis 0: of NumPy, of JAX, or of any
            library that can be asked for rows by place, such as columns of a table. Numbers and 0-d
            arrays are the same in every batch.
        global_batch: rows of the batch, 1 or more; it may be more than there are examples.
        seed: the seed of all random numbers, 0 or more.
        step: number of the batch; the first one is 0.
        distort: `distort(batch, generator)` returns the batch with random changes, drawn from the
            generator alone; it may change the arrays in place.
        keyed: give every row a PRNG key of its own, for `multitower.augmented`; the data set must
            be a dict. A key depends only on the seed, the epoch and the example, not on the batch
            or the example's place in it.
        places: the rows of the batch to make, an integer array as `multitower.LazyRows` passes it;
            None for all. Only these rows are read, unless `distort` is given, which needs the whole
            batch.

    Returns:
        The same pytree, with `global_batch` rows or those at `places`, copied; if `keyed` with an
        entry `"key"`, uint32, shape (rows, 2).

    Raises:
        BatchError: no examples, different row counts, a wrong `global_batch`, `seed` or `step`, a
            data set that cannot be keyed, or a `distort` that returns None.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> letters = {"letter": np.array([1, 2, 3, 4, 5])}
        >>> for step in range(3):
        ...     print(mt.make_batch(letters, global_batch=4, seed=0, step=step)["letter"])
        [1 4 2 3]
        [5 4 5 3]
        [2 1 5 4]
    """
    # Python integers: the product may be too large for an int32, such as JAX's state.step.
    global_batch = whole_number("global_batch", global_batch, 1, BatchError)
    step = whole_number("step", step, 0, BatchError)
    seed = whole_number("seed", seed, 0, BatchError)
    parts = take_apart(dataset, 0, name="data")
    num_rows = parts.num_rows
    first, end = step * global_batch, (step + 1) * global_batch
    rows = np.empty(global_batch, np.intp)
    keys = np.empty((global_batch, 2), np.uint32)
    if keyed:
        _check_has_room_for_keys(dataset)
    for epoch in range(first // num_rows, (end - 1) // num_rows + 1):
        start = epoch * num_rows
        here = slice(max(first - start, 0), min(end - start, num_rows))
        there = slice(here.start + start - first, here.stop + start - first)
        rows[there] = _shuffled(num_rows, seed, epoch)[here]
        if keyed:
            keys[there] = _row_keys(num_rows, seed, epoch)[rows[there]]
    if places is not None and distort is None:
        rows, keys = rows[places], keys[places]
    batch = _at(rows, dataset, parts.split)
    if keyed:
        batch = {**batch, KEYS: keys}
    if distort is None:
        return batch
    # A child of the seed, so that the numbers differ from those that shuffle epoch number `step`.
    source = np.random.SeedSequence([seed, step], spawn_key=(1,))
    batch = distort(batch, np.random.Generator(np.random.Philox(source)))
    if batch is None:
        raise BatchError(
            "distort(batch, generator) returned None: it must return the batch, also if it changes "
            "the arrays in place."
        )
    return batch if places is None else _at(places, batch, take_apart(batch, 0, name="data").split)


@refuse_foreign(
    global_batch="Say how many rows a batch has, over all towers, such as global_batch=64.",
    batch_size="The rows of a batch, over all towers, are global_batch=.",
    seed="Say what decides the order of the examples, such as seed=0.",
    shuffle="Every epoch is shuffled, in the order that seed= decides.",
)
def make_batches(
    dataset: Any,
    *,
    global_batch: int,
    seed: int,
    first: int = 0,
    distort: Distort | None = None,
    keyed: bool = False,
    lazy: bool = False,
) -> Iterator[Any]:
    """Makes the batches of all steps, without end.

    The iterator has the attribute `steps_per_epoch`, a `fractions.Fraction`: the examples divided
    by the rows of a batch. `Trainer.fit(epochs=...)` uses it.

    Args:
        dataset: as for `make_batch`.
        global_batch: as for `make_batch`.
        seed: as for `make_batch`.
        first: the number of the first step.
        distort: as for `make_batch`.
        keyed: as for `make_batch`.
        lazy: yield `multitower.LazyRows`: each process then reads only the rows of its towers.

    Returns:
        An iterator of `make_batch(..., step=s)` for s = first, first + 1, ...

    Raises:
        BatchError: as `make_batch`, when the first batch is asked for.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> batches = mt.make_batches(np.arange(10), global_batch=5, seed=0)
        >>> epoch = [next(batches), next(batches)]
        >>> np.sort(np.concatenate(epoch))
        array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """
    options: dict[str, Any] = {"global_batch": global_batch, "seed": seed}
    options |= {"distort": distort, "keyed": keyed}

    def batches() -> Iterator[Any]:
        here = jax.tree.map(on_one_device, dataset)  # once, and not again for every batch
        for step in itertools.count(whole_number("first", first, 0, BatchError)):
            make = functools.partial(make_batch, here, **options, step=step)
            yield (
                LazyRows(global_batch, lambda places, make=make: make(places=places))
                if lazy
                else make()
            )

    return _Batches(batches(), dataset, global_batch)


class _Batches:
    """An iterator of batches that knows how many steps an epoch has."""

    def __init__(self, batches: Iterator[Any], dataset: Any, global_batch: int) -> None:
        self._batches = batches
        self._dataset = dataset
        self._global_batch = global_batch

    @property
    def steps_per_epoch(self) -> Fraction:
        """The examples divided by the rows of a batch.

        Raises:
            BatchError: no examples, different row counts, or a wrong `global_batch`.
        """
        global_batch = whole_number("global_batch", self._global_batch, 1, BatchError)
        num_rows = take_apart(self._dataset, 0, name="data").num_rows
        return Fraction(num_rows, global_batch)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._batches)


@functools.lru_cache(maxsize=4)  # one batch after another asks for the same epoch
def _shuffled(num_rows: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    # All versions of NumPy give the same raw numbers of a bit generator, but not the same result of
    # Generator.permutation (NEP 19). Sorting random 64-bit numbers is a fair shuffle.
    raw = np.random.Philox(np.random.SeedSequence([seed, epoch])).random_raw(num_rows)
    return np.argsort(raw, kind="stable")


@functools.lru_cache(maxsize=4)
def _row_keys(num_rows: int, seed: int, epoch: int) -> np.ndarray[Any, Any]:
    """A key for every example of one epoch, uint32, shape (num_rows, 2)."""
    source = np.random.SeedSequence([seed, epoch], spawn_key=(2,))
    raw = np.random.Philox(source).random_raw(num_rows)
    return np.stack([raw >> np.uint64(32), raw & np.uint64(2**32 - 1)], axis=1).astype(np.uint32)


def _at(places: np.ndarray[Any, Any], tree: Any, split: Split) -> Any:
    """A tree of copies: of the rows at these places, and of the arrays that have no rows."""
    leaves, treedef = jax.tree.flatten(tree)
    pairs = zip(leaves, split.kinds, strict=True)

    def chosen(number: int, leaf: Any, kind: Any) -> Any:
        if isinstance(kind, int):
            return rows_at(on_one_device(leaf), places, lambda: path_of(tree, number, "data"))
        return leaf.copy() if isinstance(leaf, np.ndarray) else leaf

    return treedef.unflatten([chosen(number, *pair) for number, pair in enumerate(pairs)])


def _check_has_room_for_keys(dataset: Any) -> None:
    if not isinstance(dataset, dict) or KEYS in dataset:
        raise BatchError(
            f"the data set is {type(dataset).__name__}: keyed batches are dicts, and {KEYS!r} is "
            f"the name of the keys. Pass a dict without {KEYS!r}."
        )

"""Feeding: each tower's rows on its own device, ahead of need."""

import atexit
import queue
import threading
import weakref
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from multitower.errors import ArgumentError, BatchError, whole_number
from multitower.hardware.devices import DeviceSpec
from multitower.towers.global_arrays import stacked
from multitower.towers.lazy_rows import LazyRows
from multitower.towers.leaves import is_traced
from multitower.towers.placement import Placement, place
from multitower.towers.refusals import shown
from multitower.towers.rows import BatchParts, take_apart
from multitower.towers.split import (
    TowerRows,
    copy_to,
    cut,
    own_towers,
    placed_rows,
    size_of_towers,
)
from multitower.towers.surroundings import refuse_traced


def shard(
    batch: Any,
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    global_batch: int | None = None,
) -> Any:
    """Copies each tower's rows to its device.

    Tower i gets the rows `x[i*b:(i+1)*b]`, where b is rows / towers, rounded up. NumPy arrays are
    copied, so you may change them afterwards. A `jax.Array` that shares its memory with another
    library, as `jax.numpy.from_dlpack` makes it, may go on to share it: copy it if that changes.

    With several processes, call it on every process with the same batch. Each process keeps the
    rows of its own towers. Arrays may be whole in every process, or global `jax.Array`s that are
    split as the result is. From `LazyRows` each process reads only the rows that it needs.

    Args:
        batch: a pytree of arrays with rows on axis 0, or `LazyRows`. Numbers and 0-d arrays are
            not split.
        devices: as for `multitower.devices`.
        towers: the number of towers, the same as for the function that takes the batch.
        global_batch: rows of a full batch; a larger one is refused. With `towers`, a smaller batch
            then fills the first towers and leaves the last ones empty, so that no new program is
            compiled.

    Returns:
        The same pytree. Without `towers`: `jax.Array`s split over the devices (whole on every
        device where the rows do not divide evenly). With `towers`: `TowerRows` in place of arrays.

    Raises:
        BatchError: no rows, different row counts, or more rows than `global_batch`, which is a
            whole number.
        ArgumentError: leaves that are not numbers, such as strings; or arrays of `jax.jit` or the
            like, with `towers`.
        DeviceError: more devices than there are, or an unknown name.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> batch = mt.shard({"x": np.arange(8.0).reshape(4, 2)}, devices=2)
        >>> [block.data.shape for block in batch["x"].addressable_shards]
        [(2, 2), (2, 2)]
    """
    if towers is not None and any(map(is_traced, jax.tree.leaves(batch))):
        refuse_traced("multitower.shard(..., towers=)", batch)
    return _shard_on_all(batch, place(devices, towers), towers, global_batch)


def _shard_on_all(
    batch: Any, placement: Placement, towers: int | None, global_batch: int | None
) -> Any:
    """As `shard`, on the placement of `devices` and `towers`."""
    if not isinstance(batch, LazyRows):
        parts = take_apart(batch, 0, name="batch")
    elif not placement.spans_processes:
        parts = _read(batch, np.arange(batch.num_rows))
    elif towers is None:
        size_of_towers(batch.num_rows, placement, global_batch)  # checks it
        return _read_evenly(batch, placement)
    else:
        return _read_towers(batch, placement, global_batch)
    tower_rows = size_of_towers(parts.num_rows, placement, global_batch)
    if towers is None:
        return _put_together(parts, _split_evenly(parts.rows, parts.num_rows, placement))
    return _put_together(parts, cut(parts.rows, parts.num_rows, placement, tower_rows))


def shard_on(batch: Any, placement: Placement, global_batch: int | None) -> Any:
    """As `shard` with `towers`, on a placement of this process."""
    return _shard_on_all(batch, placement, placement.num_towers, global_batch)


def prefetch(
    batches: Iterable[Any],
    size: int = 2,
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    global_batch: int | None = None,
) -> Generator[Any]:
    """Copies batches to the devices in a thread, up to `size` + 1 batches ahead of need.

    Args:
        batches: an iterable of what `shard` takes, such as host batches; it is read in a
            background thread.
        size: how many finished batches may wait, 1 or more, beside one that is being copied.
        devices: as for `shard`.
        towers: as for `shard`.
        global_batch: as for `shard`; by default the rows of the first batch.

    Yields:
        What `shard` returns for each batch, in the same order. An error of the iterable is raised
        here, after the batches before it. Closing the iterator stops the thread.

    Raises:
        BatchError: `size` is below 1, or a batch that `shard` refuses.
        ArgumentError: `batches` is not an iterable of batches.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> stream = ({"x": np.full((4, 2), i)} for i in range(3))
        >>> [int(batch["x"].sum()) for batch in mt.prefetch(stream, devices=2)]
        [0, 8, 16]
    """
    size = whole_number("size", size, 1, BatchError, ", the batches that wait on the devices")
    if not is_stream(batches):
        raise ArgumentError(
            f"batches is {shown(batches)}: pass an iterator or a list of batches. For one batch "
            "call mt.shard."
        )
    # A wrong placement is an error now, not at the first batch; a warning of it comes once.
    placement = place(devices, towers)

    def put(batch: Any, full: int | None) -> Any:
        most = global_batch if towers is None else full  # without towers, batches may grow
        return _shard_on_all(batch, placement, towers, most)

    return ahead(batches, size, put, global_batch)


def is_stream(batches: Any) -> bool:
    """Whether something can be read batch by batch; a dict or a tuple of arrays is one batch."""
    kind = type(batches)
    has_items = hasattr(kind, "__iter__") or hasattr(kind, "__getitem__")
    parts = batches if isinstance(batches, tuple) else (batches,)
    is_batch = any(isinstance(part, np.ndarray | jax.Array | TowerRows) for part in parts)
    return has_items and not is_batch and not isinstance(batches, Mapping)


def ahead(
    batches: Iterable[Any],
    size: int,
    put: Callable[[Any, int | None], Any],
    global_batch: int | None,
) -> Generator[Any]:
    """Puts batches on devices in a thread, ahead of need; as `prefetch`.

    Args:
        batches: as for `prefetch`.
        size: as for `prefetch`.
        put: `put(batch, global_batch)` returns what is yielded; it is called in the thread.
        global_batch: rows of a full batch; by default those of the first batch.
    """
    full = global_batch

    def make_ready(batch: Any) -> Any:
        nonlocal full
        if full is None:
            full = _num_rows(batch)
        return put(batch, full)

    return run_ahead(batches, size, make_ready)


def run_ahead(items: Iterable[Any], size: int, make_ready: Callable[[Any], Any]) -> Generator[Any]:
    """Makes items ready in a thread, up to `size` ahead of need.

    Args:
        items: an iterable, which is read in the thread.
        size: how many finished items may wait.
        make_ready: called in the thread with each of them.

    Yields:
        What `make_ready` returns, in the same order. An error of `make_ready` or of the iterable
        is raised here.
    """
    # `with jax.enable_x64(True)` holds only in the thread that enters it; rows are made in another.
    has_x64 = jax.dtypes.canonicalize_dtype(np.float64) == np.float64
    return _ahead(items, size, make_ready, has_x64=has_x64)


def _ahead(
    items: Iterable[Any], size: int, make_ready: Callable[[Any], Any], *, has_x64: bool
) -> Generator[Any]:
    ready: queue.Queue[tuple[bool, Any]] = queue.Queue(maxsize=size)
    closed = threading.Event()

    def put(item: tuple[bool, Any]) -> None:
        while not closed.is_set():
            try:
                return ready.put(item, timeout=0.1)
            except queue.Full:
                continue

    def work() -> None:
        try:
            with jax.enable_x64(has_x64):
                for item in items:
                    if closed.is_set():
                        return
                    put((True, make_ready(item)))
            put((False, None))
        except BaseException as error:  # whatever it is, it is raised in the reader
            put((False, error))

    thread = threading.Thread(target=work, name="multitower.prefetch", daemon=True)
    thread.start()
    _threads[thread] = closed
    exiting = _exiting  # the module's names may be gone when an iterator is freed at the very end
    try:
        while True:
            alive, item = ready.get()
            if not alive:
                if item is not None:
                    raise item
                return
            yield item
    finally:
        closed.set()
        if not exiting.is_set():
            thread.join(timeout=1.0)  # an iterable that blocks keeps only its own thread waiting


# Each running thread, and the event that stops it. A program may end while it still holds an
# iterator, and Python then ends the thread wherever it is. If that is inside of XLA, the process
# aborts, with exit code 134.
_threads = weakref.WeakKeyDictionary[threading.Thread, threading.Event]()
_exiting = threading.Event()


@atexit.register
def _stop_all() -> None:
    _exiting.set()
    running = dict(_threads)
    for closed in running.values():
        closed.set()
    for thread in running:
        thread.join(timeout=1.0)


def _read_towers(batch: LazyRows, placement: Placement, global_batch: int | None) -> Any:
    """Has this process read the rows of its own towers, and no others."""
    size = size_of_towers(batch.num_rows, placement, global_batch)
    parts, pieces = _read_pieces(batch, size, own_towers(placement))
    return _put_together(parts, placed_rows(pieces, placement, batch.num_rows))


def _read_evenly(batch: LazyRows, placement: Placement) -> Any:
    """Has this process read its devices' rows; all rows, if devices cannot share them evenly."""
    num_rows, count = batch.num_rows, len(placement.devices)
    if num_rows % count:
        whole = _read(batch, np.arange(num_rows))
        return _put_together(whole, _split_evenly(whole.rows, num_rows, placement))
    parts, pieces = _read_pieces(batch, num_rows // count, placement.local)
    homes = [placement.devices[d] for d in placement.local]
    return _put_together(parts, [stacked(copy_to(blocks, homes), placement) for blocks in pieces])


def _read(batch: LazyRows, places: np.ndarray[Any, Any]) -> BatchParts:
    parts = take_apart(batch.read(places), 0, name="batch")
    if parts.num_rows != places.size:
        raise BatchError(
            f"LazyRows: {places.size} rows were asked for and {parts.num_rows} came: "
            "read(places) must return one row for each place."
        )
    return parts


def _read_pieces(
    batch: LazyRows, size: int, owners: Sequence[int]
) -> tuple[BatchParts, list[list[np.ndarray[Any, Any]]]]:
    """Reads the rows of towers or devices, `size` each: for each array, one piece per owner."""
    places = [np.arange(owner * size, (owner + 1) * size) % batch.num_rows for owner in owners]
    parts = _read(batch, np.concatenate(places))
    starts = range(0, parts.num_rows, size)
    return parts, [[leaf[start : start + size] for start in starts] for leaf in parts.rows]


def _num_rows(batch: Any) -> int:
    if isinstance(batch, LazyRows):
        return batch.num_rows
    return take_apart(batch, 0, name="batch").num_rows


def _put_together(parts: BatchParts, rows: Sequence[Any]) -> Any:
    """The batch again, with other rows; 0-d arrays of NumPy are copied as the rows were."""
    shared = iter([x.copy() if isinstance(x, np.ndarray) else x for x in parts.shared])
    split = iter(rows)
    leaves = [next(shared) if isinstance(k, str) else next(split) for k in parts.split.kinds]
    return jax.tree.unflatten(parts.split.treedef, leaves)


def _split_evenly(rows: Sequence[Any], num_rows: int, placement: Placement) -> list[jax.Array]:
    even = num_rows % len(placement.devices) == 0
    target = placement.split if even else placement.shared
    return copy_to(rows, [target] * len(rows))

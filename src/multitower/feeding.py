"""Feeding: each tower's rows on its own device, ahead of need."""

import queue
import threading
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from multitower.devices import DeviceSpec
from multitower.errors import ArgumentError, BatchError
from multitower.lazy_rows import LazyRows
from multitower.placement import Placement, place
from multitower.processes import spans_processes, spread
from multitower.rows import Parts, take_apart


@dataclass(frozen=True, eq=False)
class TowerRows:
    """One array of a batch, cut into towers: what `shard(..., towers=T)` puts in its place.

    Attributes:
        pieces: for each tower that this process runs, its rows on its device; None for others.
        placement: which device runs which tower.
        num_rows: real rows; the rows beyond fill the last towers up.
    """

    pieces: tuple[jax.Array | None, ...]
    placement: Placement
    num_rows: int

    @property
    def tower_rows(self) -> int:
        """Rows that every tower holds, filling included."""
        return next(piece for piece in self.pieces if piece is not None).shape[0]

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was cut."""
        piece = next(piece for piece in self.pieces if piece is not None)
        return (self.num_rows, *piece.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype on the devices."""
        return next(piece for piece in self.pieces if piece is not None).dtype

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The real rows, copied back to the host."""
        if any(piece is None for piece in self.pieces):
            raise BatchError(
                f"a batch that was sharded for towers={self.placement.num_towers} over several "
                "processes: none of them has all of its rows. Pass it to a function with the same "
                "towers=, devices= and rows (global_batch=), or shard it anew."
            )
        joined = np.concatenate([np.asarray(piece) for piece in self.pieces if piece is not None])
        return joined[: self.num_rows].astype(dtype or self.dtype)


def shard(
    batch: Any,
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    global_batch: int | None = None,
) -> Any:
    """Copies each tower's rows to its device.

    Tower i gets the rows `x[i*b:(i+1)*b]`, b = rows / towers rounded up. The arrays may be changed
    or freed afterwards: they are copied.

    Of several processes, all together call it with the same batch, and each one keeps the rows of
    its own towers. Arrays may be whole in every process, or global `jax.Array`s that lie as the
    result would; `LazyRows` are read by each process where it needs them.

    Args:
        batch: a pytree of arrays with rows on axis 0; numbers and 0-d arrays are left alone. Or
            `LazyRows`.
        devices: as for `multitower.devices`.
        towers: the number of towers, for functions that were made with the same `towers`.
        global_batch: rows of a full batch; a smaller one fills the first towers and leaves the
            last ones empty, so that it fits the program compiled for full ones.

    Returns:
        The same pytree. Without `towers`: `jax.Array`s split over the devices (whole on every
        device where the rows do not divide evenly). With `towers`: `TowerRows` in place of arrays.

    Raises:
        BatchError: no rows, or row counts that differ.
        ArgumentError: leaves that are no numbers, such as strings.
        DeviceError: devices that are not there.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> batch = mt.shard({"x": np.arange(8.0).reshape(4, 2)}, devices=2)
        >>> [block.data.shape for block in batch["x"].addressable_shards]
        [(2, 2), (2, 2)]
    """
    placement = place(devices, towers)
    if isinstance(batch, LazyRows) and not placement.spans_processes:
        batch = batch.whole()
    if isinstance(batch, LazyRows) and towers is None:
        return _read_evenly(batch, placement)
    if isinstance(batch, LazyRows):
        return _read_towers(batch, placement, global_batch)
    parts = take_apart(batch, 0, name="batch")
    if towers is None:
        return _put_together(parts, _split_evenly(parts.rows, parts.num_rows, placement))
    return _put_together(parts, cut(parts.rows, parts.num_rows, placement, global_batch))


def prefetch(
    batches: Iterable[Any],
    size: int = 2,
    *,
    devices: DeviceSpec | None = None,
    towers: int | None = None,
    global_batch: int | None = None,
) -> Generator[Any]:
    """Yields sharded batches, made and copied by a thread up to `size` batches ahead.

    Args:
        batches: an iterable of what `shard` takes, such as host batches; it is read in a
            background thread.
        size: how many batches may wait, 1 or more.
        devices: as for `shard`.
        towers: as for `shard`.
        global_batch: as for `shard`; by default the rows of the first batch.

    Yields:
        What `shard` returns for each batch, in the same order. An error of the iterable is raised
        here, after the batches before it. Closing the iterator stops the thread.

    Raises:
        BatchError: `size` is below 1, or a batch that `shard` refuses.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> stream = ({"x": np.full((4, 2), i)} for i in range(3))
        >>> [int(batch["x"].sum()) for batch in mt.prefetch(stream, devices=2)]
        [0, 8, 16]
    """
    if not isinstance(size, int) or size < 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise BatchError(f"prefetch(size={size!r}): at least one batch must be able to wait.")
    place(devices, towers)  # a wrong placement is an error now, not at the first batch
    return _ahead(batches, size, devices, towers, global_batch)


def _ahead(
    batches: Iterable[Any],
    size: int,
    devices: DeviceSpec | None,
    towers: int | None,
    global_batch: int | None,
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
        full = global_batch
        try:
            for batch in batches:
                if closed.is_set():
                    return
                if full is None and towers is not None:
                    full = _num_rows(batch)
                ready_made = shard(batch, devices=devices, towers=towers, global_batch=full)
                put((True, ready_made))
            put((False, None))
        except BaseException as error:  # handed to the reader, whatever it is
            put((False, error))

    thread = threading.Thread(target=work, name="multitower.prefetch", daemon=True)
    thread.start()
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
        thread.join(timeout=1.0)  # an iterable that blocks keeps only its own thread waiting


def cut(
    rows: Sequence[Any], num_rows: int, placement: Placement, global_batch: int | None = None
) -> list[TowerRows]:
    """Cuts arrays with rows on axis 0 into towers and copies every piece to its device.

    Raises:
        BatchError: more rows than `global_batch`, or an array of all processes that lies otherwise.
    """
    tower_rows = _tower_rows(num_rows, placement, global_batch)
    rows = [np.asarray(leaf) if isinstance(leaf, TowerRows) else leaf for leaf in rows]
    pieces = [
        [_piece(leaf, tower * tower_rows, tower_rows) for tower in _own_towers(placement)]
        for leaf in rows
    ]
    return _placed(pieces, placement, num_rows)


def _own_towers(placement: Placement) -> list[int]:
    """The towers of this process, in ascending order."""
    return [tower for tower, d in enumerate(placement.owners) if d in placement.local]


def _tower_rows(num_rows: int, placement: Placement, global_batch: int | None) -> int:
    size = num_rows if global_batch is None else global_batch
    if num_rows > size:
        raise BatchError(
            f"the batch has {num_rows} rows and global_batch is {size}: the step is compiled for "
            f"at most that many. Pass global_batch={num_rows} or the largest batch there will be."
        )
    return -(-size // placement.num_towers)


def _placed(
    pieces: Sequence[Sequence[Any]], placement: Placement, num_rows: int
) -> list[TowerRows]:
    """Copies the pieces of each array, one for each tower of this process, to their devices."""
    own = _own_towers(placement)
    homes = [placement.devices[placement.owners[tower]] for tower in own]
    flat = [piece for of_leaf in pieces for piece in of_leaf]
    placed = iter(copy_to(flat, homes * len(pieces)))
    result: list[TowerRows] = []
    for _ in pieces:
        there = {tower: next(placed) for tower in own}
        towers = tuple(there.get(tower) for tower in range(placement.num_towers))
        result.append(TowerRows(towers, placement, num_rows))
    return result


def _read_towers(batch: LazyRows, placement: Placement, global_batch: int | None) -> Any:
    """Has this process read the rows of its own towers, and no others."""
    size = _tower_rows(batch.num_rows, placement, global_batch)
    parts, pieces = _read(batch, size, _own_towers(placement))
    return _put_together(parts, _placed(pieces, placement, batch.num_rows))


def _read_evenly(batch: LazyRows, placement: Placement) -> Any:
    """The same without towers; all rows, where devices cannot share them evenly."""
    num_rows, count = batch.num_rows, len(placement.devices)
    if num_rows % count:
        whole = take_apart(batch.whole(), 0, name="batch")
        return _put_together(whole, _split_evenly(whole.rows, num_rows, placement))
    parts, pieces = _read(batch, num_rows // count, placement.local)
    homes = [placement.devices[d] for d in placement.local]
    arrays = [
        jax.make_array_from_single_device_arrays(
            (num_rows, *blocks[0].shape[1:]), placement.split, copy_to(blocks, homes)
        )
        for blocks in pieces
    ]
    return _put_together(parts, arrays)


def _read(
    batch: LazyRows, size: int, owners: Sequence[int]
) -> tuple[Parts, list[list[np.ndarray[Any, Any]]]]:
    """Reads the rows of some owners, `size` each; for each array one piece an owner."""
    places = [np.arange(owner * size, (owner + 1) * size) % batch.num_rows for owner in owners]
    parts = take_apart(batch.read(np.concatenate(places)), 0, name="batch")
    if parts.num_rows != size * len(owners):
        raise BatchError(
            f"LazyRows: {size * len(owners)} rows were asked for and {parts.num_rows} came: "
            "read(places) returns one row for each of the places."
        )
    starts = range(0, parts.num_rows, size)
    return parts, [[leaf[start : start + size] for start in starts] for leaf in parts.rows]


def _num_rows(batch: Any) -> int:
    if isinstance(batch, LazyRows):
        return batch.num_rows
    return take_apart(batch, 0, name="batch").num_rows


def _put_together(parts: Parts, rows: Sequence[Any]) -> Any:
    """The batch again, with other rows."""
    shared, split = iter(parts.shared), iter(rows)
    leaves = [next(shared) if isinstance(k, str) else next(split) for k in parts.split.kinds]
    return jax.tree.unflatten(parts.split.treedef, leaves)


def ready_or_cut(
    rows: Sequence[Any], num_rows: int, placement: Placement, tower_rows: int
) -> list[TowerRows]:
    """The rows as `TowerRows` of `tower_rows` each; what is cut like that already is not copied."""
    ready = [
        leaf
        for leaf in rows
        if isinstance(leaf, TowerRows)
        and leaf.tower_rows == tower_rows
        and leaf.placement == placement
    ]
    if len(ready) == len(rows):
        return ready
    return cut(rows, num_rows, placement, tower_rows * placement.num_towers)


def refuse_tower_rows(rows: Sequence[Any]) -> None:
    """Refuses rows that were cut into towers, where there are none.

    Raises:
        ArgumentError: a batch from `shard(..., towers=T)`.
    """
    for leaf in rows:
        if isinstance(leaf, TowerRows):
            raise ArgumentError(
                f"this batch was sharded for towers={leaf.placement.num_towers}, and the function "
                "that gets it has no towers (or is traced by jax.jit and the like): pass the same "
                "towers= to both, or shard without towers."
            )


def copy_to(leaves: Sequence[Any], targets: Sequence[Any]) -> list[jax.Array]:
    """Copies leaves to devices or shardings; a `jax.Array` that lies there is not copied again.

    Host memory is copied before this returns. JAX would read it later, in the background
    (`may_alias=False` too), while the caller's loader already writes the next batch there.
    """
    own = [np.array(leaf) if isinstance(leaf, np.ndarray) else leaf for leaf in leaves]
    if any(spans_processes(target) for target in targets):
        return [spread(leaf, target) for leaf, target in zip(own, targets, strict=True)]
    return jax.device_put(own, list(targets)) if own else []


def _piece(leaf: Any, start: int, size: int) -> Any:
    """Rows start .. start+size-1, with copies of real rows where there are no more."""
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        return _piece_here(leaf, start, size)
    num_rows = leaf.shape[0]
    if start + size <= num_rows:
        return leaf[start : start + size]
    return leaf[np.arange(start, start + size) % num_rows]


def _piece_here(leaf: jax.Array, start: int, size: int) -> Any:
    """The same of an array that spans processes, from the blocks that lie in this one."""
    for block in leaf.addressable_shards:
        first, end, _ = block.index[0].indices(leaf.shape[0])
        is_whole = block.data.shape[1:] == leaf.shape[1:]
        if is_whole and first <= start and (start + size <= end or (first, end) == (0, len(leaf))):
            return _piece(block.data, start - first, size)
    raise BatchError(
        f"an array of all processes, shape {leaf.shape}, with {leaf.sharding}: rows {start} to "
        f"{start + size - 1} go to a tower of process {jax.process_index()}, and none of its "
        "devices has all of them. Make the batch with mt.shard(..., towers=), from LazyRows or "
        "from arrays that every process has whole."
    )


def _split_evenly(rows: Sequence[Any], num_rows: int, placement: Placement) -> list[jax.Array]:
    even = num_rows % len(placement.devices) == 0
    target = placement.split if even else placement.shared
    return copy_to(rows, [target] * len(rows))

"""Tower rows: an array cut into towers, each one's rows on its own device."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import ArgumentError, BatchError, whole_number
from multitower.processes.together import spans_processes, spread
from multitower.towers.placement import Placement
from multitower.towers.refusals import refuse_foreign_array


@dataclass(frozen=True, eq=False)
class TowerRows:
    """One array of a batch, split into towers on their devices; made by `shard(..., towers=T)`.

    Attributes:
        pieces: for each tower that this process runs, its rows on its device, shape
            (tower_rows, ...); None for the towers of other processes.
        placement: which device runs which tower.
        num_rows: the number of real rows; the rows after them, in the last towers, are copies.
        sample: the bytes of a few rows, to compare between processes; empty if it is not needed.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> rows = mt.shard(np.arange(5.0), towers=3, devices=2)
        >>> rows
        TowerRows(float32[5], towers=3)
        >>> rows.tower_rows, rows.pieces[2].tolist()
        (2, [4.0, 0.0])
        >>> np.asarray(rows).tolist()
        [0.0, 1.0, 2.0, 3.0, 4.0]
    """

    pieces: tuple[jax.Array | None, ...]
    placement: Placement
    num_rows: int
    sample: bytes = b""

    @functools.cached_property
    def piece(self) -> jax.Array:
        """The first of the pieces that this process has."""
        return next(piece for piece in self.pieces if piece is not None)

    @property
    def tower_rows(self) -> int:
        """Rows that every tower holds, copies included."""
        return self.piece.shape[0]

    @functools.cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of the array that was cut."""
        return (self.num_rows, *self.piece.shape[1:])

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> Any:
        """The dtype on the devices."""
        return self.piece.dtype

    def __repr__(self) -> str:
        """One line, because JAX's errors quote an argument that they do not take."""
        kind = f"{self.dtype}{list(self.shape)}"
        return f"TowerRows({kind}, towers={self.placement.num_towers})"

    def counts(self, tower: int) -> tuple[int, int, int]:
        """How many real rows a tower has.

        Args:
            tower: its number, from 0.

        Returns:
            Its number, how many real rows it has, and how many all towers have.
        """
        real = min(max(self.num_rows - tower * self.tower_rows, 0), self.tower_rows)
        return tower, real, self.num_rows

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        """The real rows, copied back to the host."""
        joined = np.concatenate([np.asarray(piece) for piece in self._all_pieces()])
        return joined[: self.num_rows].astype(dtype or self.dtype)

    def whole(self) -> jax.Array:
        """Brings the real rows together, on the device of the first tower.

        Returns:
            The array that was cut, shape (num_rows, ...).

        Raises:
            BatchError: some of them are in other processes.
        """
        home = self.placement.devices[self.placement.owners[0]]
        return jnp.concatenate(jax.device_put(self._all_pieces(), home))[: self.num_rows]

    def _all_pieces(self) -> list[jax.Array]:
        if any(piece is None for piece in self.pieces):
            raise BatchError(
                f"a batch that was sharded for towers={self.placement.num_towers} over several "
                "processes: none of them has all of its rows. Pass it to a function with the same "
                "towers=, devices= and rows (global_batch=); for a step with stages= shard it with "
                "devices=list(step.placement.devices). Or pass the batch as it was."
            )
        return [piece for piece in self.pieces if piece is not None]


def cut(
    rows: Sequence[Any], num_rows: int, placement: Placement, tower_rows: int
) -> list[TowerRows]:
    """Cuts arrays with rows on axis 0 into towers and copies every piece to its device.

    If all of them are cut in this way already, nothing is copied: of several processes none has the
    rows of all towers, so that it could not cut them again.

    Raises:
        BatchError: a global array that is split in another way, so that this process does not have
            the rows of its towers.
    """
    ready = [
        leaf
        for leaf in rows
        if isinstance(leaf, TowerRows)
        and leaf.tower_rows == tower_rows
        and leaf.placement == placement
    ]
    if len(ready) == len(rows):
        return ready
    rows = [leaf.whole() if isinstance(leaf, TowerRows) else leaf for leaf in rows]
    starts = [tower * tower_rows for tower in own_towers(placement)]
    pieces = [_pieces(leaf, starts, tower_rows) for leaf in rows]
    placed = placed_rows(pieces, placement, num_rows)
    if not placement.spans_processes:
        return placed
    return [
        replace(towers, sample=sample_of(leaf)) if isinstance(leaf, np.ndarray) else towers
        for towers, leaf in zip(placed, rows, strict=True)
    ]


def sample_of(leaf: Any) -> bytes:
    """The bytes of the first, the middle and the last row of an array, or of a number."""
    if not np.ndim(leaf) or not np.size(leaf):
        return np.asarray(leaf).tobytes()
    last = leaf.shape[0] - 1
    return b"".join(np.asarray(leaf[row]).tobytes() for row in (0, last // 2, last))


def own_towers(placement: Placement) -> list[int]:
    """The towers of this process, in ascending order."""
    return [tower for tower, d in enumerate(placement.owners) if d in placement.local]


def size_of_towers(num_rows: int, placement: Placement, global_batch: int | None) -> int:
    """Rows that every tower holds: those of a full batch, divided by towers and rounded up.

    Raises:
        BatchError: more rows than `global_batch`, or it is not a whole number above 0.
    """
    size = num_rows
    if global_batch is not None:
        size = whole_number("global_batch", global_batch, 1, BatchError)
    if num_rows > size:
        raise BatchError(
            f"the batch has {num_rows} rows and global_batch is {size}, which was passed, or else "
            f"is the rows of the first batch. Pass global_batch={num_rows}, or the rows of the "
            "largest batch there will be."
        )
    return placement.tower_rows(size)


def placed_rows(
    pieces: Sequence[Sequence[Any]], placement: Placement, num_rows: int
) -> list[TowerRows]:
    """Copies each array's pieces, one for each tower of this process, to the towers' devices."""
    own = own_towers(placement)
    homes = [placement.devices[placement.owners[tower]] for tower in own]
    flat = [piece for of_leaf in pieces for piece in of_leaf]
    placed = iter(copy_to(flat, homes * len(pieces)))
    result: list[TowerRows] = []
    for _ in pieces:
        there = {tower: next(placed) for tower in own}
        towers = tuple(there.get(tower) for tower in range(placement.num_towers))
        result.append(TowerRows(towers, placement, num_rows))
    return result


def refuse_tower_rows(rows: Sequence[Any]) -> None:
    """Refuses rows that were cut into towers, for a function that has no towers.

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


def _pieces(leaf: Any, starts: Sequence[int], size: int) -> list[Any]:
    """Rows start .. start+size-1 for each start; beyond the last row, copies of real rows.

    Raises:
        BatchError: no device of this process has all rows of a piece, and the array is not whole in
            this process.
    """
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        found = [_piece_of_block(leaf, start, size) for start in starts]
        missing = [start for start, piece in zip(starts, found, strict=True) if piece is None]
        if not missing:
            return found
        if not leaf.is_fully_addressable:
            raise BatchError(
                f"an array of all processes, shape {leaf.shape}, with {leaf.sharding}: rows "
                f"{missing[0]} to {missing[0] + size - 1} go to a tower of process "
                f"{jax.process_index()}, and none of its devices has all of them. Make the batch "
                "with mt.shard(..., towers=), from LazyRows or from arrays that every process has "
                "whole."
            )
        leaf = on_one_device(leaf)
    return [_piece(leaf, start, size) for start in starts]


def on_one_device(leaf: Any) -> Any:
    """A leaf on one device, so that indexing cannot change its bits.

    If an array on several devices is indexed, XLA may compute a sum over the devices, and
    -0.0 + 0.0 is 0.0. An array that is split over several processes is returned unchanged.

    Raises:
        BatchError: `TowerRows` of several processes.
    """
    if isinstance(leaf, TowerRows):
        return leaf.whole()
    if not isinstance(leaf, jax.Array) or len(leaf.sharding.device_set) == 1:
        return leaf
    if leaf.is_fully_replicated:
        return leaf.addressable_shards[0].data
    if leaf.is_fully_addressable:
        # Given a device, JAX leaves explicit axes of the old mesh in the type of the array.
        home = leaf.addressable_shards[0].device
        return jax.device_put(leaf, jax.sharding.SingleDeviceSharding(home))
    return leaf


def rows_at(leaf: Any, places: np.ndarray[Any, Any], where: Callable[[], str]) -> Any:
    """The rows at some places of a data set's array, as an array of NumPy or JAX.

    Raises:
        ArgumentError: an array of another library that cannot be asked for places.
    """
    if isinstance(leaf, jax.Array) and len(homes := leaf.devices()) == 1:
        # An array that is bound to no device gives rows that are bound to none.
        home = next(iter(homes)) if leaf.committed else None
        return _rows_at(leaf, jax.device_put(places.astype(np.int32), home))
    if isinstance(leaf, np.ndarray | jax.Array):
        return leaf[places]
    by_place = getattr(leaf, "iloc", leaf)  # pandas: [places] would look for labels, not for rows
    try:
        return np.asarray(by_place[places])
    except TypeError:
        refuse_foreign_array(leaf, where)
        raise


@jax.jit
def _rows_at(leaf: jax.Array, places: jax.Array) -> jax.Array:
    """Some rows. JAX's indexing would copy places itself, which `jax.transfer_guard` may refuse."""
    return leaf[places]


@functools.partial(jax.jit, static_argnums=(2, 3))
def _rows_from(leaf: jax.Array, start: jax.Array, size: int, goes_on: bool) -> jax.Array:
    """Some rows from `start` on; after the last row it goes on with the first, if so asked."""
    if goes_on:
        return leaf[(start + jnp.arange(size, dtype=start.dtype)) % leaf.shape[0]]
    return jax.lax.dynamic_slice_in_dim(leaf, start, size)


def _piece(leaf: Any, start: int, size: int) -> Any:
    num_rows = leaf.shape[0]
    goes_on = start + size > num_rows
    if isinstance(leaf, jax.Array):
        first = jax.device_put(np.int32(start), *leaf.devices())
        return _rows_from(leaf, first, size, goes_on)
    if goes_on:
        return leaf[np.arange(start, start + size) % num_rows]
    return leaf[start : start + size]


def _piece_of_block(leaf: jax.Array, start: int, size: int) -> Any:
    """Rows start .. start+size-1 from a block of this process that has all of them, or None."""
    for block in leaf.addressable_shards:
        first, end, _ = block.index[0].indices(leaf.shape[0])
        is_whole = block.data.shape[1:] == leaf.shape[1:]
        if is_whole and first <= start and (start + size <= end or (first, end) == (0, len(leaf))):
            return _piece(block.data, start - first, size)
    return None

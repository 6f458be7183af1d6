"""The same-bits engine: a tower job as one-device programs and additions in a fixed order.

1. *tower program*: one executable per device, run once per tower on the tower's device;
2. *reduction*: additions along the tree of `reduction`, on each device and then between devices;
3. *finish program*: one executable per device, on the totals.

Blocks, if a job has any, end with the reduction: what is made of them is the caller's.

The number of devices decides only where these run and how often, so the bits cannot depend on it.
"""

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines import reduction
from multitower.engines.executable import compile_for_each, signature
from multitower.engines.job import Job, Shared
from multitower.engines.packing import Packed, pack, unpack
from multitower.towers.placement import Placement
from multitower.towers.rows import Tower
from multitower.towers.split import TowerRows

_SCALE = np.float64  # float32 on the device, unless jax_enable_x64 asks for more


class TowerSums(NamedTuple):
    """What one tower returns to be added up, or a sum of several.

    Attributes:
        packed: means and sums.
        blocks: as in `TowerResult`; of a total on a device, for each of its towers the rows.
    """

    packed: Packed
    blocks: Any


# What is called with (stage, place, sums): ("tower program", tower, what the tower returns), then
# ("reduction", local device, the totals there).
Tap = Callable[[str, int, TowerSums], None]

_tap: ContextVar[Tap | None] = ContextVar("tap", default=None)


@contextmanager
def tapped(tap: Tap) -> Generator[None]:
    """Shows what passes from one stage to the next, to find where two runs part.

    The next program overwrites what is shown: `tap` copies what it keeps. It makes steps slow.
    """
    token = _tap.set(tap)
    try:
        yield
    finally:
        _tap.reset(token)


class Finished(NamedTuple):
    """What a job leaves.

    Attributes:
        results: what `finish` returns, once per local device; nothing if there are no sums.
        rows: the rows that each local tower returned, by tower, on the tower's device.
        blocks: for each local tower its row of the total of every block, on the tower's device.
    """

    results: list[Any]
    rows: dict[int, Any]
    blocks: dict[int, list[jax.Array]]


class _Programs(NamedTuple):
    """Executables, one per local device each."""

    tower: list[jax.stages.Compiled]
    add: list[jax.stages.Compiled]
    finish: list[jax.stages.Compiled]


class SameBits:
    """Runs one job on one placement; compiles once for all arguments of the same shapes."""

    def __init__(self, job: Job, placement: Placement) -> None:
        self._job = job
        self._placement = placement
        self._devices = [placement.devices[d] for d in placement.local]
        self._towers_on = [placement.towers_on[d] for d in placement.local]
        plan = reduction.plan(placement)
        self._schedules = [reduction.schedule(plan.parts[d]) for d in placement.local]
        self._num_parts = plan.num_parts
        self._reduce = reduction.make_reduction(placement) if len(placement.devices) > 1 else None
        self._compiled: dict[Any, _Programs] = {}
        self._constants: dict[tuple[int, Any, Any], jax.Array] = {}

    def run(self, replicas: Sequence[Shared], rows: Sequence[TowerRows]) -> Finished:
        """Runs the job; nothing here waits for a device.

        Args:
            replicas: what every tower gets, once per local device, on that device; the `state`
                in it is overwritten.
            rows: the split arrays.
        """
        programs = self._programs(replicas[0], rows)
        tap = _tap.get()
        stacks: list[list[TowerSums]] = [[] for _ in self._devices]
        returned: dict[int, Any] = {}
        # Slot by slot over all devices, so that all of them have work from the start.
        for slot in range(max(len(schedule) for schedule in self._schedules)):
            for i, schedule in enumerate(self._schedules):
                if slot < len(schedule):
                    tower, num_additions = schedule[slot]
                    sums, returned[tower] = self._tower(i, tower, programs, replicas[i], rows)
                    if tap is not None:
                        tap("tower program", tower, sums)
                    stacks[i].append(sums)
                    for _ in range(num_additions if sums.packed.buffers else 0):
                        right = stacks[i].pop()
                        stacks[i].append(programs.add[i](stacks[i].pop(), right))
        if not stacks[0][0].packed.buffers:
            return Finished([], returned, {})
        totals = self._reduced(stacks)
        if tap is not None:
            for i, total in enumerate(totals):
                tap("reduction", i, total)
        finished = [
            finish(replicas[i].state, totals[i].packed, self._scale(i, rows))
            for i, finish in enumerate(programs.finish)
        ]
        blocks = {tower: rows for total in totals for tower, rows in total.blocks.items()}
        return Finished(finished, returned, blocks)

    def _tower(
        self, i: int, tower: int, programs: _Programs, shared: Shared, rows: Sequence[TowerRows]
    ) -> tuple[TowerSums, Any]:
        tower_rows = rows[0].tower_rows
        num_real = min(max(rows[0].num_rows - tower * tower_rows, 0), tower_rows)
        counts = (tower, num_real, rows[0].num_rows)
        here = Tower(*(self.constant(i, np.int32(count)) for count in counts))
        return programs.tower[i](shared, [leaf.pieces[tower] for leaf in rows], here)

    def _reduced(self, stacks: list[list[TowerSums]]) -> list[TowerSums]:
        """The totals on every local device."""
        if self._reduce is None and not stacks[0][0].blocks:
            return [TowerSums(stacks[0][0].packed, {})]
        if self._reduce is None:
            self._reduce = reduction.make_reduction(self._placement)
        layout = stacks[0][0].packed.layout
        buffers: list[list[jax.Array]] = []
        blocks: list[list[jax.Array]] = []
        for part in range(self._num_parts):
            # A device with fewer parts sends its last one again; nobody reads it.
            own = [stack[min(part, len(stack) - 1)] for stack in stacks]
            buffers.append(self._global([sums.packed.buffers for sums in own]))
            blocks.append(self._global([sums.blocks for sums in own]))
        total = self._reduce(buffers, blocks)
        whole = [on_each_device(buffer, self._devices) for buffer in total.buffers]
        cut = [[on_each_device(row, self._devices) for row in block] for block in total.blocks]
        return [
            TowerSums(
                Packed(tuple(buffer[i] for buffer in whole), layout),
                {t: [block[slot][i] for block in cut] for slot, t in enumerate(towers)},
            )
            for i, towers in enumerate(self._towers_on)
        ]

    def _global(self, own: Sequence[Sequence[jax.Array]]) -> list[jax.Array]:
        """Global arrays with the devices' blocks, of each device a list, stacked along axis 0."""
        arrays: list[jax.Array] = []
        for blocks in zip(*own, strict=True):
            shape = (blocks[0].shape[0] * len(self._placement.devices), *blocks[0].shape[1:])
            arrays.append(
                jax.make_array_from_single_device_arrays(shape, self._placement.split, list(blocks))
            )
        return arrays

    def _scale(self, i: int, rows: Sequence[TowerRows]) -> jax.Array:
        """What turns sums into means, a scalar on local device i."""
        return self.constant(i, _SCALE(rows[0].tower_rows / rows[0].num_rows))

    def constant(self, i: int, value: np.generic) -> jax.Array:
        """A scalar on local device i, copied there once."""
        key = (i, value.item(), jax.dtypes.canonicalize_dtype(value.dtype))
        if key not in self._constants:
            self._constants[key] = jax.device_put(value, self._devices[i])
        return self._constants[key]

    def _programs(self, shared: Shared, rows: Sequence[TowerRows]) -> _Programs:
        pieces = [next(p for p in leaf.pieces if p is not None) for leaf in rows]
        key = signature((shared, pieces))
        if key not in self._compiled:
            self._compiled[key] = self._compile(shared, pieces)
        return self._compiled[key]

    def _compile(self, shared: Shared, pieces: list[jax.Array]) -> _Programs:
        job = self._job
        scalar = jax.ShapeDtypeStruct((), np.int32)

        def tower(shared: Shared, rows: list[Any], here: Tower) -> tuple[TowerSums, Any]:
            result = job.tower(shared, rows, here)
            return TowerSums(pack((result.means, result.sums)), list(result.blocks)), result.rows

        def finish(state: Any, totals: Packed, scale: jax.Array) -> Any:
            means, sums = jax.tree.map(with_one_nan, unpack(totals))
            means = jax.tree.map(lambda x: (x * scale).astype(x.dtype), means)
            return job.finish(state, means, sums)

        towers = compile_for_each(
            tower, (shared, pieces, Tower(scalar, scalar, scalar)), self._devices
        )
        sums: TowerSums = towers[0].out_info[0]
        if not sums.packed.buffers:
            return _Programs(towers, [], [])
        adds = []
        if any(additions for schedule in self._schedules for _, additions in schedule):
            adds = compile_for_each(_add, (sums, sums), self._devices, donate=(0,))
        arguments = (
            shared.state,
            sums.packed,
            jax.ShapeDtypeStruct((), jax.dtypes.canonicalize_dtype(_SCALE)),
        )
        finishes = compile_for_each(finish, arguments, self._devices, donate=(0,))
        return _Programs(towers, adds, finishes)


def on_each_device(leaf: jax.Array, devices: Sequence[jax.Device]) -> list[jax.Array]:
    """This array's block on each of the given devices; every device must hold one."""
    blocks = {shard.device: shard.data for shard in leaf.addressable_shards}
    return [blocks[device] for device in devices]


def _add(left: TowerSums, right: TowerSums) -> TowerSums:
    a, treedef = jax.tree.flatten(left)
    return jax.tree.unflatten(treedef, reduction.add_buffers(a, jax.tree.leaves(right)))


def with_one_nan(total: jax.Array) -> jax.Array:
    """One NaN for all: which of two an addition passes on depends on the order of its operands."""
    if not jnp.issubdtype(total.dtype, jnp.inexact):
        return total
    return jnp.where(jnp.isnan(total), jnp.full_like(total, jnp.nan), total)

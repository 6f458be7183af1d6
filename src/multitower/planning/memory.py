"""Memory: what a layout keeps on a device, and the most that it needs in addition.

The most memory is needed at one of a few moments of a step: while a tower runs and the most sums
wait, in the exchange between devices, or in the update. Each is computed from shapes and from the
compiler's report on the programs. Only the exchange is a formula, for any number of devices. It was
fitted to XLA's programs for 1 to 8 CPU devices.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from multitower.engines import reduction
from multitower.engines.packing import SMALL
from multitower.functions.outputs import wide
from multitower.planning.shapes import StateBytes, num_bytes
from multitower.steps.state.fields import Fields
from multitower.towers.blocks import BlockLayout
from multitower.towers.leaf_shards import split_axis
from multitower.towers.placement import contiguous


@dataclass(frozen=True)
class Memory:
    """Bytes on the device that needs the most.

    Attributes:
        parameters: bytes of the parameters.
        optimizer_state: bytes of the optimizer's state.
        average: bytes of the moving average.
        rest: bytes of the model state, the key, the step count, and large arrays that the loss
            closes over.
        rows: bytes of the device's rows of the batch.
        gradients: bytes of the sums that wait while a tower runs, and of that tower's own.
        activations: temporary bytes of a tower's program, as the compiler counts them.
        update: bytes of the sums and temporary bytes in the exchange or the update, which come
            after the towers.
    """

    parameters: int
    optimizer_state: int
    average: int
    rest: int
    rows: int
    gradients: int
    activations: int
    update: int

    @property
    def total(self) -> int:
        """The most bytes at any moment: either towers run, or the update is made."""
        kept = self.parameters + self.optimizer_state + self.average + self.rest + self.rows
        return kept + max(self.gradients + self.activations, self.update)


class Spread(NamedTuple):
    """Towers on devices, in numbers.

    Attributes:
        num_devices: the number of devices.
        num_towers: the number of towers.
        slots: towers of the device that has the most.
        depth: the most sums on a device at a time, including that of the running tower.
        num_parts: partial sums that a device sends.
    """

    num_devices: int
    num_towers: int
    slots: int
    depth: int
    num_parts: int

    @classmethod
    def of(cls, num_devices: int, num_towers: int) -> "Spread":
        """Spreads towers over devices; the devices need not exist."""
        stand_ins: Any = range(num_devices)
        plan = reduction.plan(contiguous(stand_ins, num_towers))
        schedules = [reduction.schedule(parts) for parts in plan.parts]
        return cls(
            num_devices,
            num_towers,
            max(map(len, schedules)),
            max(map(deepest, schedules)),
            plan.num_parts,
        )


def deepest(schedule: Sequence[tuple[int, int]]) -> int:
    """The most sums on a device at a time, including that of the running tower."""
    waiting = most = 0
    for _, additions in schedule:
        most = max(most, waiting + 1)
        waiting += 1 - additions
    return most


def without_towers(state: StateBytes, rows: int, gradients: int, working: int) -> Memory:
    """Memory of a step without `towers=`; `working` is what its program needs beside arguments."""
    gradients = min(gradients, working)
    return Memory(*state, rows, gradients, working - gradients, 0)


def with_towers(
    state: StateBytes,
    tower: tuple[int, Sequence[int], int],
    update: int,
    spread: Spread,
) -> Memory:
    """Memory of a step with `towers=`.

    Args:
        state: bytes of the state.
        tower: for one tower the bytes of its rows, of each buffer that it returns, and of what its
            program needs in addition.
        update: bytes that the update needs beside the state and the sums.
        spread: towers on devices.
    """
    rows, buffers, temporary = tower
    sums = sum(buffers)
    exchange = 0
    if spread.num_devices > 1:
        exchange = spread.num_parts * sums + exchange_bytes(buffers, spread)
    return Memory(
        *state,
        rows * spread.slots,
        sums * spread.depth,
        temporary,
        max(exchange, sums + update),
    )


def with_blocks(
    state: StateBytes,
    fields: Fields,
    tower: tuple[int, Sequence[int], int],
    optimizer: Any,
    spread: Spread,
) -> Memory:
    """Memory of a step with `towers=` and `shard_update=True`; arguments as for `with_towers`."""
    rows, buffers, temporary = tower
    blocks = BlockLayout.of(fields.params, spread.num_towers)
    block = blocks.shapes_of_block()
    own_state = num_bytes(jax.eval_shape(optimizer.init, block)) * spread.slots
    average = 0
    if fields.ema_params is not None:
        average = spread.slots * num_bytes(
            jax.eval_shape(lambda tree: jax.tree.map(wide, tree), block)
        )
    row_bytes = block_rows(fields, spread.num_towers)
    sent = [size * spread.num_devices * spread.slots for size in row_bytes]
    packed = max(0, sum(buffers) - sum_bytes(fields.params))
    sums = packed + spread.num_towers * sum(row_bytes)
    own_rows = spread.slots * sum(row_bytes)
    own_params = spread.slots * num_bytes(block)
    largest = max(sent)
    if spread.num_parts > 1:
        # Some parts are arranged while others have arrived. How the compiler packs them is not
        # known: one row more is the middle of what it needed in the programs of the tests.
        largest = max(largest, sum(sent) - largest) + sum(row_bytes)
    elif spread.slots == 1 and largest > sum(sent) - largest:
        largest -= largest // spread.num_devices  # its own part stays on the device
    exchange = spread.num_parts * (sums + sum(sent)) + largest + own_rows + packed
    gather = own_rows + own_params + state.parameters + _gather_bytes(blocks, spread)
    return Memory(
        state.parameters,
        own_state,
        average,
        state.rest,
        rows * spread.slots,
        sums * spread.depth,
        temporary + _filled_bytes(fields, blocks),
        max(exchange, gather),
    )


def with_shards(
    state: StateBytes,
    fields: Fields,
    rows: int,
    program: tuple[int, int],
    num_devices: int,
    *,
    params: bool,
) -> Memory:
    """Memory of a step without `towers=` whose state is split over the devices.

    Args:
        state: bytes of the whole state.
        fields: the state.
        rows: bytes of a device's rows.
        program: bytes that it needs beside its arguments, and the number of devices for which it
            was compiled.
        num_devices: the planned number of devices.
        params: whether parameters and gradients are split, too.
    """
    working, compiled_for = program
    own = shard_bytes(fields.params, num_devices)
    # For more devices than it was compiled for this is an upper bound: nothing is subtracted.
    gradients = min(own, working)
    activations = working - gradients
    if params and compiled_for == 1:  # a gathered leaf and its gradient are whole for a moment
        activations += 2 * max(map(num_bytes, jax.tree.leaves(fields.params)), default=0)
    return Memory(
        own if params else state.parameters,
        shard_bytes(fields.opt_state, num_devices),
        shard_bytes(fields.ema_params, num_devices),
        state.rest,
        rows,
        gradients,
        activations,
        0,
    )


def is_split(leaf: Any, num_devices: int) -> bool:
    """Whether a leaf is split over the devices, not whole on each."""
    return split_axis(leaf, num_devices) is not None


def shard_bytes(tree: Any, num_devices: int) -> int:
    """Bytes of a device's part of a tree."""
    return sum(
        num_bytes(leaf) // (num_devices if is_split(leaf, num_devices) else 1)
        for leaf in jax.tree.leaves(tree)
    )


def block_rows(fields: Fields, num_towers: int) -> list[int]:
    """Bytes of a tower's row of the gradients, for each buffer."""
    layout = BlockLayout.of(fields.params, num_towers)
    rows: dict[int, int] = {}
    for place, dtype in zip(layout.places, layout.dtypes, strict=True):
        rows[place.buffer] = rows.get(place.buffer, 0) + place.size * max(4, dtype.itemsize)
    return [rows[buffer] for buffer in sorted(rows)]


def exchange_bytes(buffers: Sequence[int], spread: Spread) -> int:
    """Bytes that the program that sums over devices needs beside the parts.

    It is an upper bound for two devices that copy small sums.
    """
    large = [size for size in buffers if size > reduction.SMALL_BYTES]
    small = sum(buffers) - sum(large)
    needed = spread.num_parts * small * spread.num_devices
    if large:
        largest = max(large)
        is_even = all(size % (4 * spread.num_devices) == 0 for size in large)
        again = sum(large) if is_even else max(largest, sum(large) - largest)
        needed += spread.num_parts * sum(large) + largest - again // spread.num_devices
        if spread.num_parts > 1 and not is_even and jax.__version_info__ < (0, 12):
            # Its compilers keep the parts that are filled up.
            needed += spread.num_parts * sum(large) // spread.num_devices
    # If there are several parts, the total does not take their place in memory.
    return needed + (sum(buffers) if spread.num_parts > 1 else 0)


def sum_bytes(params: Any) -> int:
    """Bytes of sums of gradients, in which 16-bit floats are float32."""
    return sum(x.size * max(4, x.dtype.itemsize) for x in jax.tree.leaves(params))


def _filled_bytes(fields: Fields, blocks: BlockLayout) -> int:
    """Bytes that a tower's program needs to pad a large gradient to a multiple of the towers."""
    pairs = zip(jax.tree.leaves(fields.params), blocks.places, strict=True)
    filled = [
        num_bytes(leaf)
        for leaf, place in pairs
        if leaf.size > SMALL and place.size * blocks.num_towers != leaf.size
    ]
    return max(filled, default=0)


def _gather_bytes(blocks: BlockLayout, spread: Spread) -> int:
    """Bytes that the all-gather of parameters needs beside its arguments and results."""
    buffers: dict[int, list[tuple[int, bool]]] = {}
    for place, shape, dtype in zip(blocks.places, blocks.shapes, blocks.dtypes, strict=True):
        size = place.size * blocks.num_towers
        is_whole = size == math.prod(shape)
        buffers.setdefault(place.buffer, []).append((size * dtype.itemsize, is_whole))
    sent = spread.num_devices * spread.slots  # a device with fewer towers sends its last one again
    is_even = sent == blocks.num_towers
    arrived, own = 0, list[int]()
    for leaves in buffers.values():
        size = sum(size for size, _ in leaves)
        own.append(size // spread.num_devices)
        # A buffer that is one leaf arrives in its place.
        if len(leaves) > 1 or not is_even or not leaves[0][1]:
            arrived += size * sent // blocks.num_towers
        if len(leaves) > 1 and not is_even:
            arrived += size  # without what was sent again
    if spread.slots == 1 or not is_even:
        return arrived
    # A device's rows are put together first, where there is room among the results.
    if not arrived:
        return sum(sorted(own)[-2:])
    largest = max(size for leaves in buffers.values() for size, _ in leaves)
    return arrived + (max(own) if max(own) > largest else 0)

"""Traffic: bytes that a device sends in a step, and in how many messages.

Collectives over D devices are counted for the best algorithm: an all-gather or a reduce-scatter
sends (D-1)/D of the whole in D-1 messages, and an all-reduce twice as much.
"""

from collections.abc import Sequence
from typing import NamedTuple

import jax

from multitower.engines import reduction
from multitower.planning.memory import Spread, block_rows, is_split, sum_bytes
from multitower.planning.shapes import num_bytes
from multitower.steps.state.fields import Fields
from multitower.towers.blocks import BlockLayout


class Traffic(NamedTuple):
    """What a device sends in a step."""

    num_bytes: int = 0
    messages: int = 0

    def plus(self, other: "Traffic") -> "Traffic":
        """The sum of two."""
        return Traffic(self.num_bytes + other.num_bytes, self.messages + other.messages)


def without_towers(buffers: Sequence[int], num_devices: int) -> Traffic:
    """Traffic of a step without `towers=`: an all-reduce of every buffer.

    The compiler may join some of them, which saves messages.
    """
    return Traffic(2 * _share(sum(buffers), num_devices), 2 * (num_devices - 1) * len(buffers))


def with_towers(buffers: Sequence[int], spread: Spread) -> Traffic:
    """Traffic of a step with `towers=`: sums along the fixed tree, sent to every device."""
    total = Traffic()
    others = spread.num_devices - 1
    for size in buffers:
        if size <= reduction.SMALL_BYTES:  # gathered whole
            sent = Traffic(spread.num_parts * size * others, spread.num_parts * others)
        else:  # each device sums one chunk of every part, and sends it to all
            collectives = spread.num_parts + 1
            sent = Traffic(collectives * _share(size, spread.num_devices), collectives * others)
        total = total.plus(sent)
    return total


def with_blocks(fields: Fields, buffers: Sequence[int], spread: Spread) -> Traffic:
    """Traffic with `towers=` and `shard_update`: gradients to their towers, parameters to all."""
    others = spread.num_devices - 1
    rows = block_rows(fields, spread.num_towers)
    scattered = spread.num_parts * others * spread.slots * sum(rows)
    block = BlockLayout.of(fields.params, spread.num_towers).shapes_of_block()
    gathered = others * spread.slots * num_bytes(block)
    messages = others * len(rows) * (spread.num_parts + 1)
    metrics = max(0, sum(buffers) - sum_bytes(fields.params))
    return Traffic(scattered + gathered, messages).plus(
        with_towers([metrics] if metrics else [], spread)
    )


def with_shards(fields: Fields, num_devices: int, *, params: bool) -> Traffic:
    """Traffic of a split state: gradients are reduce-scattered, and parameters gathered.

    They are gathered once, or with `params` in the forward and in the backward pass.
    """
    total = Traffic()
    gathers = 2 if params else 1
    for leaf in jax.tree.leaves(fields.params):
        size = num_bytes(leaf)
        collectives = gathers + 1 if is_split(leaf, num_devices) else 2
        sent = Traffic(collectives * _share(size, num_devices), collectives * (num_devices - 1))
        total = total.plus(sent)
    return total


def _share(size: int, num_devices: int) -> int:
    """(D-1)/D of `size` bytes."""
    return size * (num_devices - 1) // num_devices

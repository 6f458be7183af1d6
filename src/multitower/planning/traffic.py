"""Traffic: bytes that a device sends in a step, and in how many messages.

A collective over D devices is counted as the best algorithm does it: an all-gather and a
reduce-scatter send (D-1)/D of the whole in D-1 messages, an all-reduce both.
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
        """Both."""
        return Traffic(self.num_bytes + other.num_bytes, self.messages + other.messages)


def without_towers(buffers: Sequence[int], num_devices: int) -> Traffic:
    """An all-reduce of every buffer; the compiler may join some of them."""
    return Traffic(2 * _share(sum(buffers), num_devices), 2 * (num_devices - 1) * len(buffers))


def with_towers(buffers: Sequence[int], spread: Spread) -> Traffic:
    """The sums of all towers, on every device: along the fixed tree."""
    total = Traffic()
    others = spread.num_devices - 1
    for size in buffers:
        if size <= reduction.SMALL_BYTES:  # gathered whole
            sent = Traffic(spread.num_parts * size * others, spread.num_parts * others)
        else:  # each device adds one chunk of every part, and hands it out
            collectives = spread.num_parts + 1
            sent = Traffic(collectives * _share(size, spread.num_devices), collectives * others)
        total = total.plus(sent)
    return total


def with_blocks(fields: Fields, buffers: Sequence[int], spread: Spread) -> Traffic:
    """The rows of the gradients to their towers, and the new parameters to all."""
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
    """Gradients to their parts, and parameters to all: once, or forward and backward."""
    total = Traffic()
    gathers = 2 if params else 1
    for leaf in jax.tree.leaves(fields.params):
        size = num_bytes(leaf)
        collectives = gathers + 1 if is_split(leaf, num_devices) else 2
        sent = Traffic(collectives * _share(size, num_devices), collectives * (num_devices - 1))
        total = total.plus(sent)
    return total


def _share(size: int, num_devices: int) -> int:
    """(D-1)/D of so many bytes."""
    return size * (num_devices - 1) // num_devices

"""Limits: what breaks with more devices, and on how many."""

import jax

from multitower.engines.reduction import SMALL_BYTES
from multitower.planning.layouts import Room
from multitower.planning.memory import is_split
from multitower.planning.shapes import Planned, num_bytes
from multitower.planning.sizes import in_words

_MOST = 1 << 20  # devices; nobody has more


def limits_of(given: Planned, room: Room, largest_buffer: int) -> tuple[str, ...]:
    """What breaks with more devices than these, or has broken already, the first thing first.

    Args:
        given: what is planned.
        room: where it is to run.
        largest_buffer: bytes of the largest buffer that is added up over towers.
    """
    num_rows = given.batch.num_rows
    rows = (
        num_rows,
        f"rows: a device needs at least one, and the batch has {num_rows}",
    )
    count = max(1, largest_buffer // SMALL_BYTES)
    messages = (
        count,
        f"messages: a device's share of the largest sum of gradients ({in_words(largest_buffer)}) "
        f"is smaller than {in_words(SMALL_BYTES)}, so the number of messages decides how long an "
        "exchange takes",
    )
    shards = (
        _splits_up_to(given),
        "shard_params: no power of two above that divides any large parameter, so all are whole",
    )
    found = sorted([rows, messages, shards])
    words = [f"{devices} devices ({why})" for devices, why in found if devices < _MOST]
    first = found[0]
    is_past = room.num_devices > first[0]
    begin = "What has broken first" if is_past else "With more devices breaks first"
    return (f"{begin}: beyond {words[0]}.", *(f"Beyond {one}." for one in words[1:]))


def _splits_up_to(given: Planned) -> int:
    """The largest power of two by which some parameter is split."""
    count = 1
    leaves = [x for x in jax.tree.leaves(given.fields.params) if num_bytes(x)]
    while count < _MOST and any(is_split(leaf, 2 * count) for leaf in leaves):
        count *= 2
    return count

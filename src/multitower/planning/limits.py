"""Limits: what breaks with more devices, and on how many."""

from collections.abc import Sequence

import jax

from multitower.engines.reduction import SMALL_BYTES
from multitower.planning.layouts import PlannedLayout
from multitower.planning.memory import is_split
from multitower.planning.shapes import Planned
from multitower.planning.sizes import in_words
from multitower.steps.rotation.options import RotationOptions

_MOST = 1 << 20  # devices; more than any cluster has


def limits_of(
    given: Planned, largest_buffer: int, layouts: Sequence[PlannedLayout]
) -> tuple[str, ...]:
    """What stops scaling with more devices, in words.

    Args:
        given: the step, the state and the batch.
        largest_buffer: bytes of the largest buffer that is summed over towers.
        layouts: the layouts on these devices.

    Returns:
        One sentence, with the smallest number of devices first; none for asynchronous updates, in
        which no device waits for all others.
    """
    if isinstance(given.apart, RotationOptions):
        return ()
    found = [(given.batch.num_rows, "rows: further devices would have none to work on")]
    if largest_buffer > SMALL_BYTES:
        found.append(
            (
                largest_buffer // SMALL_BYTES,
                "the fixed tree: a device's share of the largest gradient, of "
                f"{in_words(largest_buffer)}, is then less than {in_words(SMALL_BYTES)}, and the "
                "number of messages decides how long an exchange takes",
            )
        )
    if given.apart is None and (most := _splits_up_to(given)) > 1:
        why = "shard_params=True: no dimension of a large parameter is divided by more"
        found.append((most, why))
    stages = max((one.options.get("stages", 0) for one in layouts), default=0)
    if stages:  # a share of 1/S, sent to D/S - 1 replicas, is more than twice the whole
        found.append(
            (
                stages * (2 * stages + 1),
                f"stages={stages}: the first replica sends the sums to every other one, more bytes "
                "than the fixed tree sends",
            )
        )
    words = [f"{devices} devices ({why})" for devices, why in sorted(found) if devices < _MOST]
    return (f"What breaks first with more devices: beyond {'; then beyond '.join(words)}.",)


def _splits_up_to(given: Planned) -> int:
    """The largest power of two into which at least one parameter is split."""
    count = 1
    leaves = jax.tree.leaves(given.fields.params)
    while count < _MOST and any(is_split(leaf, 2 * count) for leaf in leaves):
        count *= 2
    return count

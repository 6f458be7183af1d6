"""Same call: what every process must pass alike, compared at the first call."""

import zlib
from collections.abc import Sequence
from typing import Any

import jax

from multitower.errors import BatchError, warn
from multitower.processes.together import lines_of_all
from multitower.towers.leaves import is_key
from multitower.towers.placement import Placement
from multitower.towers.split import TowerRows, sample_of


def check_same_call(
    name: str, leaves: Sequence[Any], placement: Placement, counts: Sequence[int] = ()
) -> None:
    """Compares what the processes pass to a function; all together. Nothing for a single process.

    Values are compared by a few rows of what every process has whole, in a warning: rows that a
    process does not need may be missing there.

    Args:
        name: of what is passed, such as `batch`.
        leaves: what this process passes.
        placement: where the function runs.
        counts: of a call with several batches, the rows of each.

    Raises:
        BatchError: the towers, the batches, shapes or dtypes are not those of process 0; in every
            process.
    """
    if not placement.spans_processes:
        return
    shapes = f"{', '.join(_shape(leaf) for leaf in leaves)}; {placement.num_towers} towers"
    if counts:
        shapes += f"; {len(counts)} batches of {', '.join(map(str, counts))} rows"
    values = zlib.crc32(b"".join(_values(leaf) for leaf in leaves))
    # What tells them apart comes first: a line that is too long loses its end.
    lines = lines_of_all(f"{zlib.crc32(shapes.encode()):08x} {values:08x} {shapes}")
    first_shapes, first_values, first = lines[0].split(" ", 2)
    for process, line in enumerate(lines):
        own_shapes, own_values, own = line.split(" ", 2)
        if own_shapes != first_shapes:
            raise BatchError(
                f"{name}: process 0 passes {_short(first)}, and process {process} {_short(own)}. "
                "All processes make the same calls with the same whole batch, of which each one "
                "takes the rows of its own towers."
            )
        if own_values != first_values:
            warn(
                f"{name}: process {process} passes other values than process 0. Every process "
                "passes the same whole batch in the same order, not a part of it as with a "
                "DistributedSampler, and the same parameters and keys: seed them alike. Only the "
                "rows of its own towers are used (mt.LazyRows reads no others)."
            )
            return


def _shape(leaf: Any) -> str:
    dtype, shape = getattr(leaf, "dtype", type(leaf).__name__), getattr(leaf, "shape", ())
    return f"{dtype}{list(shape)}"


def _values(leaf: Any) -> bytes:
    """Some of the bits of a leaf, nothing where it is not whole in this process."""
    if isinstance(leaf, TowerRows):
        return leaf.sample
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return b""
    return sample_of(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"

"""Same call: at the first call, checks that all processes pass the same arguments."""

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
    """Compares what the processes pass to a function; call it on every process.

    It does nothing if one process runs all towers. Values are compared by a few rows of the arrays
    that every process has whole. If they differ there is only a warning, because a process may
    leave out the values of rows that it does not need.

    Args:
        name: the name of what is passed, such as `batch`.
        leaves: what this process passes.
        placement: where the function runs.
        counts: the rows of each batch, if the call has several batches.

    Raises:
        BatchError: in every process, if the number of towers, the batches, the shapes or the dtypes
            of one process are not those of process 0.
    """
    if not placement.spans_processes:
        return
    shapes = f"{', '.join(_shape(leaf) for leaf in leaves)}; {placement.num_towers} towers"
    if counts:
        shapes += f"; {len(counts)} batches of {', '.join(map(str, counts))} rows"
    values = zlib.crc32(b"".join(_values(leaf) for leaf in leaves))
    # The checksums come first, because a line that is too long loses its end.
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
                "DistributedSampler, and the same parameters and keys: use one seed. Only the "
                "rows of its own towers are used (mt.LazyRows reads no others)."
            )
            return


def _shape(leaf: Any) -> str:
    dtype, shape = getattr(leaf, "dtype", type(leaf).__name__), getattr(leaf, "shape", ())
    return f"{dtype}{list(shape)}"


def _values(leaf: Any) -> bytes:
    """The bytes of a few rows of a leaf; none if a device or process may have only a part of it."""
    if isinstance(leaf, TowerRows):
        return leaf.sample
    if isinstance(leaf, jax.Array) and len(leaf.sharding.device_set) > 1:
        return b""
    return sample_of(jax.random.key_data(leaf) if is_key(leaf) else leaf)


def _short(text: str) -> str:
    return text if len(text) <= 300 else f"{text[:140]} ... {text[-140:]}"

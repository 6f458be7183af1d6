"""Same call: checks that all processes pass the same arguments."""

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from multitower.errors import ArgumentError, BatchError, warn
from multitower.processes.together import lines_of_all, texts_of_all
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


def check_alike(
    call: str, settings: Mapping[str, Any], placement: Placement, advice: str = ""
) -> None:
    """Compares settings that decide what processes do together; call it on every process.

    A process that makes more steps or saves at other steps than another one would wait for it for
    ever, or receive what was sent for something else. It does nothing if one process runs all
    towers.

    Args:
        call: what the settings are of, such as `fit`.
        settings: JSON values by name.
        placement: where the call runs.
        advice: how to make them alike, a sentence.

    Raises:
        ArgumentError: in every process, if a setting of one process is not that of process 0.
    """
    if not placement.spans_processes:
        return
    first, *others = map(json.loads, texts_of_all(json.dumps(settings)))
    for process, other in enumerate(others, start=1):
        for name in {**first, **other}:
            # As texts, since NaN is not NaN.
            there, here = repr(first.get(name)), repr(other.get(name))
            if there != here:
                raise ArgumentError(
                    f"{call}: {name} is {_short(there)} in process 0, and {_short(here)} in "
                    f"process {process}. All processes make the same calls with the same settings."
                    f"{advice and ' '}{advice}"
                )


def check_same_program(returned: str, checksum: int, placement: Placement) -> None:
    """Compares the loss as the processes have traced it; call it on every process.

    It does nothing if one process runs all towers. If only the programs differ there is a warning,
    because two programs may compute the same.

    Args:
        returned: what the loss returns, in words.
        checksum: that of its program.
        placement: where the step runs.

    Raises:
        ArgumentError: in every process, if the loss of one returns something else than that of
            process 0.
    """
    settings = {"what it returns": returned}
    check_alike("the loss", settings, placement, "Run the same code in all of them.")
    if placement.spans_processes:
        first, *others = lines_of_all(f"{checksum:08x}")
        for process, other in enumerate(others, start=1):
            if other != first:
                warn(
                    f"the loss: process {process} has traced another program than process 0, so "
                    "that towers may compute different losses. Run the same code, with the same "
                    "versions and settings, in all processes; and let the loss depend on its "
                    "arguments alone, not on the process or the order of a set."
                )
                return


def shapes_in_words(tree: Any) -> str:
    """The dtypes and shapes of a tree's leaves with their places, for messages."""
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return ", ".join(f"{jax.tree_util.keystr(path)} {_shape(leaf)}" for path, leaf in flat)


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

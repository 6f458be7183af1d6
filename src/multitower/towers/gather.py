"""Rows of towers in several processes, side by side on every device.

One process cannot copy another's rows: all devices gather them in one program, which only moves
data. It says how: left to XLA, an index over several devices may become a sum of what each one has
of a row, and -0.0 + 0.0 is 0.0.
"""

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

from multitower.towers.placement import AXIS, Placement


def gather_rows(towers: Sequence[jax.Array], placement: Placement, num_rows: int) -> jax.Array:
    """The first `num_rows` rows of all towers, whole on every device; all processes together.

    Args:
        towers: the rows of this process's towers, in ascending order, each on its tower's device.
        placement: which device runs which tower.
        num_rows: real rows; those beyond only fill up.
    """
    own = sorted(t for d in placement.local for t in placement.towers_on[d])
    rows = dict(zip(own, towers, strict=True))
    most = max(len(there) for there in placement.towers_on)
    blocks: list[jax.Array] = []
    for d in placement.local:
        there = placement.towers_on[d]
        # A device with fewer towers sends its last one again; nobody reads it.
        padded = [rows[there[min(slot, len(there) - 1)]] for slot in range(most)]
        blocks.append(jnp.concatenate(padded))
    shape = (len(placement.devices) * blocks[0].shape[0], *blocks[0].shape[1:])
    together = jax.make_array_from_single_device_arrays(shape, placement.split, blocks)
    return _gather(placement, towers[0].shape[0], num_rows)(together)


@functools.lru_cache(maxsize=32)
def _gather(
    placement: Placement, tower_rows: int, num_rows: int
) -> Callable[[jax.Array], jax.Array]:
    most = max(len(there) for there in placement.towers_on)
    starts = {
        tower: (d * most + slot) * tower_rows
        for d, there in enumerate(placement.towers_on)
        for slot, tower in enumerate(there)
    }
    order = np.concatenate([starts[t] + np.arange(tower_rows) for t in sorted(starts)])[:num_rows]
    gather = jax.shard_map(
        lambda rows: lax.all_gather(rows, AXIS, tiled=True)[order],
        mesh=placement.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=PartitionSpec(),
        check_vma=False,
    )
    return jax.jit(gather)

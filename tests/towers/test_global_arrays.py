"""The rows of all towers together, as every process needs them; here with all devices in one."""

import jax
import numpy as np
import pytest

import multitower as mt
from multitower.towers.global_arrays import gather_rows, join_rows
from multitower.towers.placement import Placement, place


@pytest.mark.parametrize(("towers", "num_rows"), [(5, 9), (4, 8), (2, 3)])
@pytest.mark.parametrize("shape", [(), (3,), (1, 5)])
def test_rows_are_gathered_in_the_order_of_the_batch(towers, num_rows, shape):
    # The lies: rows that only fill up; the rows of another tower; -0.0 that becomes 0.0.
    placement = place(2, towers)
    rows = np.random.default_rng(0).normal(size=(2 * towers, *shape)).astype(np.float32)
    rows[3] = -0.0
    pieces = [
        jax.device_put(rows[2 * t : 2 * t + 2], placement.devices[placement.owners[t]])
        for t in range(towers)
    ]
    found = gather_rows(pieces, placement, num_rows)
    wanted = rows[:num_rows]
    assert len(found.addressable_shards) == 2
    for shard in found.addressable_shards:  # whole on every device
        np.testing.assert_array_equal(shard.data, wanted)
        np.testing.assert_array_equal(np.signbit(shard.data), np.signbit(wanted))


@pytest.mark.parametrize("num_rows", [8, 7])
@pytest.mark.parametrize("owners", [(0, 0, 1, 1), (0, 1, 0, 1), (0, 0, 0, 1)], ids=str)
def test_rows_are_joined_in_the_order_of_the_batch(owners, num_rows):
    # The lies: the rows of a device's towers next to each other, wherever they belong; rows that
    # only fill up.
    placement = Placement(tuple(mt.devices(2)), owners)
    rows = np.arange(8, dtype=np.float32)
    pieces = {
        t: jax.device_put(rows[2 * t : 2 * t + 2], placement.devices[owner])
        for t, owner in enumerate(owners)
    }
    found = join_rows(pieces, placement, num_rows)
    np.testing.assert_array_equal(found, rows[:num_rows])
    stays = owners == (0, 0, 1, 1) and num_rows == 8
    assert found.sharding == (placement.split if stays else placement.shared)

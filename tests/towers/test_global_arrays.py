"""The rows of all towers together, as every process needs them; here with all devices in one."""

import jax
import numpy as np
import pytest

from multitower.towers.global_arrays import gather_rows
from multitower.towers.placement import place


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

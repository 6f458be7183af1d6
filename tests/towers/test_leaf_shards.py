"""Which dimension of a leaf is split: a function of its shape and the number of devices alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import multitower as mt
from multitower.towers.leaf_shards import FEWEST, axis_of_parts, shardings_of, spec_of, split_axis
from multitower.towers.placement import contiguous


@pytest.mark.parametrize(
    ("shape", "num_devices", "axis"),
    [
        ((64, 256), 4, 0),  # the first
        ((64, 260), 4, 1),  # the first is far smaller
        ((130, 64), 4, 1),  # 4 does not divide the first
        ((12, 64, 256), 4, 1),  # stacked layers, and not their number
        ((3, 3, 64, 64), 3, 0),  # no other one divides
        ((67, 67), 3, None),  # nothing divides
        ((FEWEST - 1,), 3, None),  # 4095 = 3 * 1365, and it is small
        ((FEWEST,), 2, 0),
        ((FEWEST,), 1, None),  # one device has everything
        ((), 2, None),
        ((0, 64), 2, None),
    ],
)
def test_the_first_large_dimension_that_the_devices_divide(shape, num_devices, axis):
    assert split_axis(jax.ShapeDtypeStruct(shape, jnp.float32), num_devices) == axis
    assert split_axis(np.empty(shape, np.int8), num_devices) == axis  # the dtype does not matter
    spec = PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "towers")
    assert spec_of(np.empty(shape), num_devices) == spec


def test_numbers_and_keys_stay_whole():
    placement = contiguous(mt.devices(2), 2)
    found = shardings_of({"n": 1.0, "key": jax.random.key(0), "w": np.ones((64, 64))}, placement)
    assert found == {"n": placement.shared, "key": placement.shared, "w": placement.split}


def test_parts_on_other_devices_are_none_of_these():
    # The lie: an array that is split over two other devices is taken as it is.
    placement, other = (contiguous(there, 2) for there in (mt.devices(2), mt.devices(4)[2:]))
    split = jax.device_put(np.ones((64, 64)), shardings_of(np.ones((64, 64)), other))
    assert axis_of_parts(split, other) == 0
    assert axis_of_parts(split, placement) is None
    assert axis_of_parts(jax.device_put(np.ones(4), other.shared), other) is None

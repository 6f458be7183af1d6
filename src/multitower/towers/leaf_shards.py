"""Leaf shards: along which dimension a leaf of a training state is split over the devices.

A function of the shape and the number of devices alone, so that parameters, their gradients, the
optimizer's state and the moving average agree.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from multitower.towers.placement import AXIS, Placement

# A smaller leaf is whole on every device: gathering it would cost more than it takes.
FEWEST = 4096  # elements
# The hidden layer of a transformer's block is four times as wide as the block.
SMALLEST = 4  # times smaller than the largest dimension that the devices divide


def split_axis(leaf: Any, num_devices: int) -> int | None:
    """The first large dimension that the devices divide.

    Parts along the first dimension are contiguous, which makes exchanges several times as fast as
    along the last one. Of stacked layers the first dimension counts the layers, and a loop could
    not gather one of them, so a dimension that is far smaller than another one is passed over.

    Args:
        leaf: an array, or its shape and dtype.
        num_devices: how many devices there are.

    Returns:
        The axis; None for a leaf that is whole on every device: one device, fewer than `FEWEST`
        elements, or no dimension that the devices divide.
    """
    shape = np.shape(leaf)
    if num_devices == 1 or math.prod(shape) < FEWEST:
        return None
    divided = {axis: dim for axis, dim in enumerate(shape) if dim % num_devices == 0}
    largest = max(divided.values(), default=0)
    return next((axis for axis, dim in divided.items() if dim * SMALLEST >= largest), None)


def spec_of(leaf: Any, num_devices: int) -> PartitionSpec:
    """How a leaf is split, as JAX writes it."""
    axis = split_axis(leaf, num_devices)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def axis_of_parts(leaf: Any, placement: Placement) -> int | None:
    """Along which axis an array lies in parts on these devices; None if it does not."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or sharding.mesh != placement.mesh:
        return None
    if sharding.is_fully_replicated:
        return None
    axes = [axis for axis, name in enumerate(sharding.spec) if name in (AXIS, (AXIS,))]
    return axes[0] if axes else None


def shardings_of(tree: Any, placement: Placement) -> Any:
    """For each leaf of a tree where its parts are."""
    count = len(placement.devices)
    return jax.tree.map(lambda leaf: NamedSharding(placement.mesh, spec_of(leaf, count)), tree)

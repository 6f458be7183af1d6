"""Leaf shards: along which dimension a leaf of a training state is split over the devices.

The dimension depends on the shape and the number of devices alone. So parameters, their gradients,
the optimizer's state and the moving average are split in the same way.
"""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from multitower.towers.placement import AXIS, Placement

# A smaller leaf is whole on every device: gathering it would cost more than splitting it saves.
FEWEST = 4096  # elements
# The hidden layer of a transformer's block is four times as wide as the block.
SMALLEST = 4  # times smaller than the largest dimension that can be split


def split_axis(leaf: Any, num_devices: int) -> int | None:
    """The first large dimension whose size is a multiple of the number of devices.

    Parts along the first dimension are contiguous, which makes exchanges several times as fast as
    along the last one. But where layers are stacked, the first dimension counts the layers, and a
    loop over layers could not gather a single one. So a dimension that is more than `SMALLEST`
    times smaller than the largest one is skipped.

    Args:
        leaf: an array, or its shape and dtype.
        num_devices: the number of devices.

    Returns:
        The axis; None for a leaf that is whole on every device: one device, fewer than `FEWEST`
        elements, or no dimension that is a multiple of the number of devices.
    """
    shape = np.shape(leaf)
    if num_devices == 1 or math.prod(shape) < FEWEST:
        return None
    divided = {axis: dim for axis, dim in enumerate(shape) if dim % num_devices == 0}
    largest = max(divided.values(), default=0)
    return next((axis for axis, dim in divided.items() if dim * SMALLEST >= largest), None)


def spec_of(leaf: Any, num_devices: int) -> PartitionSpec:
    """The `PartitionSpec` of a leaf that is split along `split_axis`."""
    axis = split_axis(leaf, num_devices)
    return PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, AXIS)


def axis_of_parts(leaf: Any, placement: Placement) -> int | None:
    """The axis along which an array is split over these devices; None if it is not."""
    sharding = leaf.sharding if isinstance(leaf, jax.Array) else None
    if not isinstance(sharding, NamedSharding) or sharding.mesh != placement.mesh:
        return None
    if sharding.is_fully_replicated:
        return None
    axes = [axis for axis, name in enumerate(sharding.spec) if name in (AXIS, (AXIS,))]
    return axes[0] if axes else None


def shardings_of(tree: Any, placement: Placement) -> Any:
    """The same tree with the `NamedSharding` of each leaf, as `spec_of` splits it."""
    count = len(placement.devices)
    return jax.tree.map(lambda leaf: NamedSharding(placement.mesh, spec_of(leaf, count)), tree)

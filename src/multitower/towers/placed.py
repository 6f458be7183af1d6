"""Copies of a caller's arrays on devices, made once and kept while the originals exist."""

from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from multitower.towers.global_arrays import KeptCopies
from multitower.towers.split import copy_to, on_one_device


class Placed:
    """Arrays on devices, by the identity of the originals.

    NumPy arrays may change, so they are copied at every call, and so are numbers.
    """

    def __init__(self) -> None:
        self._copies = KeptCopies()

    def on(self, leaf: Any, device: jax.Device, rows: tuple[int, int] | None = None) -> jax.Array:
        """A leaf on a device, or some rows of it."""
        if not isinstance(leaf, jax.Array):
            return _copy(leaf, device, rows)
        if rows is None and leaf.sharding == SingleDeviceSharding(device):
            return leaf
        copies = self._copies.of(leaf)
        if (device, rows) not in copies:
            copies[device, rows] = _copy(leaf, device, rows)
        return copies[device, rows]


def _copy(leaf: Any, device: jax.Device, rows: tuple[int, int] | None) -> jax.Array:
    if rows is not None:
        leaf = on_one_device(leaf)[rows[0] : rows[1]]
    return copy_to([leaf], [device])[0]

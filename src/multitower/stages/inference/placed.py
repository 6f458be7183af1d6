"""Copies of a caller's arrays on devices, made once and kept while the originals exist."""

import weakref
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from multitower.towers.split import copy_to, on_one_device

# A device, and the rows `first:last` if a stage needs only some.
Place = tuple[jax.Device, tuple[int, int] | None]


class Placed:
    """Arrays on devices, by the identity of the originals.

    A `jax.Array` never changes, so its copy stays valid. NumPy arrays may change, so they are
    copied at every call, and so are numbers.
    """

    def __init__(self) -> None:
        self._copies: dict[int, tuple[Any, dict[Place, jax.Array]]] = {}

    def on(self, leaf: Any, device: jax.Device, rows: tuple[int, int] | None = None) -> jax.Array:
        """A leaf on a device, or some rows of it."""
        if not isinstance(leaf, jax.Array):
            return _copy(leaf, device, rows)
        if rows is None and leaf.sharding == SingleDeviceSharding(device):
            return leaf
        copies = self._copies_of(leaf)
        if (device, rows) not in copies:
            copies[device, rows] = _copy(leaf, device, rows)
        return copies[device, rows]

    def _copies_of(self, leaf: jax.Array) -> dict[Place, jax.Array]:
        known = self._copies.get(id(leaf))
        if known is not None and known[0]() is leaf:
            return known[1]
        all_copies, number = self._copies, id(leaf)

        def forget(gone: Any) -> None:
            if number in all_copies and all_copies[number][0] is gone:
                del all_copies[number]

        copies: dict[Place, jax.Array] = {}
        all_copies[number] = (weakref.ref(leaf, forget), copies)
        return copies


def _copy(leaf: Any, device: jax.Device, rows: tuple[int, int] | None) -> jax.Array:
    if rows is not None:
        leaf = on_one_device(leaf)[rows[0] : rows[1]]
    return copy_to([leaf], [device])[0]

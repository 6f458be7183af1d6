"""Reduction: sums over towers in one fixed order, wherever the towers run.

The order is a binary tree over the towers that depends on their number alone. IEEE addition has
one right answer, so a program that only moves data and adds along this tree gives the same bits
however it is compiled. Nothing else may be in these programs: a multiplication could be fused with
an addition, and would round once instead of twice.

A device first adds up every whole subtree it owns; only these partial sums travel. With T = D, or
with whole subtrees on every device, that is one partial sum a device: as cheap as a ring.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import jax
from jax import lax
from jax.sharding import PartitionSpec

from multitower.placement import AXIS, Placement

_T = TypeVar("_T")

# A tower's number, or the sum of two trees. In `Plan.rest` the leaves are (device, part) pairs.
Tree = Any

_SMALL_BYTES = 64 * 1024  # up to this size one message is sent instead of two


class Sum(tuple[Tree, Tree]):
    """An inner node: left plus right."""

    __slots__ = ()


def sum_tree(first: int, last: int) -> Tree:
    """The tree over towers first .. last-1: halves, and halves again, the left one larger."""
    if last - first == 1:
        return first
    middle = first + (last - first + 1) // 2
    return Sum((sum_tree(first, middle), sum_tree(middle, last)))


def evaluate(tree: Tree, leaf: Callable[[Any], _T], add: Callable[[_T, _T], _T]) -> _T:
    """Adds along a tree, left before right, so that few terms are alive at a time."""
    if not isinstance(tree, Sum):
        return leaf(tree)
    left = evaluate(tree[0], leaf, add)
    return add(left, evaluate(tree[1], leaf, add))


@dataclass(frozen=True)
class Plan:
    """Who adds what.

    Attributes:
        parts: for each device the subtrees that it adds alone, in ascending order of towers.
        rest: the tree over those partial sums, with leaves (device, part).
    """

    parts: tuple[tuple[Tree, ...], ...]
    rest: Tree

    @property
    def num_parts(self) -> int:
        """Partial sums that a device sends at most."""
        return max(len(parts) for parts in self.parts)


def plan(placement: Placement) -> Plan:
    """Splits the tree over all towers into whole subtrees per device, and the rest."""
    parts: list[list[Tree]] = [[] for _ in placement.devices]

    def descend(tree: Tree) -> Tree:
        owners = {placement.owners[tower] for tower in _towers(tree)}
        if len(owners) > 1:
            return Sum((descend(tree[0]), descend(tree[1])))
        (device,) = owners
        parts[device].append(tree)
        return (device, len(parts[device]) - 1)

    rest = descend(sum_tree(0, placement.num_towers))
    return Plan(tuple(tuple(p) for p in parts), rest)


def add_buffers(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of two lists of buffers: an additions-only program for one device."""
    return [a + b for a, b in zip(left, right, strict=True)]


def make_reduction(placement: Placement) -> Callable[..., list[jax.Array]]:
    """Builds the one program that spans devices.

    Returns:
        A jitted function of `num_parts` lists of buffers. Every buffer is a global array with the
        devices' blocks stacked along axis 0. Its result has the same form; every block is the
        total. A single list is donated.
    """
    how = plan(placement)
    num_devices = len(placement.devices)

    def on_device(*parts: list[jax.Array]) -> list[jax.Array]:
        return [_total(how, num_devices, pieces) for pieces in zip(*parts, strict=True)]

    everywhere = PartitionSpec(AXIS)
    mapped = jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=everywhere,
        out_specs=everywhere,
        check_vma=False,
    )
    # With several parts, a device may send one of its parts twice: nothing to overwrite then.
    return jax.jit(mapped, donate_argnums=() if how.num_parts > 1 else 0)


def _total(how: Plan, num_devices: int, pieces: Sequence[jax.Array]) -> jax.Array:
    """The sum over all devices of one buffer, given as this device's partial sums."""
    block = pieces[0]
    if block.nbytes <= _SMALL_BYTES:
        gathered = [lax.all_gather(piece, AXIS) for piece in pieces]
        return evaluate(how.rest, lambda at: gathered[at[1]][at[0]], lambda a, b: a + b)
    # Every device adds one chunk and hands it to all: 2 (D-1)/D of the buffer sent by each.
    padding = -block.size % num_devices
    chunks: list[jax.Array] = []
    for piece in pieces:
        flat = piece.reshape(-1)
        padded = lax.pad(flat, flat.dtype.type(0), [(0, padding, 0)]) if padding else flat
        chunks.append(lax.all_to_all(padded.reshape(num_devices, -1), AXIS, 0, 0))
    chunk = evaluate(how.rest, lambda at: chunks[at[1]][at[0]], lambda a, b: a + b)
    total = lax.all_gather(chunk, AXIS, tiled=True)
    return (total[: block.size] if padding else total).reshape(block.shape)


def _towers(tree: Tree) -> list[int]:
    return evaluate(tree, lambda tower: [tower], lambda a, b: a + b)

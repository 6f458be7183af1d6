"""Reduction: sums over towers in one fixed order, wherever the towers run.

The order is a binary tree over the towers that depends on their number alone. IEEE addition has
one right answer, so a program that only moves data and adds along this tree gives the same bits
however it is compiled. Nothing else may be in these programs: a multiplication could be fused with
an addition, and would round once instead of twice.

A device first adds up every whole subtree it owns; only these partial sums travel. With T = D, or
with whole subtrees on every device, each device sends one partial sum, as cheap as in a ring.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from multitower.towers.global_arrays import on_each_device, rows_at, stacked
from multitower.towers.placement import AXIS, Placement

_T = TypeVar("_T")

# A tower's number, or the sum of two trees. In `ReductionPlan.rest` leaves are pairs: (device,
# part).
Tree = Any

SMALL_BYTES = 64 * 1024  # up to this size, one exchange instead of two


class Sum(tuple[Tree, Tree]):
    """An inner node: left plus right."""

    __slots__ = ()


def sum_tree(first: int, last: int) -> Tree:
    """The tree over towers first .. last-1, halved again and again; left halves may be larger."""
    if last - first == 1:
        return first
    middle = first + (last - first + 1) // 2
    return Sum((sum_tree(first, middle), sum_tree(middle, last)))


def evaluate(
    tree: Tree, leaf: Callable[[Any], _T], add: Callable[[Any, Any], Any] = operator.add
) -> _T:
    """Adds along a tree, left before right, so that few terms exist at a time."""
    if not isinstance(tree, Sum):
        return leaf(tree)
    left = evaluate(tree[0], leaf, add)
    return add(left, evaluate(tree[1], leaf, add))


@dataclass(frozen=True)
class ReductionPlan:
    """Which device adds what.

    Attributes:
        parts: for each device the subtrees that it adds alone, in ascending order of towers.
        rest: the tree over those partial sums, with leaves (device, part).
    """

    parts: tuple[tuple[Tree, ...], ...]
    rest: Tree

    @property
    def num_parts(self) -> int:
        """The largest number of partial sums that a device sends."""
        return max(len(parts) for parts in self.parts)


def plan(placement: Placement) -> ReductionPlan:
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
    return ReductionPlan(tuple(tuple(p) for p in parts), rest)


def schedule(parts: Sequence[Tree]) -> list[tuple[int, int]]:
    """For each tower of a device, in order: its number, and how many additions follow it."""
    steps: list[tuple[int, int]] = []

    def descend(tree: Tree) -> None:
        if not isinstance(tree, Sum):
            steps.append((tree, 0))
            return
        descend(tree[0])
        descend(tree[1])
        tower, additions = steps[-1]
        steps[-1] = (tower, additions + 1)

    for part in parts:
        descend(part)
    return steps


def add_buffers(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> list[jax.Array]:
    """The sum of two lists of buffers: an additions-only program for one device."""
    return [a + b for a, b in zip(left, right, strict=True)]


def add_sums(left: Any, right: Any) -> Any:
    """The sum of two trees of buffers that have the same structure, as `add_buffers`."""
    buffers, treedef = jax.tree.flatten(left)
    return jax.tree.unflatten(treedef, add_buffers(buffers, jax.tree.leaves(right)))


def put(stack: list[Any], sums: Any, num_additions: int, add: Callable[..., Any] | None) -> None:
    """Puts a tower's sums on a stack, and adds up what the tree allows by now.

    Args:
        stack: the sums that wait to be added; the newest one is the last.
        sums: the tower's sums.
        num_additions: how many additions follow the tower, from `schedule`.
        add: `add_sums`, compiled for the device of these sums; None if there is nothing to add.
    """
    stack.append(sums)
    for _ in range(num_additions):
        assert add is not None
        right = stack.pop()
        stack.append(add(stack.pop(), right))


class Reduced(NamedTuple):
    """Totals over all towers.

    Attributes:
        buffers: the totals of the buffers, which every device gets.
        blocks: for each block, of shape (towers, n), the rows of the device's own towers: a list
            with one row for each slot.
    """

    buffers: list[jax.Array]
    blocks: list[Any]


def make_reduction(placement: Placement) -> Callable[..., Reduced]:
    """Builds the one program that spans devices.

    Returns:
        A jitted function of two lists, the buffers and the blocks, with an entry for each of the
        `ReductionPlan.num_parts` parts. Every array is a global one, with the devices' own arrays
        stacked along axis 0. So are the arrays of the result, where each device has the total. If
        there is only one part, its buffers are donated.
    """
    how = plan(placement)

    def on_device(buffers: list[list[jax.Array]], blocks: list[list[jax.Array]]) -> Reduced:
        num_devices = len(placement.devices)
        return Reduced(
            [_total(how, num_devices, pieces) for pieces in zip(*buffers, strict=True)],
            [_own_rows(how, placement, pieces) for pieces in zip(*blocks, strict=True)],
        )

    # With several parts, a device may send one of them twice, so it must not be overwritten.
    return _over_devices(
        placement,
        on_device,
        results=PartitionSpec(AXIS),
        donate=() if how.num_parts > 1 else (0,),
    )


def make_gather(
    placement: Placement, assemble: Callable[[list[jax.Array]], Any]
) -> Callable[[list[list[jax.Array]]], Any]:
    """Builds the program that gives every device the rows of all towers.

    Args:
        placement: which device has which tower's rows.
        assemble: a function of the list of blocks, each of shape (towers, n), that only moves data;
            what it returns is the result.

    Returns:
        A jitted function of the rows: for each block a list with one row for each slot. Every row
        is a global array, with the devices' own rows stacked along axis 0. The result is whole on
        every device.
    """

    def on_device(blocks: list[list[jax.Array]]) -> Any:
        gathered = [lax.all_gather(jnp.stack(rows), AXIS, tiled=True) for rows in blocks]
        return assemble([rows_at(block, placement.places) for block in gathered])

    return _over_devices(placement, on_device, results=PartitionSpec())


def gather_values(
    gather: Callable[[list[list[jax.Array]]], Any],
    values: Mapping[int, Sequence[jax.Array]],
    placement: Placement,
) -> list[Any]:
    """What `make_gather` makes of the values of all towers, once for each local device.

    Args:
        gather: the function that `make_gather` returned.
        values: for each tower of this process its row of every block, on its device.
        placement: which device runs which tower.
    """
    slots = [[values[slot[d]] for d in placement.local] for slot in placement.slots]
    sent = [
        [stacked([own[block] for own in there], placement) for there in slots]
        for block in range(len(slots[0][0]))
    ]
    leaves, treedef = jax.tree.flatten(gather(sent))
    devices = [placement.devices[d] for d in placement.local]
    per_device = zip(*(on_each_device(leaf, devices) for leaf in leaves), strict=True)
    return [jax.tree.unflatten(treedef, own) for own in per_device]


def _over_devices(
    placement: Placement,
    on_device: Callable[..., Any],
    results: PartitionSpec,
    donate: tuple[int, ...] = (),
) -> Callable[..., Any]:
    mapped = jax.shard_map(
        on_device,
        mesh=placement.mesh,
        in_specs=PartitionSpec(AXIS),
        out_specs=results,
        check_vma=False,
    )
    return jax.jit(mapped, donate_argnums=donate)


def _own_rows(
    how: ReductionPlan, placement: Placement, pieces: Sequence[jax.Array]
) -> list[jax.Array]:
    """The sums over all devices of the rows of this device's towers: a reduce-scatter.

    Every device sends (D-1)/D of the block, if all D devices have equally many towers.
    """
    order = [tower for towers in zip(*placement.slots, strict=True) for tower in towers]
    sent = [rows_at(piece, order) for piece in pieces]
    by_device = (len(placement.devices), len(placement.slots))
    arrived = [
        lax.all_to_all(rows.reshape(*by_device, *rows.shape[1:]), AXIS, 0, 0) for rows in sent
    ]
    total = evaluate(how.rest, lambda at: arrived[at[1]][at[0]])
    return [total[slot] for slot in range(len(placement.slots))]


def _total(how: ReductionPlan, num_devices: int, pieces: Sequence[jax.Array]) -> jax.Array:
    """The sum over all devices of one buffer, given as this device's partial sums."""
    block = pieces[0]
    if block.nbytes <= SMALL_BYTES:
        gathered = [lax.all_gather(piece, AXIS) for piece in pieces]
        return evaluate(how.rest, lambda at: gathered[at[1]][at[0]])
    # Every device adds one chunk and sends it to all: each sends 2 (D-1)/D of the buffer.
    padding = -block.size % num_devices
    chunks: list[jax.Array] = []
    for piece in pieces:
        flat = piece.reshape(-1)
        padded = lax.pad(flat, flat.dtype.type(0), [(0, padding, 0)]) if padding else flat
        chunks.append(lax.all_to_all(padded.reshape(num_devices, -1), AXIS, 0, 0))
    chunk = evaluate(how.rest, lambda at: chunks[at[1]][at[0]])
    total = lax.all_gather(chunk, AXIS, tiled=True)
    return (total[: block.size] if padding else total).reshape(block.shape)


def _towers(tree: Tree) -> list[int]:
    return evaluate(tree, lambda tower: [tower])

"""A training state of which every tower keeps a block: the optimizer's state, the moving average.

Parameters are whole on every device, since every tower computes with them; what only the update
needs is kept once. From outside, the state looks the same as without blocks: a checkpoint of either
can be resumed with the other.
"""

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from multitower.errors import ArgumentError
from multitower.processes.together import spread
from multitower.steps.optimizing.optimizer import check_opt_state
from multitower.steps.optimizing.update import begin
from multitower.steps.parts import StepParts
from multitower.steps.runner import as_shown, fresh_on_device
from multitower.steps.state.bundles import (
    laid,
    shown_on_host,
    with_bundles,
    with_changes_in,
)
from multitower.steps.state.changes import Changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.blocks import BlockLayout
from multitower.towers.global_arrays import as_global, host_leaf, replicate, stack_on_host
from multitower.towers.leaves import is_key
from multitower.towers.placement import Placement

if TYPE_CHECKING:
    import optax


class Block(NamedTuple):
    """What one tower keeps, on its device: its block of the optimizer's state and of the average.

    A block of a leaf has shape (n,), n = ceil(elements / towers); leaves that are the same for all
    elements, such as a count, are whole. Either field may be a bundle.
    """

    opt_state: Any
    ema_params: Any


class BlockParts(NamedTuple):
    """A state whose optimizer state and average are in blocks, in parts.

    Attributes:
        replicas: what each local device holds whole: everything but optimizer state and average.
            Parameters and model state may be bundles.
        blocks: the block of each local tower, by the number of the tower.
    """

    replicas: list[Fields]
    blocks: dict[int, Block]


class BlockState:
    """Takes states of one model and optimizer apart, and puts them together."""

    def __init__(
        self, optimizer: "optax.GradientTransformation", params: Any, placement: Placement
    ) -> None:
        from multitower.steps.optimizing.element_wise import fails, mixes, refuse_mixing  # noqa: PLC0415 (importing stays quick)

        self.layout = BlockLayout.of(params, placement.num_towers)
        if not any(place.size for place in self.layout.places):
            raise ArgumentError(
                "params have no numbers, and with shard_update=True every tower keeps a block of "
                "them: leave shard_update out."
            )
        self._placement = placement
        self._optimizer = optimizer
        whole = jax.eval_shape(optimizer.init, params)
        try:
            block = jax.eval_shape(optimizer.init, self.layout.shapes_of_block())
        except Exception as error:
            raise fails(error) from error
        self._whole, self._treedef = jax.tree.flatten(whole)
        leaves, treedef = jax.tree.flatten(block)
        if treedef != self._treedef:
            raise mixes(
                "its state has other leaves for a block than for a whole parameter: a mask or "
                "labels by shape"
            )
        # A leaf that is the same size in a block is the same in all towers, such as a count.
        self._is_cut = [
            _is_cut(a, b, placement.num_towers) for a, b in zip(self._whole, leaves, strict=True)
        ]
        refuse_mixing(optimizer, params, self.layout.shapes_of_block(), self._is_cut)

    def first(self, step: StepParts, fields: Fields) -> BlockParts:
        """The parts of a first state; `opt_state` and `ema_params`, None so far, are made here."""

        @jax.jit
        def init(params: Any, tower: Any) -> Block:
            return Block(*map(laid, begin(step, self.layout.block(params, tower))))

        replicas = replicate(fields, self._placement)
        blocks: dict[int, Block] = {}
        for replica, d in zip(replicas, self._placement.local, strict=True):
            device = self._placement.devices[d]
            for tower in self._placement.towers_on[d]:
                made = init(replica.params, np.int32(tower))
                blocks[tower] = jax.device_put(made, device)
        return BlockParts(with_bundles(replicas), blocks)

    def parts_of(self, fields: Fields) -> BlockParts:
        """The parts of a state that is whole, such as one from a checkpoint.

        Raises:
            StateError: the optimizer's state is of another optimizer or of other parameters.
        """
        check_opt_state(self._optimizer, fields.params, fields.opt_state)
        state = [host_leaf(leaf) for leaf in jax.tree.leaves(fields.opt_state)]
        average = jax.tree.map(host_leaf, fields.ema_params)
        blocks: dict[int, Block] = {}
        for tower, device in self._placement.homes.items():
            leaves = [
                self._cut(leaf, tower) if is_cut else leaf
                for leaf, is_cut in zip(state, self._is_cut, strict=True)
            ]
            block = Block(
                jax.tree.unflatten(self._treedef, leaves),
                jax.tree.map(lambda leaf, tower=tower: self._cut(leaf, tower), average),
            )
            blocks[tower] = fresh_on_device(block, device)
        whole = fields._replace(opt_state=None, ema_params=None)
        blocks = dict(zip(blocks, with_bundles([*blocks.values()]), strict=True))
        return BlockParts(with_bundles(replicate(whole, self._placement)), blocks)

    def take_changes(self, parts: BlockParts, changes: Changes) -> BlockParts:
        """The parts with what a user has written into the state."""
        whole = {name: leaves for name, leaves in changes.items() if name not in Block._fields}
        copies = replicate(whole, self._placement)
        replicas = [with_changes_in(*pair) for pair in zip(parts.replicas, copies, strict=True)]
        own = {name: leaves for name, leaves in changes.items() if name in Block._fields}
        on_host = jax.tree.map(host_leaf, own)
        blocks = {
            tower: with_changes_in(parts.blocks[tower], self._cut_changes(on_host, tower, device))
            for tower, device in self._placement.homes.items()
        }
        return BlockParts(replicas, blocks)

    def _cut_changes(self, changes: Changes, tower: int, device: jax.Device) -> Changes:
        """A tower's part of new leaves, on its device."""

        def own(name: str, number: int, leaf: Any) -> Any:
            is_cut = name != "opt_state" or self._is_cut[number]
            return fresh_on_device(self._cut(leaf, tower) if is_cut else leaf, device)

        return {
            name: {number: own(name, number, leaf) for number, leaf in leaves.items()}
            for name, leaves in changes.items()
        }

    def state(self, parts: BlockParts, maker: object) -> KeptState:
        """The training state that a user gets for these parts."""
        count = lambda parts: as_global([fields.step for fields in parts.replicas], self._placement)
        return KeptState.of_parts(
            parts,
            self._join,
            maker,
            join_shared=self._join_shared,
            join_step=count,
            apart=Block._fields,
        )

    def _join_shared(self, parts: BlockParts) -> Fields:
        return as_shown(parts.replicas, self._placement)

    def _join(self, parts: BlockParts) -> Fields:
        """The whole state, from all processes together; blocks are joined on the host.

        A device may not have enough memory for all of them.
        """
        fields = self._join_shared(parts)
        blocks = [parts.blocks[tower] for tower in sorted(parts.blocks)]
        stacked = jax.tree.map(lambda *own: stack_on_host(own, self._placement), *blocks)
        opt_state, average = map(shown_on_host, stacked)
        leaves = [
            _joined(rows if is_cut else rows[0], shape)
            for rows, shape, is_cut in zip(
                jax.tree.leaves(opt_state), self._whole, self._is_cut, strict=True
            )
        ]
        average = jax.tree.map(
            lambda rows, leaf: spread(_joined(rows, leaf), self._placement.shared),
            average,
            fields.params if average is not None else None,
        )
        return fields._replace(
            opt_state=jax.tree.unflatten(self._treedef, leaves), ema_params=average
        )

    def _cut(self, leaf: np.ndarray[Any, Any], tower: int) -> np.ndarray[Any, Any]:
        size = -(-leaf.size // self._placement.num_towers)
        block = np.zeros(size, leaf.dtype)
        own = leaf.reshape(-1)[tower * size : (tower + 1) * size]
        block[: own.size] = own
        return block


def _joined(rows: Any, shape: Any) -> Any:
    """A leaf of that shape, from the blocks of all towers, or a whole one; a key as it is."""
    if is_key(rows):
        return rows
    whole = rows.reshape(-1)[: math.prod(shape.shape)].reshape(shape.shape)
    whole.flags.writeable = False  # what a user wrote into it would be lost
    return whole


def _is_cut(whole: Any, block: Any, num_towers: int) -> bool:
    if whole.dtype == block.dtype and block.shape == (-(-math.prod(whole.shape) // num_towers),):
        return True
    if whole.shape == block.shape and whole.dtype == block.dtype:
        return False
    from multitower.steps.optimizing.element_wise import mixes  # noqa: PLC0415 (importing stays quick)

    raise mixes(
        f"part of its state is {whole.dtype}{list(whole.shape)} for a whole parameter and "
        f"{block.dtype}{list(block.shape)} for a block of it"
    )

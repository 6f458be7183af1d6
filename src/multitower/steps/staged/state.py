"""A training state of which every stage keeps its own leaves, on its own devices."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.hardware.devices import host_device
from multitower.processes.together import whole_on_host
from multitower.stages.layout import Layout
from multitower.steps.runner import own_copy
from multitower.steps.staged.update import SHARED, Homes, Rows
from multitower.steps.state.fields import Fields
from multitower.towers.split import on_one_device


class Block(NamedTuple):
    """What a stage keeps: leaves, or pieces of leaves, by their number in the whole tree."""

    params: dict[int, Any]
    opt_state: dict[int, Any]
    ema_params: dict[int, Any]


class Head(NamedTuple):
    """The part of a state that belongs to no stage. It is on the device of the last stage.

    Attributes:
        step: number of updates, int32, shape ().
        model_state: as in `Fields`.
        rng: as in `Fields`.
        opt_state: leaves of the optimizer's state that belong to no parameter, by number.
    """

    step: Any
    model_state: Any
    rng: Any
    opt_state: dict[int, Any]


class Trees(NamedTuple):
    """The structures of the trees whose leaves are numbered."""

    params: Any
    opt_state: Any
    ema_params: Any

    @classmethod
    def of(cls, fields: Fields) -> "Trees":
        """Makes it of a state."""
        trees = (fields.params, fields.opt_state, fields.ema_params)
        return cls(*(jax.tree.structure(tree) for tree in trees))


class StagedParts(NamedTuple):
    """A state of a model in stages, in parts.

    Attributes:
        blocks: one for each replica of this process and, in it, each stage.
        head: what belongs to no stage.
        homes: which leaf is in which block.
        trees: the structures of the trees of these leaves.
        spans_processes: whether other processes have replicas, too.
    """

    blocks: list[list[Block]]
    head: Head
    homes: Homes
    trees: Trees
    spans_processes: bool

    def copies(self) -> list[Fields]:
        """The state as each replica has it."""
        return [self._replace(blocks=[own]).fields() for own in self.blocks]

    def by_stage(self) -> list[list[dict[str, Any]]]:
        """What each replica keeps of each stage, by its path in the state."""
        paths = {
            name: jax.tree_util.tree_flatten_with_path(
                jax.tree.unflatten(treedef, range(treedef.num_leaves))
            )[0]
            for name, treedef in self.trees._asdict().items()
        }

        def named(block: Block) -> dict[str, Any]:
            return {
                f".{name}{jax.tree_util.keystr(paths[name][i][0])}": leaf
                for name, leaves in block._asdict().items()
                for i, leaf in leaves.items()
            }

        found = [[named(block) for block in copies] for copies in zip(*self.blocks, strict=True)]
        # What belongs to no stage is kept once: listed as a stage that is the same in all replicas.
        return [*found, [named(Block({}, self.head.opt_state, {}))] * len(self.blocks)]

    def fields(self) -> Fields:
        """The state that a user sees: leaves on their devices; split ones joined on the host."""
        own = Block(*(self._joined(n) for n in range(3)))
        leaves = (own.params, {**own.opt_state, **self.head.opt_state}, own.ema_params)
        params, opt_state, ema = (
            jax.tree.unflatten(treedef, [found[i] for i in range(treedef.num_leaves)])
            for treedef, found in zip(self.trees, leaves, strict=True)
        )
        return Fields(self.head.step, params, opt_state, ema, self.head.model_state, self.head.rng)

    def _joined(self, attribute: int) -> dict[int, Any]:
        """The leaves of all blocks, with pieces concatenated along axis 0."""
        found: dict[int, list[Any]] = {}
        for block in self.blocks[0]:
            for i, leaf in block[attribute].items():
                found.setdefault(i, []).append(leaf)
        rows = self.homes.rows_of_state if attribute == 1 else self.homes.rows
        return {
            i: leaves[0] if i not in rows else _side_by_side(leaves, rows[i])
            for i, leaves in found.items()
        }


def parts_of(fields: Fields, homes: Homes, layout: Layout) -> StagedParts:
    """The parts of a state that is whole; the originals are never overwritten.

    If arrays are split over processes, call it on every process.
    """
    fields = jax.tree.map(_of_this_process, fields)
    params, opt_state, ema = (
        jax.tree.leaves(tree) for tree in (fields.params, fields.opt_state, fields.ema_params)
    )

    def chosen(leaves: list[Any], numbers: list[int], rows: Rows, stage: int, device: Any) -> Any:
        return {
            i: copied(leaves[i][slice(*rows[i][stage])] if i in rows else leaves[i], device)
            for i in numbers
            if i < len(leaves)
        }

    def block(replica: int, stage: int) -> Block:
        device = layout.device(replica, stage)
        of_params, of_state = homes.params_of(stage), homes.opt_state_of(stage)
        return Block(
            chosen(params, of_params, homes.rows, stage, device),
            chosen(opt_state, of_state, homes.rows_of_state, stage, device),
            chosen(ema, of_params, homes.rows, stage, device),
        )

    stages = range(layout.num_stages)
    blocks = [[block(r, s) for s in stages] for r in range(len(layout.replicas))]
    shared = chosen(opt_state, homes.opt_state_of(SHARED), {}, SHARED, layout.head)
    rest = (fields.step, fields.model_state, fields.rng)
    count, model_state, rng = jax.tree.map(lambda leaf: copied(leaf, layout.head), rest)
    head = Head(count, model_state, rng, shared)
    return StagedParts(blocks, head, homes, Trees.of(fields), layout.towers.spans_processes)


def on_cpu(fields: Fields) -> Fields:
    """The fields as JAX arrays in the host's memory: a traced loss may index them with tracers."""
    cpu = host_device()
    put = lambda x: jax.device_put(x, cpu) if isinstance(x, np.ndarray) else x
    return jax.tree.map(put, fields)


def _of_this_process(leaf: Any) -> Any:
    """A leaf as an array on devices of this process, or on the host."""
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return on_one_device(leaf) if leaf.is_fully_replicated else whole_on_host(leaf)


def copied(leaf: Any, device: jax.Device) -> jax.Array:
    """A new copy of a leaf on a device."""
    with jax.default_device(device):  # a leaf on the host goes to this device only
        return jax.device_put(own_copy(leaf), device)


def _side_by_side(pieces: list[Any], rows: Mapping[int, tuple[int, int]]) -> Any:
    """The whole of a leaf, in the host's memory, from pieces in the order of stages."""
    ordered = sorted(zip(rows.values(), pieces, strict=True), key=lambda one: one[0])
    whole = np.concatenate([np.asarray(piece) for _, piece in ordered])  # host-device sync
    whole.flags.writeable = False  # what a user wrote into it would be lost
    return whole

"""A training state of which every stage keeps its own leaves, on its own devices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.functions.outputs import wide
from multitower.stages.layout import Layout
from multitower.steps.parts import StepParts
from multitower.steps.runner import own_copy
from multitower.steps.staged.update import SHARED, Homes
from multitower.steps.state.fields import Fields
from multitower.towers.rows import device_dtype, is_key


class Block(NamedTuple):
    """What a stage keeps: leaves by their number in the whole tree."""

    params: dict[int, Any]
    opt_state: dict[int, Any]
    ema_params: dict[int, Any]


class Head(NamedTuple):
    """What there is one of: it belongs to no stage, and lives with the last one.

    Attributes:
        step: number of updates.
        model_state: as in `Fields`.
        rng: likewise.
        opt_state: leaves of the optimizer's state that belong to no parameter, by number.
    """

    step: Any
    model_state: Any
    rng: Any
    opt_state: dict[int, Any]


class Trees(NamedTuple):
    """The structures that leaves are numbered by."""

    params: Any
    opt_state: Any
    ema_params: Any

    @classmethod
    def of(cls, fields: Fields) -> "Trees":
        """Of a state."""
        trees = (fields.params, fields.opt_state, fields.ema_params)
        return cls(*(jax.tree.structure(tree) for tree in trees))


class Parts(NamedTuple):
    """A state in parts.

    Attributes:
        blocks: for each replica and stage.
        head: the rest.
        homes: which leaf is in which block.
        trees: what the leaves make up.
    """

    blocks: list[list[Block]]
    head: Head
    homes: Homes
    trees: Trees

    def fields(self) -> Fields:
        """The state as it looks from outside, each leaf where it lives."""
        own = Block(*({k: v for b in self.blocks[0] for k, v in b[n].items()} for n in range(3)))
        leaves = (own.params, {**own.opt_state, **self.head.opt_state}, own.ema_params)
        params, opt_state, ema = (
            jax.tree.unflatten(treedef, [found[i] for i in range(treedef.num_leaves)])
            for treedef, found in zip(self.trees, leaves, strict=True)
        )
        return Fields(self.head.step, params, opt_state, ema, self.head.model_state, self.head.rng)


def take_apart(fields: Fields, homes: Homes, layout: Layout) -> Parts:
    """The parts of a state that is whole; the originals are never overwritten."""
    params, opt_state, ema = (
        jax.tree.leaves(tree) for tree in (fields.params, fields.opt_state, fields.ema_params)
    )

    def chosen(leaves: list[Any], homes: tuple[int, ...], stage: int, device: Any) -> Any:
        return {
            i: _copy(leaf, device)
            for i, (leaf, home) in enumerate(zip(leaves, homes, strict=False))
            if home == stage
        }

    def block(replica: int, stage: int) -> Block:
        device = layout.device(replica, stage)
        return Block(
            chosen(params, homes.params, stage, device),
            chosen(opt_state, homes.opt_state, stage, device),
            chosen(ema, homes.params, stage, device),
        )

    stages = range(layout.num_stages)
    blocks = [[block(r, s) for s in stages] for r in range(len(layout.replicas))]
    shared = chosen(opt_state, homes.opt_state, SHARED, layout.head)
    rest = (fields.step, fields.model_state, fields.rng)
    count, model_state, rng = jax.tree.map(lambda leaf: _copy(leaf, layout.head), rest)
    return Parts(blocks, Head(count, model_state, rng, shared), homes, Trees.of(fields))


def first_fields(step: StepParts, params: Any, model_state: Any, rng: Any) -> Fields:
    """A first state, in the host's memory, where there is room for all of it; keys stay."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        ema = jax.tree.map(wide, params) if step.ema_decay is not None else None
        opt_state = step.optimizer.init(params)
    fields = Fields(np.int32(0), params, opt_state, ema, model_state, rng)
    return jax.tree.map(_on_host, fields)


def on_cpu(fields: Fields) -> Fields:
    """The same as arrays of JAX, in the host's memory, for tracing: a model may index its own."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, fields)


def _on_host(leaf: Any) -> Any:
    if is_key(leaf):
        return leaf
    return np.array(leaf, dtype=device_dtype(jnp.asarray(leaf)))


def _copy(leaf: Any, device: jax.Device) -> jax.Array:
    with jax.default_device(device):  # what is on the host goes there alone
        return jax.device_put(own_copy(leaf), device)

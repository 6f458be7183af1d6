"""A training state whose large leaves are split over the devices, as ordinary arrays of JAX.

Source: ZeRO (Rajbhandari et al. 2020), stages 1 to 3.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from multitower.steps.optimizing.update import begin
from multitower.steps.parts import ShardOptions, StepParts
from multitower.steps.runner import own_copy
from multitower.steps.state.changes import Changes, with_changes
from multitower.steps.state.fields import Fields
from multitower.steps.unmade import Unmade, made_in_parts
from multitower.towers.leaf_shards import shardings_of
from multitower.towers.leaves import is_key
from multitower.towers.placement import Placement
from multitower.towers.split import copy_to


@dataclass(frozen=True)
class StateShards:
    """Puts states on devices.

    Attributes:
        options: whether parameters are split, too.
        placement: the devices, with one tower on each.
    """

    options: ShardOptions
    placement: Placement

    def shardings(self, fields: Fields) -> Fields:
        """The sharding of every leaf of a state."""
        whole = jax.tree.map(lambda _: self.placement.shared, fields)
        split = shardings_of(fields, self.placement)
        params = split.params if self.options.params else whole.params
        return whole._replace(params=params, opt_state=split.opt_state, ema_params=split.ema_params)

    def first(self, step: StepParts, fields: Fields) -> Fields:
        """A first state. Its `opt_state` and `ema_params` are made here, split from the start.

        Args:
            step: what the step is made of, with the optimizer.
            fields: the other fields, on any device or the host; never overwritten.
        """
        placed = self.place(fields)

        def make(params: Any) -> tuple[Any, Any]:
            return jax.tree.map(_strong, begin(step, params))

        opt_state, ema = jax.eval_shape(make, placed.params)
        there = self.shardings(placed._replace(opt_state=opt_state, ema_params=ema))
        made = jax.jit(make, out_shardings=(there.opt_state, there.ema_params))(placed.params)
        return placed._replace(opt_state=made[0], ema_params=made[1])

    def place(self, fields: Fields) -> Fields:
        """Copies of a state's leaves, on their devices; the originals are never overwritten.

        Parameters that are `Unmade` are made on their devices.
        """
        there = self.shardings(fields)
        leaves, treedef = jax.tree.flatten(fields.params)
        if any(isinstance(leaf, Unmade) for leaf in leaves):
            params = self._made(leaves, jax.tree.leaves(there.params))
            fields = fields._replace(params=None)
            placed = jax.tree.map(_copy, fields, there._replace(params=None))
            return placed._replace(params=treedef.unflatten(params))
        return jax.tree.map(_copy, fields, there)

    def _made(self, leaves: list[Unmade], shardings: list[Any]) -> list[jax.Array]:
        """The results of a function; arrays that it only passes through are copied there."""
        given = [leaf.given() for leaf in leaves]
        unmade = [n for n, leaf in enumerate(given) if isinstance(leaf, Unmade)]
        own = [leaves[n] for n in unmade], [shardings[n] for n in unmade]
        made = dict(zip(unmade, made_in_parts(*own, self.placement) if unmade else [], strict=True))
        return [made[n] if n in made else _copy(leaf, shardings[n]) for n, leaf in enumerate(given)]

    def take_changes(self, fields: Fields, changes: Changes) -> Fields:
        """The state with what a user has written into it; other leaves are not copied."""
        there = self.shardings(fields)
        placed = {
            name: {
                number: _copy(leaf, jax.tree.leaves(getattr(there, name))[number])
                for number, leaf in leaves.items()
            }
            for name, leaves in changes.items()
        }
        return with_changes(fields, placed)


def _copy(leaf: Any, sharding: Any) -> jax.Array:
    """A new copy. A leaf on the host is never whole on a device, unless it is replicated."""
    if isinstance(leaf, jax.Array) or sharding.is_fully_replicated:
        leaf = own_copy(leaf)
    return copy_to([leaf], [sharding])[0]


def _strong(leaf: Any) -> Any:
    """A copy of a strong type: with a weak one, step two would compile again."""
    return leaf if is_key(leaf) else jnp.array(leaf, dtype=jnp.asarray(leaf).dtype, copy=True)

"""Changes: what a user has written into a state since its maker made it.

Users may write into a state's dicts: `state.opt_state.hyperparams["learning_rate"] = 0.0` is the
idiom of `optax.inject_hyperparams`. A step computes with parts that are not these containers, so a
leaf that is another object than the step left there is found, and put into the parts, too.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import StateError
from multitower.processes.together import whole_on_host
from multitower.steps.state.fields import Fields
from multitower.towers.leaves import is_key, is_traced

# The new leaves by number, for each attribute of a state.
Changes = Mapping[str, Mapping[int, Any]]


class Shown(NamedTuple):
    """An attribute as it was when the user read it."""

    leaves: list[Any]
    treedef: Any

    @classmethod
    def of(cls, value: Any) -> "Shown":
        """Remembers a value's leaves."""
        return cls(*jax.tree.flatten(value))

    def changed_leaves(self, value: Any, name: str) -> dict[int, Any]:
        """The leaves that were replaced, by number, each a copy in the dtype of the old one.

        Raises:
            StateError: the structure changed, or a leaf has another shape or kind.
        """
        leaves, treedef = jax.tree.flatten(value)
        if treedef != self.treedef:
            raise StateError(
                f"state.{name} has another structure than the step left it with: values can be "
                "changed in place, the tree cannot. For another model make a new state with "
                f"step.init.\nbefore: {self.treedef}\nnow: {treedef}"
            )
        changed = [
            n for n, (a, b) in enumerate(zip(self.leaves, leaves, strict=True)) if a is not b
        ]
        if not changed:
            return {}
        paths = [path for path, _ in jax.tree_util.tree_flatten_with_path(value)[0]]
        return {
            n: _like(self.leaves[n], leaves[n], f"state.{name}{jax.tree_util.keystr(paths[n])}")
            for n in changed
        }


def with_changes(fields: Fields, changes: Changes) -> Fields:
    """The fields with these leaves replaced."""
    new: dict[str, Any] = {}
    for name, by_number in changes.items():
        leaves, treedef = jax.tree.flatten(getattr(fields, name))
        leaves = [by_number.get(number, leaf) for number, leaf in enumerate(leaves)]
        new[name] = jax.tree.unflatten(treedef, leaves)
    return fields._replace(**new)


def in_every_tower(fields: Fields, left: Mapping[str, Shown]) -> Fields:
    """The fields with what is new in `params` and `model_state` given to every tower, too.

    Args:
        fields: the fields; only with local updates does every tower have its own of these two.
        left: both attributes as a step left them.
    """
    local = fields.local
    if not hasattr(local, "num_rows"):
        return fields
    num_towers = len(local.num_rows)
    for name, shown in left.items():
        leaves, treedef = jax.tree.flatten(getattr(fields, name))
        own, own_treedef = jax.tree.flatten(getattr(local, name))
        if not treedef == shown.treedef == own_treedef:
            continue  # of another model, which a step refuses
        trios = zip(shown.leaves, leaves, own, strict=True)
        own = [kept if new is old else repeated(new, num_towers) for old, new, kept in trios]
        local = local._replace(**{name: jax.tree.unflatten(treedef, own)})
    return fields._replace(local=local)


def repeated(leaf: Any, count: int) -> Any:
    """A leaf `count` times, along a new first axis; on the host, unless it is a key."""
    if is_key(leaf) or is_traced(leaf):  # traced: the state is changed inside jax.jit
        return jnp.stack([leaf] * count)
    return np.broadcast_to(whole_on_host(leaf), (count, *np.shape(leaf)))


def _like(old: Any, new: Any, where: str) -> jax.Array:
    """A copy of a new leaf in the dtype of the old one, which the compiled program takes."""
    if is_key(old) or is_key(new):
        if not (is_key(old) and is_key(new) and (old.shape, old.dtype) == (new.shape, new.dtype)):
            raise StateError(
                f"{where} is {_kind(new)} now and was {_kind(old)}: keep shape and kind."
            )
        data = jnp.array(jax.random.key_data(new), copy=True)
        return jax.random.wrap_key_data(data, impl=jax.random.key_impl(new))
    is_number = isinstance(new, jax.Array | np.ndarray | np.generic | bool | int | float | complex)
    fits = is_number and np.shape(new) == old.shape
    if not fits or not _casts(jnp.result_type(new), old.dtype):
        raise StateError(
            f"{where} is {_kind(new)} now, and the step left {_kind(old)} there: a new value must "
            "have the same shape, and a dtype that fits."
        )
    if isinstance(new, np.ndarray):
        new = new.copy()  # at once: JAX copies later, and the user may have changed it by then
    return jnp.array(new, dtype=old.dtype, copy=True)


def _casts(new: Any, old: Any) -> bool:
    """Whether `new` may be cast to `old`: to the same kind or a wider one, not float to integer."""
    kinds = (jnp.bool_, jnp.integer, jnp.floating, jnp.complexfloating)
    rank = [next(i for i, kind in enumerate(kinds) if jnp.issubdtype(x, kind)) for x in (new, old)]
    return rank[0] <= rank[1]


def _kind(leaf: Any) -> str:
    if hasattr(leaf, "dtype"):
        return f"{leaf.dtype}{list(leaf.shape)}"
    return f"{leaf!r:.40} ({type(leaf).__name__})"

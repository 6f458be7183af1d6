"""Gathering: a function of whole parameters as a function of their shards.

A shard is gathered where the function uses it, and the gradient of a shard is the sum over devices
of its part of the gradient. What is gathered for one product is not kept for the backward pass but
gathered again there, and a `jax.lax.scan` over stacked layers gathers one layer at a time. So no
device holds more than a few layers whole. A leaf that is used in several places is gathered once.

Source: ZeRO stage 3 (Rajbhandari et al. 2020); FSDP (Zhao et al. 2023).
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from multitower.engines.segments import compute, num_same
from multitower.towers.placement import AXIS

_CALLS = {"jit": "jaxpr", "closed_call": "call_jaxpr"}
_REMAT = ("checkpoint", "remat2")
# These change the form of one array. Wherever the result is used, it is made from the shard again.
_FORMS = {"transpose", "reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy"}
_PARTS = {"slice", "dynamic_slice", "split", "unstack", "rev", "concatenate", "stack"}
# Cheap to make again, or linear: their backward pass needs what goes in, not what comes out.
_USES = {"dot_general", "conv_general_dilated", "gather", "mul", "add", "sub", "dynamic_slice"}
# XLA's CPU compiler of JAX 0.10 drops barriers, and would join the second gather with the first.
_JOINS_GATHERS = jax.__version_info__ < (0, 12)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Shard:
    """This device's part of a leaf, in place of the leaf.

    Attributes:
        value: the part; if the device has a copy of the leaf, only the part's gradient matters.
        copy: the whole leaf, or None.
        axis: the axis along which the leaf is split.
        dtype: the dtype in which it is gathered, no wider than its own.
        forms: functions that are applied to the whole leaf, in this order.
    """

    value: Any
    copy: Any
    axis: int = field(metadata={"static": True})
    dtype: Any = field(metadata={"static": True})
    forms: tuple[Callable[[Any], Any], ...] = field(default=(), metadata={"static": True})

    def whole(self) -> Any:
        """The whole leaf, gathered or copied, in its last form."""
        if self.copy is None:
            found = gather(self.value, self.axis, self.dtype, self.value.dtype)
        else:
            found = copy_of(self.value, self.copy, self.axis)
        for form in self.forms:
            found = form(found)
        return found

    def formed(self, equation: Any) -> "Shard":
        """The leaf in another form. It is gathered in the new dtype if that has fewer bytes."""
        if equation.primitive.name == "convert_element_type" and self.copy is None:
            dtype = jnp.dtype(equation.params["new_dtype"])
            if not self.forms and _is_narrower(dtype, self.dtype):
                return replace(self, dtype=dtype)
        return replace(self, forms=(*self.forms, lambda whole: compute(equation, [whole])[0]))

    def of_layer(self) -> "Shard":
        """The shard of one layer, in a loop over the first axis of stacked layers."""
        return replace(self, axis=self.axis - 1)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather(shard: jax.Array, axis: int, dtype: Any, own: Any) -> jax.Array:
    """The whole leaf in `dtype`, of which every device has a part along `axis`.

    Its gradient is added up over devices in the leaf's own dtype, `own`, as without shards.
    """
    return lax.all_gather(shard.astype(dtype), AXIS, axis=axis, tiled=True)


def _gather_forward(shard: jax.Array, axis: int, dtype: Any, own: Any) -> tuple[jax.Array, None]:
    return gather(shard, axis, dtype, own), None


def _gather_backward(axis: int, dtype: Any, own: Any, _: None, cotangent: Any) -> tuple[jax.Array]:
    return (scatter(cotangent.astype(own), axis),)


gather.defvjp(_gather_forward, _gather_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def copy_of(shard: jax.Array, copy: jax.Array, axis: int) -> jax.Array:
    """The whole leaf, which every device has as `copy`; its gradient goes to the shard."""
    return copy


def _copy_forward(shard: jax.Array, copy: jax.Array, axis: int) -> tuple[jax.Array, None]:
    return copy, None


def _copy_backward(axis: int, _: None, cotangent: Any) -> tuple[jax.Array, None]:
    return scatter(cotangent, axis), None


copy_of.defvjp(_copy_forward, _copy_backward)


def scatter(value: jax.Array, axis: int) -> jax.Array:
    """This device's part, along `axis`, of the sum over devices."""
    return lax.psum_scatter(value, AXIS, scatter_dimension=axis, tiled=True)


def value_and_grad(fn: Callable[[Any], tuple[Any, Any]], tree: Any) -> tuple[tuple[Any, Any], Any]:
    """Like `jax.value_and_grad(fn, has_aux=True)(tree)`, for a tree with shards among its leaves.

    Args:
        fn: a function of the tree of whole leaves.
        tree: the values at which it is differentiated.

    Returns:
        What `fn` returns; and for every shard its part of the sum of the gradients over devices,
        for other leaves this device's own gradient.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_shard)

    def of_values(values: list[Any]) -> Any:
        given = [
            replace(leaf, value=value) if isinstance(leaf, Shard) else value
            for leaf, value in zip(leaves, values, strict=True)
        ]
        return on_shards(fn, treedef.unflatten(given))

    values = [leaf.value if isinstance(leaf, Shard) else leaf for leaf in leaves]
    found, gradients = jax.value_and_grad(of_values, has_aux=True)(values)
    return found, treedef.unflatten(gradients)


def on_shards(fn: Callable[[Any], Any], tree: Any) -> Any:
    """Calls a function of a tree of whole leaves on a tree with shards among its leaves."""
    make = jax.make_jaxpr(fn, return_shape=True)
    program, result = make(whole_shapes(tree))
    return jax.tree.unflatten(jax.tree.structure(result), run_program(program, tree))


def run_program(program: Any, tree: Any) -> list[Any]:
    """What a closed jaxpr returns for the leaves of a tree, shards in place of whole ones."""
    given = jax.tree.leaves(tree, is_leaf=_is_shard)
    return [*map(_whole, _run(program.jaxpr, program.consts, given))]


def whole_shapes(tree: Any) -> Any:
    """The shapes and dtypes of whole leaves."""
    return jax.tree.map(lambda leaf: jax.eval_shape(_whole, leaf), tree, is_leaf=_is_shard)


def _run(jaxpr: Any, consts: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The results of a program of which some arguments, and perhaps results, are shards."""
    known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
    atoms = [*(atom for equation in jaxpr.eqns for atom in equation.invars), *jaxpr.outvars]
    uses = Counter(atom for atom in atoms if not isinstance(atom, core.Literal))

    def keep(variables: Sequence[Any], values: Sequence[Any]) -> None:
        for variable, value in zip(variables, values, strict=True):
            # A leaf that was gathered in every place would be sent as often, and its gradient too.
            known[variable] = _whole(value) if uses[variable] > 1 else value

    def value_of(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    keep(jaxpr.invars, given)
    for equation in jaxpr.eqns:
        keep(equation.outvars, _results(equation, [value_of(atom) for atom in equation.invars]))
    return [value_of(atom) for atom in jaxpr.outvars]


def _results(equation: Any, given: list[Any]) -> Sequence[Any]:
    """The results of one equation."""
    if not any(isinstance(value, Shard) for value in given):
        return compute(equation, given)
    name, params = equation.primitive.name, equation.params
    if name in _CALLS:
        inner = params[_CALLS[name]]
        return _run(inner.jaxpr, inner.consts, given)
    if name in _REMAT:
        again = lambda *given: [*map(_whole, _run(params["jaxpr"], [], given))]
        return jax.checkpoint(again, prevent_cse=params["prevent_cse"], policy=params["policy"])(
            *given
        )
    if name in _FORMS and len(given) == 1:
        return [given[0].formed(equation)]
    if name == "scan":
        return _scanned(equation, given)
    use = lambda *given: [*compute(equation, [*map(_whole, given)])]
    return _gathered_again(use, given) if name in _USES else use(*given)


def _gathered_again(use: Callable[..., list[Any]], given: Sequence[Any]) -> list[Any]:
    """Calls `use`; its backward pass gathers the shards again, and computes `use` again."""
    if not _JOINS_GATHERS:
        return jax.checkpoint(use)(*given)

    def forward(*given: Any) -> tuple[list[Any], Any]:
        return use(*given), given

    def backward(given: Sequence[Any], cotangents: list[Any]) -> Any:
        late = [_late(x, cotangents[0]) if isinstance(x, Shard) else x for x in given]
        return jax.vjp(use, *late)[1](cotangents)

    again = jax.custom_vjp(use)
    again.defvjp(forward, backward)
    return again(*given)


def _late(shard: Shard, after: jax.Array) -> Shard:
    """The same shard, which the compiler cannot gather before the value `after` is known.

    On CPUs it depends on a condition that always holds, but the compiler does not know that: no
    absolute value is -1.
    """
    if shard.copy is not None:
        return shard
    value = lax.platform_dependent(
        shard.value,
        after,
        cpu=lambda x, y: jnp.where(abs(y.reshape(-1)[:1].sum()) != -1, x, jnp.zeros_like(x)),
        default=lambda x, y: lax.optimization_barrier((x, y))[0],
    )
    return replace(shard, value=value)


def _scanned(equation: Any, given: list[Any]) -> Sequence[Any]:
    """A `jax.lax.scan` that gathers stacked leaves layer by layer."""
    params, inner = equation.params, equation.params["jaxpr"]
    num_carried = num_same(equation.outvars, inner.jaxpr.outvars)
    num_fixed = num_same(equation.invars, inner.jaxpr.invars)
    fixed = [_whole(value) for value in given[:num_fixed]]
    consts, first = fixed[: num_fixed - num_carried], fixed[num_fixed - num_carried :]
    # If a leaf is split along the loop's own axis, no device has a part of every layer.
    stacked = [
        x.of_layer() if isinstance(x, Shard) and x.axis > 0 and not x.forms else _whole(x)
        for x in given[num_fixed:]
    ]

    def body(carry: list[Any], layer: list[Any]) -> tuple[list[Any], list[Any]]:
        found = [*map(_whole, _run(inner.jaxpr, inner.consts, [*consts, *carry, *layer]))]
        return found[:num_carried], found[num_carried:]

    own = [num_fixed + at for at, value in enumerate(stacked) if isinstance(value, Shard)]
    if _is_any_kept(inner.jaxpr, own):
        # A layer that is gathered once per turn would be kept from every turn: the whole stack.
        body = jax.checkpoint(body, policy=_is_no_leaf, prevent_cse=False)
    options = {key: params[key] for key in ("length", "reverse", "unroll")}
    last, every = lax.scan(body, first, stacked, **options)
    return [*last, *every]


def _is_any_kept(jaxpr: Any, numbers: Sequence[int]) -> bool:
    """Whether the backward pass would find one of these arguments whole, and not gather it again.

    So it is if a program uses one in several places, or in a loop or a branch.
    """
    own = {jaxpr.invars[number] for number in numbers}
    atoms = [atom for equation in jaxpr.eqns for atom in equation.invars]
    uses = Counter(atom for atom in atoms if not isinstance(atom, core.Literal))
    for equation in jaxpr.eqns:
        name, given = equation.primitive.name, equation.invars
        found = [x for x in enumerate(given) if not isinstance(x[1], core.Literal) and x[1] in own]
        if any(uses[atom] > 1 for _, atom in found):
            return True
        if not found or name in _REMAT or name in _USES:
            continue
        if name in _FORMS:
            own.update(equation.outvars)
        elif name not in _CALLS or _is_any_kept(
            equation.params[_CALLS[name]].jaxpr, [at for at, _ in found]
        ):
            return True
    return False


def _is_no_leaf(primitive: Any, *_: Any, **params: Any) -> bool:
    """Whether the backward pass may keep a result, because it is not a leaf or a form of one."""
    # `gather` is a call with a rule of its own.
    inside = (e for one in core.jaxprs_in_params(params) for e in one.eqns)
    gathers = any(equation.primitive.name == "all_gather" for equation in inside)
    return not gathers and primitive.name not in {"all_gather", *_FORMS, *_PARTS}


def _is_shard(value: Any) -> bool:
    return isinstance(value, Shard)


def _whole(value: Any) -> Any:
    return value.whole() if isinstance(value, Shard) else value


def _is_narrower(dtype: Any, other: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.inexact) and dtype.itemsize < jnp.dtype(other).itemsize

"""Scatters whose indices XLA can sort, as it does for the same bits on a GPU.

With `xla_gpu_deterministic_ops` XLA sorts the indices of a scatter if they are int32 or int64. For
others, such as the uint32 in the gradient of `jnp.sort` or tokens in uint16, it makes a loop with
one trip per index: 23 seconds for a million of them on an H200, in place of a millisecond
(`benchmarks/results/gpu.md`). So other indices become int32 or int64 first.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from multitower.engines.segments import compute, is_ref
from multitower.towers.leaves import shape_of


def sorting(traced: jax.stages.Traced) -> Callable[..., Any] | None:
    """A function with int32 or int64 indices in all of its scatters, however deep.

    Args:
        traced: a function, traced, which is not differentiated any more.

    Returns:
        A function with the same results; None if there is nothing to change.
    """
    program = traced.jaxpr
    if not any(map(_changes, program.eqns)):
        return None

    def run(*args: Any) -> Any:
        found = _results(program.jaxpr, program.consts, jax.tree.leaves(args))
        return jax.tree.unflatten(jax.tree.structure(traced.out_info), found)

    return run


def _changes(equation: Any) -> bool:
    if _is_unsortable(equation):
        return True
    inside = core.jaxprs_in_params(equation.params)
    return any(_changes(one) for inner in inside if not _has_refs(inner) for one in inner.eqns)


def _has_refs(program: Any) -> bool:
    """Whether a program takes a `jax.new_ref`, as a Pallas kernel does: it stays as it is."""
    return any(map(is_ref, program.invars))


def _is_unsortable(equation: Any) -> bool:
    """Whether an equation is a scatter for which XLA would make a loop."""
    if not equation.primitive.name.startswith("scatter"):
        return False
    operand, indices = (atom.aval for atom in equation.invars[:2])
    is_small = max(operand.shape, default=0) < 2**31  # int32 can name its places
    return is_small and indices.dtype not in (jnp.int32, jnp.int64)


def _results(program: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    known: dict[Any, Any] = dict(zip(program.constvars, consts, strict=True))
    known.update(zip(program.invars, args, strict=True))

    def value(atom: Any) -> Any:
        return atom.val if isinstance(atom, core.Literal) else known[atom]

    for equation in program.eqns:
        given = [value(atom) for atom in equation.invars]
        if _is_unsortable(equation):
            given[1] = _signed(given[1])
            found = compute(equation, given)
        elif _changes(equation):
            inside = {name: _inside(param) for name, param in equation.params.items()}
            found = compute(equation.replace(params=inside), given)
        else:
            found = compute(equation, given)
        known.update(zip(equation.outvars, found, strict=True))
    return [value(atom) for atom in program.outvars]


def _inside(param: Any) -> Any:
    """A parameter of an equation, with such indices in the programs that it holds."""
    if type(param) is tuple:  # the branches of a jax.lax.cond
        return tuple(map(_inside, param))
    program, consts = getattr(param, "jaxpr", param), getattr(param, "consts", ())
    if not isinstance(program, core.Jaxpr) or _has_refs(program):
        return param
    make = jax.make_jaxpr(lambda *args: _results(program, consts, args))
    made = make(*(shape_of(one.aval) for one in program.invars))
    return made.jaxpr if program is param else made  # one without constants gets none


def _signed(indices: jax.Array) -> jax.Array:
    """The same places; those behind every axis stay behind it."""
    wide = jnp.int64 if indices.dtype == jnp.uint64 else jnp.int32
    most = jnp.iinfo(wide).max
    if jnp.iinfo(indices.dtype).max > most:
        indices = jnp.minimum(indices, jnp.array(most, indices.dtype))
    return indices.astype(wide)

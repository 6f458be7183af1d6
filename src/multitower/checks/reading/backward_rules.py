"""Backward rules: what the rule of a `jax.custom_vjp` does with the gradients of rows.

A tower has the gradients of its own rows alone. A rule is safe if it works on them row by row, and
on what is a sum over them, such as the gradient of a weight, by factors only.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from multitower.checks.reading.flow import Flow
from multitower.engines.collectives import axis_of
from multitower.engines.segments import compute

# What is known of the gradient of a value without rows: it is a sum over the tower's rows.
_SUMMED = Flow("linear", "the gradient", is_mean=True, varies=True)


def backward_mixing(
    equation: Any,
    inputs: Sequence[Flow],
    results: Sequence[Flow],
    num_towers: int,
    read: Callable[[Any, list[Flow]], list[Flow]],
) -> str | None:
    """Where a backward rule brings rows together, if the function itself does not.

    Args:
        equation: the call of a function with a backward rule of its own.
        inputs: what is known of its inputs.
        results: what is known of its results.
        num_towers: the number of towers; 0 if the function cannot tell.
        read: reads a program, from what is known of its arguments.

    Returns:
        The operation and its line; None if there is none, or if the rule cannot be read.
    """
    kinds = [atom.aval for atom in equation.outvars]
    are_floats = all(jnp.issubdtype(getattr(kind, "dtype", int), jnp.inexact) for kind in kinds)
    # Nor is a rule read whose rows are in another order: it may put their gradients back.
    is_told = any(flow.mixed or flow.order for flow in (*inputs, *results))
    if not are_floats or is_told:
        return None
    atoms = zip(equation.invars, inputs, strict=True)
    known = {atom: flow for atom, flow in atoms if not isinstance(atom, core.Literal)}

    def call(*values: Any) -> Sequence[Any]:
        of = dict(zip(known, values, strict=True))
        given = [x.val if isinstance(x, core.Literal) else of[x] for x in equation.invars]
        return compute(equation, given)

    def rule(values: list[Any], gradients: list[Any]) -> Any:
        results, backward = jax.vjp(call, *values)
        return backward(jax.tree.unflatten(jax.tree.structure(results), gradients))

    try:
        make = jax.make_jaxpr(rule, axis_env=axis_of(num_towers) if num_towers else None)
        program = make([_shape(atom.aval) for atom in known], [*map(_shape, kinds)])
        found = read(program, [*known.values(), *map(_of_gradient, results)])
    except Exception:  # the rule is not for a reader's numbers of rows
        return None
    return next((flow.mixed[0] for flow in found if flow.mixed), None)


def _of_gradient(result: Flow) -> Flow:
    """What is known of a result's gradient."""
    if result.word == "by row":
        return Flow("by row", varies=True, sources=frozenset([-1]))
    return _SUMMED if result.word == "free" else Flow(varies=True)


def _shape(kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)

"""Backward rules: what the rule of a `jax.custom_vjp` does with the gradients of rows.

A tower has the gradients of its own rows alone. A rule is safe if it works on them row by row, and
on what is a sum over them, such as the gradient of a weight, by factors only. If the function is a
mean over rows, the rule divides by their number, and otherwise it does not.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.extend import core

from multitower.checks.reading.flow import Flow
from multitower.engines.collectives import axis_of
from multitower.engines.segments import compute

# What is known of the gradient of a value without rows: it is a sum over the tower's rows.
_SUMMED = Flow("linear", "the gradient", is_mean=True, varies=True)


class Rule(NamedTuple):
    """What is wrong with a backward rule: the operations and their lines; None for nothing.

    Attributes:
        mixing: where it brings rows together, though the function itself does not.
        counting: where it multiplies or divides by the number of rows, though the function does
            not; or where the function does, if it does not.
    """

    mixing: str | None = None
    counting: str | None = None


def read_backward_rule(
    equation: Any,
    inputs: Sequence[Flow],
    results: Sequence[Flow],
    num_towers: int,
    read: Callable[[Any, list[Flow]], list[Flow]],
) -> Rule:
    """What a backward rule does with rows that the function itself does not.

    Args:
        equation: the call of a function with a backward rule of its own.
        inputs: what is known of its inputs.
        results: what is known of its results.
        num_towers: the number of towers; 0 if the function cannot tell.
        read: reads a program, from what is known of its arguments.

    Returns:
        What is wrong; nothing if the rule cannot be read.
    """
    kinds = [atom.aval for atom in equation.outvars]
    are_floats = all(jnp.issubdtype(getattr(kind, "dtype", int), jnp.inexact) for kind in kinds)
    # Nor is a rule read whose rows are in another order: it may put their gradients back.
    is_told = any(flow.mixed or flow.order for flow in (*inputs, *results))
    if not are_floats or is_told:
        return Rule()
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
        return Rule()
    mixing = next((flow.mixed[0] for flow in found if flow.mixed), None)
    return Rule(mixing, None if mixing else _counting(inputs, results, found))


def _counting(
    inputs: Sequence[Flow], results: Sequence[Flow], gradients: Sequence[Flow]
) -> str | None:
    """Where the rule or the function, and not both, divides by the number of rows."""
    if any(flow.counted for flow in (*inputs, *results)):
        return None
    if all(flow.word == "by row" for flow in results):
        found = (flow.counted or (flow.origin if flow.is_mean else None) for flow in gradients)
        return next((place for place in found if place), None)
    if all(flow.word == "linear" and flow.is_mean for flow in results):
        # Not if one of them is divided: another may be zeros.
        is_divided = any(flow.counted or flow.is_mean for flow in gradients)
        are_sums = any(flow.word == "by row" or flow.is_sum for flow in gradients)
        return results[0].origin if are_sums and not is_divided else None
    return None


def _of_gradient(result: Flow) -> Flow:
    """What is known of a result's gradient."""
    if result.word == "by row":
        return Flow("by row", varies=True, sources=frozenset([-1]))
    return _SUMMED if result.word == "free" else Flow(varies=True)


def _shape(kind: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype)

"""Collectives between towers, each as a sum over towers and functions of one tower.

A tower's values are summed directly, or put at the tower's own place among zeros, so that the sum
has the values of all towers side by side. The derivative of either is a sum over towers, too, of
their cotangents of the total.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from multitower.engines.collectives import (
    check,
    is_axis_index,
    is_collective,
    is_sum,
    needs_axis,
    received,
    refuse_inside,
    sent,
)
from multitower.engines.segments import Step, compute, read_program, values_of
from multitower.engines.totals import with_one_nan
from multitower.towers.leaves import shape_of

_NAME = "multitower.sum_over_towers"


def is_meeting(equation: Any) -> bool:
    """Whether an equation of a jaxpr stands for a sum over towers."""
    return equation.primitive.name == "name" and equation.params.get("name") == _NAME


def without_collectives(
    closed: Any,
    number: int,
    num_towers: int,
    *,
    rules: Mapping[str, str] = MappingProxyType({}),
) -> Any:
    """A tower's program with marks, which are the identity, where values are summed over towers.

    Args:
        closed: the jaxpr, traced where the axis of towers exists.
        number: the position of the tower's own number among its arguments.
        num_towers: how many towers there are.
        rules: as for `read_program`; empty if the program will be differentiated.

    Returns:
        The new program; or `closed` itself if it has no collective and does not use the tower's
        number.

    Raises:
        OutputError: a collective that towers do not support, or at a place where they cannot meet.
    """
    program = read_program(closed, needs_axis, refuse_inside, rules=rules)
    if not any(needs_axis(step.equation) for step in program.steps):
        return closed

    def take(step: Step, given: list[Any], own: Any) -> Any:
        if is_axis_index(step.equation):
            return [own]
        if not is_collective(step.equation):
            return compute(step.equation, given)
        check(step.equation)
        return [_added(step.equation, jnp.asarray(value), own, num_towers) for value in given]

    def run(*values: Any) -> list[Any]:
        known = {**program.consts, **dict(zip(program.inputs, values, strict=True))}
        for step in program.steps:
            results = take(step, values_of(step.inputs, known), values[number])
            known.update(zip(step.outputs, results, strict=True))
        return values_of(program.outputs, known)

    return jax.make_jaxpr(run)(*map(shape_of, closed.in_avals))


def _added(equation: Any, value: jax.Array, number: Any, num_towers: int) -> jax.Array:
    """The value of a collective, with a mark in place of the sum over towers."""
    given = sent(equation, value)
    dtype = given.dtype
    # As in `engines.packing`, 16-bit floats are summed in float32.
    if dtype == jnp.bool_:
        given = given.astype(jnp.int32)
    elif jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4:
        given = given.astype(jnp.float32)
    if is_sum(equation):
        given = given[None]  # so that it has an axis
    else:
        own = jnp.arange(num_towers, dtype=number.dtype) == number
        # Adding -0.0 changes no number, not even 0.0 or -0.0; adding 0.0 would change -0.0.
        zero = -jnp.zeros((), given.dtype)
        given = jnp.where(own.reshape(num_towers, *[1] * given.ndim), given[None], zero)
    total = with_one_nan(checkpoint_name(given, _NAME))
    total = (total[0] if is_sum(equation) else total).astype(dtype)
    return received(equation, total, lax.convert_element_type(number, jnp.int32))

"""Scans over stacked layers, split by their length: each part is a scan over some of the layers."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core

from multitower.engines.segments import Program, compute, num_same, open_calls, values_of
from multitower.stages.work import is_heavy, work_of
from multitower.towers.leaves import shape_of


def split_scans(program: Program, avals: Sequence[Any], num_parts: int) -> Program:
    """Splits scans that are too long for equal shares of the work.

    Args:
        program: any program.
        avals: shapes and dtypes of its inputs.
        num_parts: the number of shares.

    Returns:
        The program with several scans in place of each, which end where a share ends.
    """
    bounds = _bounds(program, num_parts)
    if not any(bounds.values()):
        return program

    def run(*values: Any) -> list[Any]:
        known = {**program.consts, **dict(zip(program.inputs, values, strict=True))}
        for at, step in enumerate(program.steps):
            given = values_of(step.inputs, known)
            if bounds.get(at):
                results = _in_parts(step.equation, given, bounds[at])
            else:
                results = compute(step.equation, given)
            known.update(zip(step.outputs, results, strict=True))
        return values_of(program.outputs, known)

    again = jax.make_jaxpr(run)(*map(shape_of, avals))
    return open_calls(again, lambda equation: equation.primitive.name == "jit")


def _bounds(program: Program, num_parts: int) -> dict[int, list[int]]:
    """By number of a scan that is long enough: the iterations before which a new share begins."""
    heavy = [is_heavy(step.equation) for step in program.steps]
    work = [
        work_of(step.equation) if is_one else 0
        for step, is_one in zip(program.steps, heavy, strict=True)
    ]
    total = sum(work)
    found: dict[int, list[int]] = {}
    for at, before in enumerate(itertools.accumulate(work, initial=0)):
        if at == len(work) or program.steps[at].equation.primitive.name != "scan":
            continue
        length = program.steps[at].equation.params["length"]
        if work[at] * 2 * num_parts > total:
            ends = [round((p * total / num_parts - before) / work[at] * length)
                    for p in range(1, num_parts)]  # fmt: skip
            found[at] = sorted({end for end in ends if 0 < end < length})
    return found


def _in_parts(equation: Any, given: Sequence[Any], bounds: Sequence[int]) -> list[Any]:
    """The results of a scan, computed as several scans, cut at `bounds`."""
    params = equation.params
    inner = params["jaxpr"]
    num_carried = num_same(equation.outvars, inner.jaxpr.outvars)
    num_shared = num_same(equation.invars, inner.jaxpr.invars) - num_carried
    shared, carry = given[:num_shared], list(given[num_shared : num_shared + num_carried])
    stacked = given[num_shared + num_carried :]
    body = core.jaxpr_as_fun(inner)

    def turn(carry: list[Any], own: list[Any]) -> tuple[list[Any], list[Any]]:
        results = body(*shared, *carry, *own)
        return list(results[:num_carried]), list(results[num_carried:])

    parts = list(itertools.pairwise([0, *bounds, params["length"]]))
    found: dict[int, list[Any]] = {}
    for first, last in reversed(parts) if params["reverse"] else parts:
        carry, found[first] = lax.scan(
            turn,
            carry,
            [lax.slice_in_dim(leaf, first, last) for leaf in stacked],
            length=last - first,
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
    pieces = zip(*(found[first] for first, _ in parts), strict=True)
    return [*carry, *(jnp.concatenate(piece) for piece in pieces)]

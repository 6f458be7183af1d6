"""First look: the cheap part of `check_parallel`, which every entry point runs once, and warns.

It reads the program of one tower and runs nothing. What it says is worth a warning and no error:
somebody may mean it.
"""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from multitower.checks.problems import MIXED, SAME_NUMBERS, SUM, Problem
from multitower.checks.row_flow import Flow, Reading, read, unused_size
from multitower.errors import MultitowerWarning
from multitower.towers.rows import Tower, device_dtype

# What is handed on from step to step; how towers put it together is said elsewhere.
_STATES = ("model", "model_state")


def look(
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
    *,
    averages: bool,
) -> None:
    """Warns of what no tower should do, as far as it can be read off the program.

    Args:
        outputs: what one tower computes from its rows, names to trees.
        rows: the arrays that are cut, or their shapes and dtypes; rows on axis 0.
        others: everything else that the program is made of; sizes that are no rows.
        averages: whether results without rows are averaged over towers.

    Warns:
        MultitowerWarning: rows are mixed, a sum is averaged, or all towers draw the same numbers.
    """
    traced = _read(outputs, rows, others)
    if traced is None:
        return  # a fixed number of rows, or a mistake that the call itself will tell
    reading, tree, num_rows = traced
    for problem in _problems(reading, tree, averages, num_rows):
        warnings.warn(
            f"{problem} (mt.check_parallel looks closer.)", MultitowerWarning, stacklevel=4
        )


def look_at_key(
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    apart: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
    name: str,
) -> None:
    """Warns of a key that all towers have alike, if numbers are drawn from it.

    Args:
        outputs: what one tower computes.
        apart: the same if towers had keys of their own.
        rows: as for `look`.
        others: as for `look`.
        name: what shares the key.

    Warns:
        MultitowerWarning: all towers draw the same numbers.
    """
    alike, own = _read(outputs, rows, others), _read(apart, rows, others)
    if alike is None or own is None:
        return
    draws = [place for place in alike[0].draws if place not in own[0].draws]
    if draws:
        warnings.warn(
            f"{name} as it is, so that all towers draw the same random numbers, dropout masks for "
            f"example ({draws[0]}). Say 0 for the key there, or pass it as an argument of its own.",
            MultitowerWarning,
            stacklevel=5,
        )


def _read(
    outputs: Callable[[list[Any], Tower], dict[str, Any]], rows: Sequence[Any], others: Any
) -> tuple[Reading, dict[str, Any], int] | None:
    """What the program of one tower does, the tree of its outputs, and its number of rows."""
    sizes = [size for x in jax.tree.leaves(others) for size in getattr(x, "shape", ())]
    num_rows = unused_size([*sizes, *(size for x in rows for size in x.shape[1:])])
    shapes = [jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), device_dtype(x)) for x in rows]

    def run(rows: list[Any], number: jax.Array) -> dict[str, Any]:
        return outputs(rows, Tower(number, jnp.int32(num_rows), jnp.int32(2 * num_rows)))

    try:
        program, tree = jax.make_jaxpr(run, return_shape=True)(shapes, jnp.int32(0))
    except Exception:
        return None
    flows = [*(Flow("by row", varies=True) for _ in rows), Flow(varies=True)]
    return read(program, flows, num_rows), tree, num_rows


def _problems(
    reading: Reading, tree: dict[str, Any], averages: bool, num_rows: int
) -> list[Problem]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    found = [
        (str(path[0].key), _name(path), leaf, flow)
        for (path, leaf), flow in zip(flat, reading.outputs, strict=True)
    ]
    draws = dict.fromkeys(reading.draws)
    problems = [Problem("same numbers", "random numbers", place, SAME_NUMBERS) for place in draws]
    # Who hands on statistics over rows, as BatchNorm does, knows that towers have their own.
    if any(kind in _STATES and leaf.ndim and flow.word != "free" for kind, _, leaf, flow in found):
        return problems
    if any(kind == "aux" and leaf.ndim and flow.word == "linear" for kind, _, leaf, flow in found):
        return problems
    for kind, name, leaf, flow in found:
        has_rows = leaf.ndim > 0 and leaf.shape[0] == num_rows
        if kind in _STATES or not (averages or has_rows):
            continue
        if flow.word == "mixed":
            problems.append(Problem("mixed rows", name, flow.origin, MIXED))
        elif flow.word == "linear" and not flow.is_mean:
            problems.append(Problem("sum", name, flow.origin, SUM))
    return problems


def _name(path: tuple[Any, ...]) -> str:
    first, *rest = path
    return f"{first.key}{jax.tree_util.keystr(tuple(rest))}"

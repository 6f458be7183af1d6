"""First look: the cheap part of `check_parallel`, which every entry point runs once.

It reads the program of one tower and runs nothing. It only warns, because a program may do such
things on purpose.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.checks.flow import Flow, rows_of
from multitower.checks.problems import (
    COUNTED,
    FIRST,
    MIXED,
    OF_ONE_TOWER,
    PARTS,
    STATISTICS,
    STEADY,
    SUM_ALL,
    TERMS,
    Problem,
    same_numbers,
    summed,
    summed_state,
    table,
)
from multitower.checks.row_flow import Reading, read, unused_size
from multitower.engines.collectives import axis_of, first_collective
from multitower.errors import warn
from multitower.towers.leaves import device_dtype
from multitower.towers.rows import Tower

# An unusual number of towers, so that an axis with the rows of all towers is known by its size.
_TOWERS = 7
# A divisor of this is tried if a function does not work with a prime number of rows.
_GROUPS = 5040
# State for the next step. The towers' states are averaged, which is right for statistics.
_STATES = ("model", "model_state", "state")


def look(
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
    *,
    averages: bool,
    num_devices: int,
    named: Callable[[int], tuple[str, str]],
    of_state_sums: str = SUM_ALL,
) -> None:
    """Warns if a function is not safe to run data parallel, as far as its program shows.

    Args:
        outputs: what one tower computes from its rows: kinds of results ("loss", "aux", ...) to
            trees.
        rows: the arrays that are cut, or their shapes and dtypes; rows on axis 0.
        others: everything else that the program is made of. Its sizes are not numbers of rows.
        averages: whether results without rows are averaged over towers.
        num_devices: the number of towers, one per device, if `towers` was not given; else 0.
        named: what the user calls an array that is cut, by its number; and what to write so that
            every tower gets the whole of it.
        of_state_sums: what becomes of a state that adds up rows, and what to write instead.

    Warns:
        MultitowerWarning: rows are mixed, a sum is averaged, also in a state, a row is divided by
            the number of rows, a sum over rows and a number make a mt.ratio, all towers draw the
            same numbers, a table is cut, the number of devices decides over how many rows BatchNorm
            works, or out_axes=None takes what depends on rows from the first tower.
    """
    traced = read_tower(outputs, rows, others) or _read_in_groups(outputs, rows, others)
    if traced is None:
        return  # it needs a fixed number of rows, or has a mistake that the call itself reports
    if any(flow.counted for flow in traced[0].outputs):
        traced = _sure_of_counts(traced, outputs, rows, others)
    reading, results = traced[0], Results.of(*traced)
    found = [
        *(table(*named(n), place) for n, place in reading.tables.items()),
        *same_numbers(reading.draws),
        *_of_results(results, averages, {*reading.tables.values()}),
        *results.sums_in_states(of_state_sums),
        *results.of_one_tower(),
        *results.steady_terms(),
    ]
    if num_devices > 1:
        found.extend(results.statistics(num_devices)[:1])
    for problem in found:
        warn(f"{problem} (mt.check_parallel looks closer.)")


def look_at_key(
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    apart: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
    name: str,
) -> None:
    """Warns of a key that is the same in all towers, if random numbers are drawn from it.

    Args:
        outputs: what one tower computes.
        apart: what it would compute if each tower had a key of its own.
        rows: as for `look`.
        others: as for `look`.
        name: what shares the key, for the message.

    Warns:
        MultitowerWarning: all towers draw the same numbers.
    """
    alike, own = read_tower(outputs, rows, others), read_tower(apart, rows, others)
    if alike is None or own is None:
        return
    draws = [place for place in alike[0].draws if place not in own[0].draws]
    if draws:
        warn(
            f"{name} as it is, so that all towers draw the same random numbers, dropout masks for "
            f"example ({draws[0]}). Say 0 for the key there, or pass it as an argument of its own."
        )


def read_tower(
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
    *,
    batch_rows: int = 0,
    times: int = 1,
) -> tuple[Reading, dict[str, Any], int] | None:
    """What the program of one tower does, the tree of its outputs, and its number of rows.

    Args:
        outputs: as for `look`.
        rows: as for `look`.
        others: as for `look`.
        batch_rows: as for `row_flow.read`.
        times: the number of rows will be a multiple of this.

    Returns:
        None if the function fails with a number of rows that the reader chooses.
    """
    sizes = [size for x in jax.tree.leaves(others) for size in getattr(x, "shape", ())]
    num_rows = times * unused_size([*sizes, *(size for x in rows for size in x.shape[1:])])
    shapes = [jax.ShapeDtypeStruct((num_rows, *x.shape[1:]), device_dtype(x)) for x in rows]

    def run(rows: list[Any], number: jax.Array) -> dict[str, Any]:
        return outputs(rows, Tower(number, jnp.int32(num_rows), jnp.int32(num_rows)))

    try:
        make = jax.make_jaxpr(run, axis_env=axis_of(_TOWERS), return_shape=True)
        program, tree = make(shapes, jnp.int32(0))
    except Exception:
        return None
    flows = [*(rows_of(number) for number in range(len(rows))), Flow(varies=True)]
    all_rows = num_rows * _TOWERS if first_collective(program) is not None else 0
    try:
        return read(program, flows, num_rows, batch_rows, all_rows), tree, num_rows
    except Exception as error:  # a fault of the reader is no reason to end a training
        warn(
            "this function runs without a look at its rows, which failed: "
            f"{type(error).__name__}: {error}. Please report it with the function."
        )
        return None


def _read_in_groups(
    outputs: Callable[[list[Any], Tower], dict[str, Any]], rows: Sequence[Any], others: Any
) -> tuple[Reading, dict[str, Any], int] | None:
    """The reading of a function that needs an even number of rows, or whole groups of them.

    A reshape that makes groups of rows, or chunks for a loop, is meant and causes no warning.
    """
    found = read_tower(outputs, rows, others, times=math.gcd(rows[0].shape[0], _GROUPS))
    if found is None:
        return None
    flows = [
        replace(flow, mixed=tuple(p for p in flow.mixed if not p.startswith("reshape at ")))
        for flow in found[0].outputs
    ]
    return found[0]._replace(outputs=flows), *found[1:]


def _sure_of_counts(
    traced: tuple[Reading, dict[str, Any], int],
    outputs: Callable[[list[Any], Tower], dict[str, Any]],
    rows: Sequence[Any],
    others: Any,
) -> tuple[Reading, dict[str, Any], int]:
    """The reading, where `counted` is kept only if another number of rows gives the same."""
    reading, tree, num_rows = traced
    again = read_tower(outputs, rows, (others, jax.ShapeDtypeStruct((num_rows,), jnp.float32)))
    flows = again[0].outputs if again else [Flow()] * len(reading.outputs)
    sure = [
        one if other.counted == one.counted else replace(one, counted=None)
        for one, other in zip(reading.outputs, flows, strict=True)
    ]
    return reading._replace(outputs=sure), tree, num_rows


class _Result(NamedTuple):
    """A leaf of what a tower computes; `kind` is loss, aux, metrics, result, first or a state."""

    kind: str
    name: str
    flow: Flow
    has_rows: bool
    ndim: int

    @property
    def is_statistic(self) -> bool:
        """Whether it is an array of means over rows, such as BatchNorm keeps."""
        is_array = self.ndim > 0 and not self.has_rows and self.flow.word != "free"
        if self.kind in _STATES:
            return is_array
        return self.kind == "aux" and is_array and self.flow.is_mean and not self.flow.mixed


class Results(NamedTuple):
    """All results, and the lines where returned statistics come from.

    A function that returns such statistics is meant to have some for each tower, so these lines
    cause no warning; anything else that mixes rows does.
    """

    leaves: list[_Result]
    known_lines: set[str]
    num_rows: int

    @classmethod
    def of(cls, reading: Reading, tree: dict[str, Any], num_rows: int) -> "Results":
        """From what a program does with rows, and the tree of what it returns, by kind."""
        flat, _ = jax.tree_util.tree_flatten_with_path(tree)
        leaves = [
            _Result(str(path[0].key), _name(path), flow, leaf.shape[:1] == (num_rows,), leaf.ndim)
            for (path, leaf), flow in zip(flat, reading.outputs, strict=True)
        ]
        known = {_line(root) for one in leaves if one.is_statistic for root in one.flow.all_roots}
        return cls(leaves, known, num_rows)

    def are_statistics(self, flow: Flow) -> bool:
        """Whether rows are brought together by nothing but returned statistics."""
        return bool(flow.mixed) and {_line(root) for root in flow.roots} <= self.known_lines

    def statistics(self, num_towers: int) -> list[Problem]:
        """A problem for each result that depends on statistics of a tower's rows."""
        return [
            Problem("mixed rows", one.name, one.flow.mixed[0], STATISTICS.format(num=num_towers))
            for one in self.leaves
            if one.kind not in (*_STATES, TERMS) and self.are_statistics(one.flow)
        ]

    def sums_in_states(self, way_out: str = SUM_ALL) -> list[Problem]:
        """A problem for each state that adds up the rows of a tower."""
        return [
            summed_state(one.name, one.flow.origin, way_out)
            for one in self.leaves
            if one.kind in _STATES and one.flow.word == "linear" and not one.flow.is_mean
        ]

    def of_one_tower(self) -> list[Problem]:
        """A problem for each result that is the first tower's alone and depends on rows."""
        return [
            Problem("mixed rows", one.name, next(iter(one.flow.places), None), OF_ONE_TOWER)
            for one in self.leaves
            if one.kind == FIRST and (one.flow.word != "free" or one.has_rows)
        ]

    def steady_terms(self) -> list[Problem]:
        """A problem for each ratio of a sum over rows and a number that all towers have."""
        terms = [one for one in self.leaves if one.kind == TERMS]
        return [
            Problem("sum", "mt.ratio", total.flow.origin or weight.flow.origin, STEADY)
            for total, weight in zip(terms[::2], terms[1::2], strict=True)
            if self._is_steady(total) != self._is_steady(weight)
        ]

    def _is_steady(self, one: _Result) -> bool:
        """Whether it is one number, the same in every tower, and not a number of its rows."""
        flow = one.flow
        if one.ndim or flow.word != "free" or flow.varies or flow.is_drawn:
            return False
        return flow.value is None or bool(flow.value % self.num_rows)


def _of_results(results: Results, averages: bool, told: set[str]) -> list[Problem]:
    problems: list[Problem] = []
    for one in results.leaves:
        if one.kind in (*_STATES, FIRST, TERMS) or not (averages or one.has_rows):
            continue
        flow = one.flow
        unknown = {_line(root) for root in flow.roots} - results.known_lines
        if flow.mixed and unknown:
            if not told & set(flow.mixed):
                place = next((p for p in flow.mixed if _line(p) in unknown), flow.mixed[0])
                is_part = place.startswith(("split at ", "slice at "))
                problems.append(Problem("mixed rows", one.name, place, PARTS if is_part else MIXED))
        elif flow.word == "linear" and not flow.is_mean and not (one.kind == "aux" and one.ndim):
            problems.append(summed(one.name, flow.origin, is_loss=one.kind == "loss"))
        elif flow.counted:
            problems.append(Problem("row count", one.name, flow.counted, COUNTED))
    return problems


def _line(place: str) -> str:
    """The line of a place such as `reduce_sum at model.py:30: y = x - x.mean(0)`."""
    return place.partition(" at ")[2] or place


def _name(path: tuple[Any, ...]) -> str:
    first, *rest = path
    if first.key == "model":  # its leaves are known by their numbers alone
        return "the state of the module"
    kind = "result" if first.key == FIRST else first.key
    return f"{kind}{jax.tree_util.keystr(tuple(rest))}"

"""Chunks: rows that `z = h.reshape(2, -1, d)` lays out as halves, one after the other.

`z[0] - z[1]` brings together two rows of different halves, which a tower does not have. A loop over
the halves, or their sum, brings nothing together.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multitower.checks import operations
from multitower.checks.flow import ALL_CHUNKS, Flow


def pairs_chunks(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether an operation brings together rows of two chunks.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.

    Returns:
        Whether it does; False also for a sum of chunks, and if that is not known.
    """
    numbers = {flow.chunk for flow in inputs} - {None, ALL_CHUNKS}
    adds_up = equation.primitive.name in {*operations.LINEAR_TOGETHER, "stack"} - {"sub"}
    return len(numbers) > 1 and not adds_up


def with_chunks(
    equation: Any, inputs: Sequence[Flow], found: Sequence[Flow], tower_rows: int
) -> list[Flow]:
    """What is known of an operation's results, with the chunk that each has the rows of.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.
        found: what is known of its results.
        tower_rows: the number of rows of a tower.
    """
    chunks = _chunks(equation, inputs, tower_rows)
    pairs = zip(found, chunks, strict=True)
    return [
        replace(flow, chunk=chunk) if chunk is not None and flow.word == "by row" else flow
        for flow, chunk in pairs
    ]


def _chunks(equation: Any, inputs: Sequence[Flow], tower_rows: int) -> Sequence[int | None]:
    """The chunk of each result."""
    shapes, results = map(_shapes, (equation.invars, equation.outvars))
    name, params = equation.primitive.name, equation.params
    if name == "reshape" and shapes[0][:1] == (tower_rows,):
        (shape,) = results
        is_cut = len(shape) > 1 and 1 < shape[0] < tower_rows == shape[0] * shape[1]
        return [ALL_CHUNKS if is_cut else None]
    known = {flow.chunk: shape for flow, shape in zip(inputs, shapes, strict=True)}
    known.pop(None, None)
    if len(known) != 1:
        return [None] * len(results)
    ((chunk, shape),) = known.items()
    if chunk != ALL_CHUNKS:
        return [chunk] * len(results)
    if len(results) == shape[0] and params.get("axis") == 0:  # z1, z2 = z, or jnp.split(z, 2)
        return range(len(results))
    if name == "slice" and results[0][:1] == (1,):
        return [params["start_indices"][0]]
    return [ALL_CHUNKS if result[:2] == shape[:2] else None for result in results]


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    return [getattr(atom.aval, "shape", ()) for atom in atoms]

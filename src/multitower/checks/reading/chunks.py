"""Chunks: rows that `z = h.reshape(2, -1, d)` lays out as halves, one after the other.

`z[0] * z[1]` brings together two rows of different halves, which a tower does not have. A loop over
the halves, or their sum, brings nothing together, as long as the sum is only added up.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from multitower.checks.reading import operations
from multitower.checks.reading.flow import ALL_CHUNKS, SUM_OF_CHUNKS, Flow, line_at, place_of

# They put chunks beside each other.
_BESIDE = {"concatenate", "pad", "stack", *operations.WRITTEN}


def pairing(place: str) -> str:
    """Where chunks are brought together, `chunks at model.py:30`, from the operation's place."""
    return place_of("chunks", line_at(place))


def pairs_chunks(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether an operation brings together rows of several chunks.

    Args:
        equation: the operation.
        inputs: what is known of its inputs.

    Returns:
        Whether it does; False also for a sum of chunks, and if that is not known.
    """
    chunks = _chunks(inputs)
    if not chunks <= {ALL_CHUNKS}:
        return (len(chunks) > 1 or SUM_OF_CHUNKS in chunks) and not _is_linear(equation, inputs)
    name, params = equation.primitive.name, equation.params
    if name == "dot_general":
        contracted, batch = params["dimension_numbers"]
        together = all(0 in contracted[n] or 0 in batch[n] for n in (0, 1))
        return not together and all(flow.chunk == ALL_CHUNKS for flow in inputs)
    return name != "reduce_sum" and _is_along_chunks(equation, inputs)


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
    chunks = _chunks_of_results(equation, inputs, tower_rows)
    return [
        replace(flow, chunk=chunk) if chunk is not None and flow.word == "by row" else flow
        for flow, chunk in zip(found, chunks, strict=True)
    ]


def _chunks_of_results(
    equation: Any, inputs: Sequence[Flow], tower_rows: int
) -> Sequence[int | None]:
    """The chunk of each result; None if it is not known."""
    name, chunks, num_results = equation.primitive.name, _chunks(inputs), len(equation.outvars)
    if name == "reshape" and not chunks and _shapes(equation.invars)[0][:1] == (tower_rows,):
        (shape,) = _shapes(equation.outvars)
        is_cut = len(shape) > 1 and 1 < shape[0] < tower_rows == shape[0] * shape[1]
        return [ALL_CHUNKS if is_cut else None]
    if not chunks or name in _BESIDE or pairs_chunks(equation, inputs):
        return [None] * num_results
    if len(chunks) > 1 or _is_along_chunks(equation, inputs):
        return [SUM_OF_CHUNKS] * num_results
    return _of_all_chunks(equation, inputs) if ALL_CHUNKS in chunks else [*chunks] * num_results


def _of_all_chunks(equation: Any, inputs: Sequence[Flow]) -> Sequence[int | None]:
    """The chunk of each result of an array that has all of them."""
    shapes, results = map(_shapes, (equation.invars, equation.outvars))
    pairs = zip(shapes, inputs, strict=True)
    shape = next(shape for shape, flow in pairs if flow.chunk == ALL_CHUNKS)
    if len(results) == shape[0] and equation.params.get("axis") == 0:  # z1, z2 = z
        return range(len(results))
    if equation.primitive.name == "slice" and results[0][:1] == (1,):
        return [equation.params["start_indices"][0]]
    return [ALL_CHUNKS if result[:2] == shape[:2] else None for result in results]


def _is_linear(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether what it makes of sums of chunks is a sum of chunks."""
    name, others = equation.primitive.name, [flow for flow in inputs if flow.chunk is None]
    if name == "select_n":
        return inputs[0].word == "free"
    if name in _BESIDE or name in operations.LINEAR_TOGETHER or name in operations.LINEAR_ALONE:
        return True
    is_scaled = name in operations.LINEAR_WITH_FREE or (name == "div" and inputs[0] not in others)
    return is_scaled and len(others) == 1 and others[0].word == "free"


def _is_along_chunks(equation: Any, inputs: Sequence[Flow]) -> bool:
    """Whether it goes over all chunks, from row to row, such as z.max(0)."""
    if equation.primitive.name == "dot_general":
        contracted, _ = equation.params["dimension_numbers"]
        pairs = zip(inputs, contracted, strict=True)
        return any(flow.chunk == ALL_CHUNKS and 0 in axes for flow, axes in pairs)
    (shape, *_), axes = _shapes(equation.invars), equation.params.get("axes", ())
    return inputs[0].chunk == ALL_CHUNKS and 0 in axes and 1 not in axes and len(shape) > 1


def _chunks(inputs: Sequence[Flow]) -> set[int]:
    return {flow.chunk for flow in inputs if flow.chunk is not None}


def _shapes(atoms: Sequence[Any]) -> list[tuple[int, ...]]:
    return [getattr(atom.aval, "shape", ()) for atom in atoms]

"""Packing: puts the sums of one tower into few buffers, without copying the large ones.

Small leaves share one vector per dtype, large leaves are buffers of their own: handling a buffer
costs the host microseconds, copying megabytes costs the device milliseconds. 16-bit floats become
float32, so that every addition on the way is an IEEE float32 addition with one right answer
(compilers may keep excess precision between 16-bit additions).
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

SMALL = 64 * 1024  # elements; a leaf of up to this size is copied into a shared vector

# With so many slices of one size, XLA is not told where each begins: they then share a kernel.
_MANY = 4


class LeafPlace(NamedTuple):
    """Where one leaf lies: buffer, first element, its own shape and dtype, and a key's kind."""

    buffer: int
    start: int
    shape: tuple[int, ...]
    dtype: Any
    key_impl: str | None


@dataclass(frozen=True)
class PackedLayout:
    """Where every leaf of a tree lies in the buffers; hashable, so that it can be static."""

    treedef: Any
    places: tuple[LeafPlace, ...]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Packed:
    """A tree of arrays in few buffers, each of at least one dimension."""

    buffers: tuple[Any, ...]
    layout: PackedLayout = field(metadata={"static": True})


def pack(tree: Any) -> Packed:
    """Puts the leaves of a tree into buffers that may be added element by element."""
    leaves, treedef = jax.tree.flatten(tree)
    buffers: list[Any] = []
    shared_vectors: dict[Any, tuple[int, list[Any], int]] = {}
    places: list[LeafPlace] = []
    for leaf in leaves:
        value, dtype, key_impl = _addable(leaf)
        if value.size > SMALL:
            places.append(LeafPlace(len(buffers), 0, leaf.shape, dtype, key_impl))
            buffers.append(value)
            continue
        if value.dtype not in shared_vectors:
            shared_vectors[value.dtype] = (len(buffers), [], 0)
            buffers.append(None)
        index, pieces, start = shared_vectors[value.dtype]
        places.append(LeafPlace(index, start, leaf.shape, dtype, key_impl))
        shared_vectors[value.dtype] = (index, [*pieces, value.reshape(-1)], start + value.size)
    for index, pieces, _ in shared_vectors.values():
        buffers[index] = jnp.concatenate(pieces)
    return Packed(tuple(buffers), PackedLayout(treedef, tuple(places)))


def unpack(packed: Packed, scale: Any = None, num_scaled: int = 0) -> Any:
    """Gives the tree back, every leaf with its own shape and dtype.

    The first `num_scaled` leaves are multiplied by `scale`, while 16-bit floats are still float32:
    the sum over many rows may be larger than float16 can hold, and the mean is not.
    """
    places, found = packed.layout.places, dict[int, Any]()
    for number, buffer in enumerate(packed.buffers):
        own = [n for n, place in enumerate(places) if place.buffer == number]
        spans = [(places[n].start, places[n].start + _size(places[n])) for n in own]
        whole = len(own) == 1 and buffer.size == _size(places[own[0]])
        pieces = [buffer] if whole else slices(buffer, spans)
        for n, piece in zip(own, pieces, strict=True):
            with jax.numpy_dtype_promotion("standard"):  # `scale` may be wider, and leaves complex
                found[n] = _leaf(piece * scale if n < num_scaled else piece, places[n])
    return jax.tree.unflatten(packed.layout.treedef, [found[n] for n in range(len(places))])


def slices(vector: jax.Array, spans: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Slices of a vector, inside a program.

    XLA compiles equal kernels once, but kernels on slices differ by where a slice begins, so a
    hundred layers would make a hundred kernels. If many slices have one size, their starts are
    therefore hidden from XLA. No start is negative, so JAX need not add operations for such starts,
    which take long to compile (`benchmarks/results/first_step.md`).

    Args:
        vector: an array of one dimension.
        spans: for each slice its first element, and the element after its last one.
    """
    counts = Counter(end - start for start, end in spans)
    starts: list[np.int32] = [np.int32(start) for start, _ in spans]
    many = vector.size > 0 and max(counts.values(), default=0) >= _MANY
    hidden = _hidden(vector, starts) if many else starts
    return [
        jax.lax.dynamic_slice(vector, (begin,), (end - start,), allow_negative_indices=False)
        if counts[end - start] >= _MANY
        else jax.lax.slice(vector, (start,), (end,))
        for (start, end), begin in zip(spans, hidden, strict=True)
    ]


def _hidden(vector: jax.Array, starts: list[np.int32]) -> list[Any]:
    """The same numbers, where XLA does not know them."""

    def barrier(_: Any) -> list[Any]:
        return jax.lax.optimization_barrier(starts)

    def numbers(_: Any) -> list[Any]:
        return [jnp.int32(start) for start in starts]

    def either(vector: jax.Array) -> list[Any]:
        return jax.lax.cond(jnp.any(vector[:1]), numbers, numbers, vector)

    if jax.__version_info__ >= (0, 11):
        return barrier(vector)
    # On CPUs XLA looked through a barrier. It does not see that two branches give the same.
    return jax.lax.platform_dependent(vector, cpu=either, default=barrier)


def _addable(leaf: Any) -> tuple[Any, Any, str | None]:
    """The leaf in a dtype in which sums have one right answer; its own dtype; a key's kind."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf), leaf.dtype, str(jax.random.key_impl(leaf))
    if leaf.dtype == jnp.bool_:
        return leaf.astype(jnp.int32), leaf.dtype, None
    if jnp.issubdtype(leaf.dtype, jnp.floating) and leaf.dtype.itemsize < 4:
        return leaf.astype(jnp.float32), leaf.dtype, None
    return leaf, leaf.dtype, None


def _size(place: LeafPlace) -> int:
    """The number of elements that a leaf takes in its buffer."""
    return math.prod(place.shape) * (1 if place.key_impl is None else _key_size(place.key_impl))


def _key_size(impl: str) -> int:
    return jax.random.key_data(jax.random.key(0, impl=impl)).size


def _leaf(piece: Any, place: LeafPlace) -> Any:
    if place.key_impl is not None:
        data = piece.reshape(*place.shape, _key_size(place.key_impl))
        return jax.random.wrap_key_data(data, impl=place.key_impl)
    return piece.reshape(place.shape).astype(place.dtype)

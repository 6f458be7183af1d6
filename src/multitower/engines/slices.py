"""Slices of a vector, so that a compiler has little to do."""

from collections import Counter
from collections.abc import Sequence

import jax
import numpy as np

# Of so many of one size the kernels are alike, if they do not tell where a slice begins.
_MANY = 4


def slices(vector: jax.Array, places: Sequence[tuple[int, int]]) -> list[jax.Array]:
    """Slices of a vector, inside a program.

    XLA compiles equal kernels once, and those that work on slices differ by where these begin: a
    hundred layers make a hundred kernels. So of many slices of one size it is not told.

    Args:
        vector: of one dimension.
        places: where each slice begins and ends.
    """
    counts = Counter(end - start for start, end in places)
    starts: list[np.int32] = [np.int32(start) for start, _ in places]
    hidden = jax.lax.optimization_barrier(starts)
    return [
        jax.lax.dynamic_slice(vector, (begin,), (end - start,))
        if counts[end - start] >= _MANY
        else vector[start:end]
        for (start, end), begin in zip(places, hidden, strict=True)
    ]

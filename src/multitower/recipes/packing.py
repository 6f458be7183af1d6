"""Packed sequences: documents are concatenated, and cut into rows of equal length without loss."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

NUM_BYTES = 256
SEPARATOR = NUM_BYTES  # the token before every document, which also pads the last row
VOCABULARY = NUM_BYTES + 1


def pack(documents: Sequence[bytes], length: int) -> np.ndarray[Any, np.dtype[np.uint16]]:
    """Concatenates documents, with a separator before each, and cuts the result into rows.

    A row's last token is the first one of the next row, so that every byte is predicted once.

    Args:
        documents: documents that are not empty.
        length: the number of predictions per row.

    Returns:
        uint16, shape (rows, length + 1): bytes, or `SEPARATOR`.

    Example:
        >>> from multitower.recipes.packing import pack
        >>> pack([b"ab", b"c"], 3)
        array([[256,  97,  98, 256],
               [256,  99, 256, 256]], dtype=uint16)
    """
    num_tokens = sum(len(document) + 1 for document in documents)
    num_rows = -(-(num_tokens - 1) // length)
    tokens = np.full(num_rows * length + 1, SEPARATOR, np.uint16)
    place = 0
    for document in documents:
        tokens[place + 1 : place + 1 + len(document)] = np.frombuffer(document, np.uint8)
        place += 1 + len(document)
    windows = np.lib.stride_tricks.sliding_window_view(tokens, length + 1)
    return np.ascontiguousarray(windows[::length])


def take_tokens(tokens: Any) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Splits packed rows into inputs and targets.

    Args:
        tokens: as `pack` returns them.

    Returns:
        All of shape (rows, length): the inputs, int32; their segments, int32, one number for each
        document of a row; the targets, int32; and which of them count, bool. A separator is never
        predicted: it begins another document, or pads the last row.
    """
    tokens = jnp.asarray(tokens, jnp.int32)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    segments = jnp.cumsum(inputs == SEPARATOR, axis=1, dtype=jnp.int32)
    return inputs, segments, targets, targets != SEPARATOR

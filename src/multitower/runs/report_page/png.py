"""PNG: a small image as the few bytes that every browser reads."""

import struct
import zlib
from typing import Any

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_COLOUR_TYPES = {1: 0, 3: 2}  # grey, RGB


def encode_png(image: np.ndarray[Any, Any]) -> bytes:
    r"""Encodes an image: so little of PNG is needed that a library is but one more to miss.

    Args:
        image: uint8, shape (height, width, 1 or 3).

    Returns:
        A whole PNG file.

    Example:
        >>> import numpy as np
        >>> from multitower.runs.report_page.png import encode_png
        >>> encode_png(np.zeros((2, 2, 1), np.uint8))[:4]
        b'\x89PNG'

    Source: W3C, "Portable Network Graphics (PNG) Specification", 2003.
    """
    height, width, channels = image.shape
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPES[channels], 0, 0, 0)
    # Each row begins with the number of its filter; 0 is none.
    rows = np.pad(image.reshape(height, width * channels), ((0, 0), (1, 0)))
    pixels = zlib.compress(rows.tobytes(), 9)
    chunks = ((b"IHDR", header), (b"IDAT", pixels), (b"IEND", b""))
    return _SIGNATURE + b"".join(_chunk(kind, content) for kind, content in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(kind + content)
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", checksum)

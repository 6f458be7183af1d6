"""Reads untrusted pickles: a dict of arrays and plain values, and nothing else.

A pickle is a program. Here it can call only the classes and functions below, which stand in for
NumPy's own. A pickle that names anything else is refused before it can call it, and NumPy only
interprets bytes as numbers.
"""

import io
import pickle
import re
from typing import Any

import numpy as np

from multitower.errors import DataError

_NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")


def read_pickled_dict(content: bytes, where: str) -> dict[str, Any]:
    """Reads a pickled dict of NumPy arrays, containers, numbers and strings.

    Args:
        content: the pickle, written by Python 2 or 3 and NumPy 1 or 2.
        where: the file that it is from, for messages.

    Returns:
        The dict; keys that were pickled as bytes become strings.

    Raises:
        DataError: the pickle asks for anything else, is damaged, or is not a dict. What it asks
            for has not been executed.

    Example:
        >>> import pickle
        >>> import numpy as np
        >>> from multitower.data.datasets.pickles import read_pickled_dict
        >>> read_pickled_dict(pickle.dumps({b"labels": np.arange(3, dtype="u1")}), "here")
        {'labels': array([0, 1, 2], dtype=uint8)}
        >>> read_pickled_dict(pickle.dumps(print), "here")
        Traceback (most recent call last):
        multitower.DataError: here asks for builtins.print: ...
    """
    unpickler = _Unpickler(io.BytesIO(content), where)
    try:
        loaded = unpickler.load()
    except DataError:
        raise
    except Exception as error:  # a damaged pickle can raise nearly any error
        raise DataError(f"{where} is a damaged pickle ({error}). Download it again.") from error
    if not isinstance(loaded, dict):
        raise DataError(f"{where} is the pickle of a {type(loaded).__name__}, not of a dict.")
    return {
        name.decode("latin1") if isinstance(name, bytes) else str(name): (
            value.array_in(where) if isinstance(value, _Array) else value
        )
        for name, value in loaded.items()
    }


class _Dtype:
    """In place of `numpy.dtype`, for plain numbers only."""

    def __init__(self, code: str | bytes, align: Any = False, copy: Any = True) -> None:
        self.code = code.decode("ascii") if isinstance(code, bytes) else code
        if not _NUMBERS.fullmatch(self.code):
            raise ValueError(f"an array of dtype {self.code!r}, which is not a plain number")

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        order = state[1].decode("ascii") if isinstance(state[1], bytes) else state[1]
        self.code = order + self.code.lstrip("<>|=")
        if not _NUMBERS.fullmatch(self.code):
            raise ValueError(f"an array of byte order {order!r}")


class _Array:
    """In place of `numpy.ndarray`."""

    array: np.ndarray[Any, Any] | None = None

    def array_in(self, where: str) -> np.ndarray[Any, Any]:
        if self.array is None:
            raise DataError(f"{where} is a damaged pickle (an empty array). Download it again.")
        return self.array

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        _, shape, dtype, is_fortran, content = state
        if isinstance(content, str):  # a string of Python 2, read as latin-1
            content = content.encode("latin1")
        self.array = _as_array(content, dtype, shape, "F" if is_fortran else "C")


def _as_array(content: Any, dtype: Any, shape: Any, order: str) -> np.ndarray[Any, Any]:
    if not isinstance(dtype, _Dtype):
        raise TypeError(f"an array of {type(dtype).__name__}")
    numbers = np.frombuffer(content, np.dtype(dtype.code))
    return numbers.reshape(shape, order="F" if order == "F" else "C")


def _reconstruct(kind: Any, shape: Any, code: Any) -> _Array:
    """In place of `numpy._core.multiarray._reconstruct`; the contents follow in `__setstate__`."""
    if kind is not _Array:
        raise TypeError("an array of a class of its own")
    return _Array()


def _from_buffer(content: Any, dtype: Any, shape: Any, order: Any) -> _Array:
    """In place of `numpy._core.numeric._frombuffer`."""
    made = _Array()
    made.array = _as_array(content, dtype, shape, order)
    return made


def _encode(text: str, encoding: str) -> bytes:
    """In place of `_codecs.encode`, with which old protocols write bytes."""
    if encoding != "latin1":
        raise ValueError(f"bytes encoded as {encoding!r}")
    return text.encode("latin1")


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy._core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("_codecs", "encode"): _encode,
}


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, where: str) -> None:
        super().__init__(file, encoding="latin1")  # the byte strings of Python 2, byte for byte
        self._where = where

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        if (module_name, global_name) in _ALLOWED:
            return _ALLOWED[module_name, global_name]
        raise DataError(
            f"{self._where} asks for {module_name}.{global_name}: a data file may hold arrays, "
            "lists, dicts, numbers and strings only. It was not executed. Get the file from its "
            "origin."
        )

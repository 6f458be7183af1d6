"""Values: which of them never change, so that two that are equal once stay equal."""

import dataclasses
import functools
import math
import os
import sys
import sysconfig
import types
import weakref
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multitower.towers.leaves import device_dtype

METHOD = types.MethodType | types.BuiltinFunctionType | types.MethodWrapperType
_PLACES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_INSTALLED = tuple(
    {"<frozen"} | {f"{Path(place)}{os.sep}" for place in (*_PLACES, Path(__file__).parents[1])}
)
NO_VALUE = object()
_TINY, _HUGE = (float(one) for one in (np.finfo(np.float32).tiny, np.finfo(np.float32).max))


class UnknownDependencyError(Exception):
    """What a function uses cannot be compared with what another one uses."""


def value_in(cell: types.CellType) -> Any:
    """What a variable of a closure holds; `NO_VALUE` if it has no value yet."""
    try:
        return cell.cell_contents
    except ValueError:
        return NO_VALUE


def is_value(leaf: Any) -> bool:
    """Whether a value never changes: if it is equal to another one, it stays so."""
    if isinstance(leaf, METHOD):  # built-in ones too, such as `settings.get`
        return leaf.__self__ is None or is_value(leaf.__self__)
    if isinstance(leaf, type | types.ModuleType | jax.stages.Wrapped):
        return True
    if isinstance(leaf, ContextVar | weakref.ReferenceType):  # what they give may change
        return False
    try:
        hash(leaf)
    except TypeError:
        return False
    cls = type(leaf)
    is_equal_to_itself_alone = cls.__eq__ is object.__eq__ and not is_installed(cls)
    return cls.__hash__ is not object.__hash__ and not is_equal_to_itself_alone


def fits_device(number: Any) -> bool:
    """Whether a float, or an array of integers, has about its value in the 32 bits of a device."""
    if isinstance(number, float | np.floating):
        size = abs(float(number))
        return not 0 < size < math.inf or _TINY <= size <= _HUGE
    if isinstance(number, np.ndarray) and number.dtype.kind in "iu":
        return np.array_equal(number.astype(device_dtype(number), copy=False), number)
    return True


def types_in(value: Any) -> Any:
    """The types of the numbers in a value, hashable: 1, 1.0 and True alone compare as equal."""
    if isinstance(value, int | float | complex | np.generic):
        return type(value), repr(value)
    if isinstance(value, frozenset):
        return frozenset(map(types_in, value))
    if dataclasses.is_dataclass(value):
        value = tuple(getattr(value, field.name, None) for field in dataclasses.fields(value))
    return tuple(map(types_in, value)) if isinstance(value, tuple) else ()


def is_installed(value: Any) -> bool:
    """Whether a value belongs to Python or to an installed library, and so does not change."""
    if isinstance(value, types.FunctionType):
        return _is_installed_file(value.__code__.co_filename)
    if isinstance(value, types.ModuleType):
        is_builtin = value.__name__ in sys.builtin_module_names
        return is_builtin or _is_installed_file(getattr(value, "__file__", None))
    if isinstance(value, type):
        if value.__module__ in sys.builtin_module_names:
            return True
        module = sys.modules.get(value.__module__)
        return _is_installed_file(getattr(module, "__file__", None))
    return False


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str | None) -> bool:
    """Whether a file belongs to a library; code of a notebook or terminal does not."""
    places = ("/site-packages/", "/dist-packages/")
    return file is not None and (file.startswith(_INSTALLED) or any(p in file for p in places))

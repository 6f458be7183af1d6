"""Values: which of them never change, so that two that are equal once stay equal.

A value that never changes, such as a frozen dataclass, may still hold a function, and this may call
a helper that has changed. So the code that values hold is found here, too.
"""

import dataclasses
import functools
import math
import os
import sys
import sysconfig
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import jax
import numpy as np

from multitower.errors import JAX, LIBRARIES
from multitower.towers.leaves import device_dtype

METHOD = types.MethodType | types.BuiltinFunctionType | types.MethodWrapperType
_PLACES = [sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")]
_INSTALLED = tuple(
    {"<frozen", JAX} | {f"{Path(place)}{os.sep}" for place in (*_PLACES, Path(__file__).parents[1])}
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
    if isinstance(leaf, type | types.ModuleType) or is_jitted(leaf):
        return True
    if isinstance(leaf, ContextVar | weakref.ReferenceType):  # what they give may change
        return False
    if not is_hashable(leaf):
        return False
    cls = type(leaf)
    is_equal_to_itself_alone = cls.__eq__ is object.__eq__ and not is_installed(cls)
    return cls.__hash__ is not object.__hash__ and not is_equal_to_itself_alone


def is_jitted(value: Any) -> bool:
    """Whether it is a function of `jax.jit`."""
    try:
        return isinstance(value, jax.stages.Wrapped)
    except Exception:  # Python 3.11 asks for its attributes, and a proxy may raise anything
        return False


def is_hashable(value: Any) -> bool:
    """Whether a value has a hash."""
    try:
        hash(value)
    except Exception:  # a user's own may raise anything
        return False
    return True


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
    # A class that Flax's nn.remat makes, say, is in Flax's module, and has the user's as its base.
    return isinstance(value, type) and all(map(_is_installed_class, value.__mro__))


def _is_installed_class(cls: type) -> bool:
    if cls.__module__ in sys.builtin_module_names:
        return True
    return _is_installed_file(getattr(sys.modules.get(cls.__module__), "__file__", None))


@functools.lru_cache(maxsize=4096)
def _is_installed_file(file: str | None) -> bool:
    """Whether a file belongs to a library; code of a notebook or terminal does not."""
    return file is not None and (file.startswith(_INSTALLED) or any(p in file for p in LIBRARIES))


_CALLED = (types.FunctionType, METHOD, type, functools.partial, jax.custom_jvp, jax.custom_vjp)
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)


def may_have_code(value: Any) -> bool:
    """Whether a value may be, or hold, code that is not a library's."""
    kinds = (*_CALLED, types.ModuleType, frozenset)
    if isinstance(value, kinds) or dataclasses.is_dataclass(value):
        return not is_installed(value) or is_around_code(value)
    return not is_installed(type(value))


def is_around_code(value: Any) -> bool:
    """Whether a library's function may call a user's, because it wraps it or closes over it."""
    if isinstance(value, types.ModuleType):  # it may make its attributes when they are asked for
        return False
    return bool(closure_of(value)) or getattr(value, "__wrapped__", None) is not None


def closure_of(value: Any) -> tuple[types.CellType, ...]:
    """The variables that a function closes over; none for other values."""
    return (value.__closure__ or ()) if isinstance(value, types.FunctionType) else ()


def code_within(values: Iterable[Any]) -> Iterator[Any]:
    """The code in values, at any depth: functions, users' classes, and objects of these classes.

    Containers and dataclasses of libraries are looked into. What is yielded may hold more code.
    """
    seen: dict[int, Any] = {}
    left = list(values)[::-1]
    while left:
        value = left.pop()
        if not is_installed(type(value)) or isinstance(value, _CALLED):
            if may_have_code(value):
                yield value
        elif id(value) not in seen:
            seen[id(value)] = value
            left += [*_held_by(value)][::-1]


def parts_of(value: Any) -> list[Any]:
    """What a value holds that is compared as a whole: its numbers, and the code within it.

    The numbers count too, because some classes have a `==` that leaves a field out. What a library
    keeps in slots does not: a path, for one, stores its own text there when it is asked for.
    """
    is_final = is_installed(type(value))
    own = getattr(value, "__dict__", {}) if is_final else attributes_of(value)
    held = [*_held_by(value)] or [*own.values()]
    return [*(one for one in held if isinstance(one, _NUMBERS)), *code_within(held)]


def left_out_of(value: Any) -> list[Any]:
    """What the `==` or the hash of a user's dataclass leaves out, and so may be of any kind."""
    is_own = dataclasses.is_dataclass(value) and not is_installed(type(value))
    fields = dataclasses.fields(value) if is_own else ()
    left_out = [one.name for one in fields if not one.compare or one.hash is False]
    return [getattr(value, name, None) for name in left_out]


def attributes_of(value: Any) -> dict[str, Any]:
    """All attributes of an object: those in its `__dict__`, and those in `__slots__`."""
    held = dict(dict_of(value) or {})
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):  # nothing is in it yet
                    held[name] = member.__get__(value)
    return held


def dict_of(value: Any) -> Mapping[str, Any] | None:
    """The `__dict__` of an object, if it has one."""
    try:
        return getattr(value, "__dict__", None)
    except Exception:  # a user's own `__getattr__` may raise anything, as proxies do
        return None


def _held_by(value: Any) -> Iterable[Any]:
    """What is in a container or dataclass; nothing for other values."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, set | frozenset):
        return sorted(value, key=id)
    return value if isinstance(value, tuple | list) else ()

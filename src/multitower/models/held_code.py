"""Code that values hold: functions and users' classes in dataclasses, static fields and closures.

A value that never changes, such as a frozen dataclass, may hold a function, and this may call a
helper that has changed.
"""

import dataclasses
import functools
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from multitower.models.values import METHOD, is_installed

_CALLED = (types.FunctionType, METHOD, type, functools.partial, jax.custom_jvp, jax.custom_vjp)
_NUMBERS = (bool, int, float, complex, str, bytes, np.generic)


def may_have_code(value: Any) -> bool:
    """Whether a value may be, or hold, code that is not a library's."""
    if isinstance(value, (*_CALLED, frozenset)) or dataclasses.is_dataclass(value):
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


def attributes_of(value: Any) -> dict[str, Any]:
    """All attributes of an object: those in its `__dict__`, and those in `__slots__`."""
    held = dict(getattr(value, "__dict__", {}))
    for cls in type(value).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType) and hasattr(value, name):
                held[name] = getattr(value, name)
    return held


def _held_by(value: Any) -> Iterable[Any]:
    """What is in a container or dataclass; nothing for other values."""
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name, None) for field in dataclasses.fields(value)]
    if isinstance(value, Mapping):
        return value.values()
    if isinstance(value, set | frozenset):
        return sorted(value, key=repr)
    return value if isinstance(value, tuple | list) else ()

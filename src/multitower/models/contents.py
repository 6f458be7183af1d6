"""Contents: hashable descriptions of values, equal if the values do the same in a program."""

import builtins
import functools
import importlib.util
import inspect
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import numpy as np

from multitower.models.bytecode import Chain, Free, Imported, Names
from multitower.models.nnx import code_of_nnx, contents_of_nnx, is_of_nnx
from multitower.models.values import (
    METHOD,
    NO_VALUE,
    UnknownDependencyError,
    attributes_of,
    closure_of,
    code_within,
    dict_of,
    is_around_code,
    is_hashable,
    is_installed,
    is_jitted,
    is_value,
    left_out_of,
    parts_of,
    types_in,
    value_in,
)

# NumPy arrays are compared by their bytes at every new function: larger ones cost too much.
_LARGE_BYTES = 2**20
# At most so many values are looked at for one function: comparing more costs too much.
_MANY = 5000
# The names in the code do not show what these read.
_READ_ANYTHING = ("__import__", "eval", "exec", "globals")
_READ_VARIABLES = ("locals", "super", "vars")
_FIND_ANYTHING = (
    ("importlib", "import_module"),
    ("sys", "modules"),
    ("os", "environ"),
    ("os", "getenv"),
)


class Reader:
    """Turns values into hashable descriptions of them."""

    def __init__(self) -> None:
        self.alive: list[Any] = []
        self._owners: list[Any] = []  # of what is left out; no longer than this reader lives
        self._stored: frozenset[tuple[int, str]] = frozenset()  # (identity of an object, attribute)
        self._numbers: dict[Any, int] = {}  # of what can contain itself
        self._num_read = 0
        self._is_lenient = False  # whether parts may count by their identity; see `if_comparable`

    @contextmanager
    def _for_now(self) -> Generator[None]:
        """What is left out, and whether parts may count by their identity, changes only inside."""
        outer = self._stored, self._is_lenient
        try:
            yield
        finally:
            self._stored, self._is_lenient = outer

    def leave_out(self, fun: types.FunctionType, first: Any = None) -> None:
        """Leaves out what a function writes itself, such as a counter of its calls.

        Args:
            fun: the function.
            first: the first argument that it will get, if that is known.
        """
        code = fun.__code__
        held = dict(zip(code.co_freevars, fun.__closure__ or (), strict=True))
        for name, *attributes, last in Names.of(code).stored:
            owner = fun.__globals__.get(name)
            if isinstance(name, Free) and name.name in held:
                owner = value_in(held[name.name])
            elif isinstance(name, Free) and (name.name,) == code.co_varnames[:1]:
                owner = first
            for attribute in attributes:
                owner = inspect.getattr_static(owner, attribute, None)
            self._owners.append(owner)
            self._stored |= {(id(owner), last)}

    def globals_of(self, fun: types.FunctionType, without: Iterable[str] = ()) -> Iterator[Any]:
        """What a function reads of globals and modules, except for the names in `without`."""
        names = Names.of(fun.__code__)
        for chain in names.chains:
            name, *attributes = chain
            if name in without:
                continue
            if chain[:2] in _FIND_ANYTHING:
                self._cannot_tell()
            elif isinstance(name, Imported):
                module = _module(name, fun)
                yield chain, self._part(module, self.at, module, attributes)
            elif name in fun.__globals__:
                value = fun.__globals__[name]
                if not (name in names.filled and isinstance(value, list | dict | set | deque)):
                    yield chain, self._part(value, self.at, value, attributes)
            elif name in _READ_ANYTHING:
                self._cannot_tell()
            else:
                yield chain, self._same(getattr(builtins, name, None))

    def _cannot_tell(self) -> None:
        """Says that something has no description; it is left out where that may be."""
        if not self._is_lenient:
            raise UnknownDependencyError

    def _part(self, value: Any, describe: Callable[..., Any], *arguments: Any) -> Any:
        """What `describe` returns; the identity of `value`, if that fails where it may."""
        count = len(self._numbers)
        try:
            return describe(*arguments)
        except UnknownDependencyError:
            if not self._is_lenient:
                raise
            for one in list(self._numbers)[count:]:  # "again" must not stand for what is dropped
                del self._numbers[one]
            return self._same(value)

    def content(self, value: Any) -> Any:
        """The description of a value: equal to another one only if both do the same, now and later.

        Raises:
            UnknownDependencyError: the value cannot be described in such a way.
        """
        if type(value) in _PLAIN:
            return type(value), value
        if type(value) in (float, complex) or isinstance(value, np.generic):
            return type(value), repr(value)  # 0.0 and -0.0 are equal
        if isinstance(value, jax.Array) or is_jitted(value):
            return self._same(value)
        place = id(value), self._is_lenient
        if place in self._numbers:
            return "again", self._numbers[place]
        self._numbers[place] = len(self._numbers)
        self.alive.append(value)
        self._num_read += 1
        if self._num_read > _MANY:
            raise UnknownDependencyError
        try:
            return self._installed(value) if is_installed(value) else self._looked_into(value)
        except RecursionError as error:
            raise UnknownDependencyError from error

    def _installed(self, value: Any) -> Any:
        """The description of what is a library's: it does not change, but may call the user's.

        A framework's method may wrap one of the user's, or be the closure around it.
        """
        if not is_around_code(value):
            return self._same(value)
        inner = self.content(getattr(value, "__wrapped__", None))
        return id(value), inner, self.code_of(map(value_in, closure_of(value)))

    def _looked_into(self, value: Any) -> Any:
        if is_of_nnx(value):
            return self._nnx(value)
        described = next((own for kind, own in _DESCRIPTIONS if isinstance(value, kind)), None)
        if described is None and not is_value(value):
            return self._instance(value)
        own = not is_installed(type(value))
        if described is None:
            parts = [*parts_of(value), *map(_snapshot, left_out_of(value))]
            found = self._plain(value), tuple(map(self.if_comparable, parts))
        else:  # a subclass of list, say, may have attributes
            found = described(self, value), own and self._state(value)
        return found, own and self.if_comparable(type(value))  # the methods of its class count too

    def code_of(self, held: Iterable[Any]) -> tuple[Any, ...]:
        """The descriptions of the code in values."""
        return tuple(map(self.if_comparable, code_within(held)))

    def _nnx(self, value: Any) -> Any:
        """The description of an NNX module, which changes in place: its arrays and all else."""
        graphdef, arrays = contents_of_nnx(value)
        return "nnx", id(value), graphdef, self.code_of(code_of_nnx(value)), self.all_of(arrays)

    def all_of(self, held: Iterable[Any]) -> tuple[Any, ...]:
        """The descriptions of several values."""
        return tuple(self.content(one) for one in held)

    def class_(self, cls: type) -> Any:
        """The description of a class: what its members do."""
        return "class", id(cls), tuple(self._members(cls))

    def if_comparable(self, value: Any) -> Any:
        """The description of a value, such as a class; its identity, if it has no description.

        If only one member of a class has none, or one name that its methods read, the identity of
        that one stands for it, and all others count.
        """
        with self._for_now():
            self._is_lenient = True
            return self._part(value, self.content, value)

    def at(self, value: Any, attributes: Chain | list[str]) -> Any:
        """The description of an attribute: of `config.scale` alone, not of all that config has."""
        for number, name in enumerate(attributes):
            is_plain = type(value).__getattribute__ is object.__getattribute__
            is_own = not isinstance(value, types.ModuleType | type)
            if is_installed(value):
                return self._of_installed(value, attributes[number:])
            if is_own and (not is_plain or dict_of(value) is None):
                break
            found = inspect.getattr_static(value, name, _MISSING)
            if is_own and value.__dict__.get(name, _MISSING) is found is not _MISSING:
                value = found  # no descriptor, even if it is a function
                continue
            if is_own and isinstance(found, types.FunctionType | property):
                fun = found.fget if isinstance(found, property) else found
                return tuple(attributes[: number + 1]), self.method(fun, value)
            if found is _MISSING or hasattr(type(found), "__get__"):
                # A descriptor other than a plain method may use all of its object.
                owner = value if not isinstance(value, types.ModuleType) else found
                return tuple(attributes[: number + 1]), self.content(owner)
            value = found
        return self.content(value)

    def _of_installed(self, value: Any, attributes: Chain | list[str]) -> Any:
        """The description of an installed value, which does not change, with two exceptions.

        Programs change settings, such as `package.config.scale`, and objects whose methods are
        among a package's functions: `np.random.normal` is a method of NumPy's generator.
        """
        found = value
        for name in attributes:
            is_final = isinstance(found, type | types.FunctionType)
            found = _MISSING if is_final else (dict_of(found) or {}).get(name, _MISSING)
        is_setting = type(found) in _NUMBERS or isinstance(found, str)
        is_changing = isinstance(found, METHOD) and not is_value(found)
        return self.content(found if is_setting or is_changing else value)

    def function(self, fun: types.FunctionType) -> Any:
        """The description of a function: its code, and all that the code uses."""
        cells = tuple(self._cell(cell) for cell in fun.__closure__ or ())
        defaults = self.content(fun.__defaults__), self.content(fun.__kwdefaults__)
        with self._for_now():
            self.leave_out(fun)
            used = tuple(self.globals_of(fun))
        # Its identity too, because a program that is traced again calls this very function.
        return "function", id(fun), fun.__code__, defaults, cells, used

    def method(self, fun: Any, owner: Any) -> Any:
        """The description of a function, and of what it uses of its first argument, `owner`."""
        used = None if is_value(owner) else _used_of_first(fun)
        if used is None:
            return "method", self.content(fun), self.content(owner)
        place = id(fun), id(owner), self._is_lenient
        if place in self._numbers:
            return "again", self._numbers[place]
        self._numbers[place] = len(self._numbers)
        self.alive.append(owner)
        with self._for_now():
            self.leave_out(fun, owner)
            found = tuple((chain, self.at(owner, chain)) for chain in used)
        return "method", id(owner), self.content(fun), found

    def _cell(self, cell: types.CellType) -> Any:
        held = value_in(cell)
        if held is NO_VALUE:
            raise UnknownDependencyError
        return self.content(held)

    def _members(self, cls: type) -> Iterator[Any]:
        for one in cls.__mro__:
            if one is not object and not is_installed(one):
                for name, member in tuple(vars(one).items()):
                    if not (_is_about(name, member) or self._is_left_out(one, name)):
                        yield name, self._part(member, self._member, member)

    def _member(self, member: Any) -> Any:
        known = isinstance(member, types.FunctionType | staticmethod | classmethod | property)
        if not hasattr(type(member), "__get__") or known:
            return self.content(member)
        if not is_installed(type(member)):
            return self.if_comparable(member)
        # Descriptors of dataclasses, slots and frameworks belong to the class. Some hold a
        # function, such as a cached property, or a method under a filter of Equinox.
        return self._same(member), self.code_of(attributes_of(member).values())

    def _instance(self, value: Any) -> Any:
        is_hidden = isinstance(value, random.Random) or dict_of(value) is None
        if is_installed(type(value)) and is_hidden:
            raise UnknownDependencyError
        # It counts with all of its state or not at all: what has locks, such as a logger, notes in
        # the rest of its state what it was asked.
        of_class = self.content(type(value))
        with self._for_now():
            self._is_lenient = False
            return "object", id(value), of_class, self._state(value)

    def _state(self, value: Any) -> tuple[Any, ...]:
        """All attributes of an object: those in its `__dict__`, and those in `__slots__`."""
        return tuple(
            (name, self.content(one))
            for name, one in attributes_of(value).items()
            if not self._is_left_out(value, name)
        )

    def _is_left_out(self, owner: Any, name: str) -> bool:
        return (id(owner), name) in self._stored

    def builtin(self, fun: Any) -> Any:
        """The description of a function or method that is written in C."""
        if isinstance(fun.__self__, types.ModuleType | None):
            return self._same(fun)
        return "method", fun.__name__, self.content(fun.__self__)

    def with_rules(self, fun: Any) -> Any:
        """The description of a `jax.custom_jvp` or `jax.custom_vjp` function."""
        held = [one for one in vars(fun).values() if callable(one)]  # itself, and its rules
        return "with rules", id(fun), self.all_of(held)

    def array(self, value: np.ndarray[Any, Any]) -> Any:
        """The description of a NumPy array: its identity, shape, dtype and bytes."""
        if value.nbytes > _LARGE_BYTES or value.dtype.hasobject:
            raise UnknownDependencyError
        return "array", id(value), value.shape, value.dtype.str, value.tobytes()

    def _plain(self, value: Any) -> Any:
        if isinstance(value, types.ModuleType):  # all of it: too much to compare
            raise UnknownDependencyError
        return self._same(value)

    def _same(self, value: Any) -> Any:
        """A description without contents: the value, if it compares by value, else the identity."""
        self.alive.append(value)
        if not (is_hashable(value) and is_value(value)):
            return type(value), id(value)
        return type(value), types_in(value), value


_MISSING = object()
_PLAIN = {types.NoneType, types.EllipsisType, object, bool, int, str, bytes}
_NUMBERS = (bool, int, float)

# For values that may hold others. If a value can change, its identity is part of its description.
_DESCRIPTIONS: tuple[tuple[type, Callable[[Reader, Any], Any]], ...] = (
    (types.FunctionType, Reader.function),
    (type, Reader.class_),
    (types.MethodType, lambda read, it: read.method(it.__func__, it.__self__)),
    (types.BuiltinFunctionType, Reader.builtin),
    (types.MethodWrapperType, Reader.builtin),
    (staticmethod, lambda read, it: ("static", read.content(it.__func__))),
    (classmethod, lambda read, it: ("of class", read.content(it.__func__))),
    (property, lambda read, it: ("property", read.all_of((it.fget, it.fset, it.fdel)))),
    (functools.partial, lambda read, it: ("partial", read.all_of((it.func, it.args, it.keywords)))),
    (jax.custom_jvp, Reader.with_rules),
    (jax.custom_vjp, Reader.with_rules),
    (tuple, lambda read, it: (type(it), read.all_of(it))),
    (list, lambda read, it: (type(it), id(it), read.all_of(it))),
    (dict, lambda read, it: (type(it), id(it), read.all_of(it), read.all_of(it.values()))),
    (set, lambda read, it: (type(it), id(it), read.all_of(it))),
    (np.ndarray, Reader.array),
)


def _snapshot(value: Any) -> Any:
    """A container that may change, or a small array, as one that does not; others as they are."""
    if isinstance(value, Mapping):
        return tuple((_snapshot(name), _snapshot(one)) for name, one in value.items())
    if isinstance(value, list | tuple | set | frozenset | deque):
        return tuple(map(_snapshot, value))
    if isinstance(value, np.ndarray) and value.nbytes <= _LARGE_BYTES and not value.dtype.hasobject:
        return value.shape, value.dtype.str, value.tobytes()
    return value


def _module(imported: Imported, fun: types.FunctionType) -> Any:
    """A module that a function imports; None if it has not been imported yet."""
    try:
        package = fun.__globals__.get("__package__")
        name = importlib.util.resolve_name("." * imported.level + imported.name, package)
    except (ImportError, ValueError):
        return None
    return sys.modules.get(name)


def _used_of_first(fun: Any) -> tuple[Chain, ...] | None:
    """The attributes that a function reads from its first argument; None if it may read any."""
    if not isinstance(fun, types.FunctionType) or is_installed(fun):
        return None
    names = Names.of(fun.__code__)
    # `super()` finds the object without a name.
    takes_any = "__class__" in fun.__code__.co_freevars or not fun.__code__.co_argcount
    if takes_any or any(chain[0] in _READ_VARIABLES for chain in names.chains):
        return None
    return names.free.get(fun.__code__.co_varnames[0], ())


def _is_about(name: str, member: Any) -> bool:
    """Whether a member of a class is about the class, as `__doc__`, and not what its methods do."""
    if name in ("__annotate_func__", "_abc_impl"):  # what makes annotations (Python 3.14); of ABC
        return True
    is_pythons = name.startswith("__") and name.endswith("__")
    return is_pythons and not (callable(member) or hasattr(type(member), "__get__"))

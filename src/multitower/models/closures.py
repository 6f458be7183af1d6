"""Functions that close over arrays and modules: these travel like arguments.

A step without `jax.jit` defines its loss anew each time, around the state of the moment:

```python
def train_step(state, batch, key):
    def loss_fn(params): ...  # uses state.batch_stats, batch and key
```

Were the arrays constants of a compiled program, every step would compile a new one; a key would
give all towers the same numbers; and the batch could not be cut.
"""

import dis
import functools
import types
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
from jax.tree_util import treedef_is_leaf

from multitower.errors import ArgumentError
from multitower.models.equinox import is_equinox
from multitower.models.nnx import is_nnx

_ARRAY = "array"


class Contents(NamedTuple):
    """What is taken out of a function.

    Attributes:
        arrays: what every tower gets whole.
        modules: NNX modules.
        rows: what is to be cut, by the name of its variable.
    """

    arrays: list[Any]
    modules: list[Any]
    rows: Mapping[str, Any]


@dataclass(frozen=True)
class OpenFunction:
    """A function without its contents. Two are equal if they do the same with the same contents.

    Attributes:
        key: what it does, hashable: its code, and what it uses besides the contents; or the
            function itself, if that may change unseen.
        cells: the variables that it closes over.
        global_modules: globals that are NNX modules, by name.
        bare: code, globals, defaults and keyword defaults.
        original: the function, if nothing was taken out of it.
    """

    key: tuple[Any, ...]
    cells: tuple["_Cell", ...]
    global_modules: tuple[tuple[str, "_Module"], ...]
    bare: tuple[types.CodeType, dict[str, Any], Any, Any] = field(compare=False, repr=False)
    original: Any = field(compare=False)

    def close(self, left: "_Left") -> Callable[..., Any]:
        """The function, around the next of these contents."""
        if self.original is not None:
            return self.original
        code, scope, defaults, keyword_defaults = self.bare
        cells = tuple(cell.close(left) for cell in self.cells)
        if self.global_modules:
            modules = {name: left.modules[at.number] for name, at in self.global_modules}
            scope = {**scope, **modules}
        fun = types.FunctionType(code, scope, code.co_name, defaults, cells)
        fun.__kwdefaults__ = keyword_defaults
        return fun


def as_function(fun: Callable[..., Any]) -> Callable[..., Any]:
    """A module that is called, or a method of one, as a function that closes over the module."""
    module, method = fun, type(fun).__call__
    if isinstance(fun, types.MethodType):
        module, method = fun.__self__, fun.__func__
    if not (is_nnx(module) or is_equinox(module)):
        return fun

    def call(*args: Any, **kwargs: Any) -> Any:
        return method(module, *args, **kwargs)

    return call


def open_function(fun: Callable[..., Any], names: Collection[str]) -> tuple[Any, Contents]:
    """Takes arrays and modules out of a function, and out of the functions that it closes over.

    Args:
        fun: the function.
        names: those of the variables that it closes over which hold rows.

    Returns:
        An `OpenFunction`, or `fun` if it is none of Python's own functions; and its contents.

    Raises:
        ArgumentError: it closes over no variable of such a name.
    """
    opener = _Opener(names)
    fun = opener.inside(fun)
    opened = opener.open(fun) if isinstance(fun, types.FunctionType) else fun
    for name in names:
        if name not in opener.rows:
            there = ", ".join(getattr(getattr(fun, "__code__", None), "co_freevars", ()))
            raise ArgumentError(
                f"in_axes names {name!r}, and the function closes over {there or 'nothing'}. Name "
                "a variable of its closure; or give each argument its axis: in_axes=(None, 0)."
            )
    return opened, Contents(opener.arrays, opener.modules, opener.rows)


def close_function(opened: Any, contents: Contents) -> Callable[..., Any]:
    """The function again, around other contents in the same order."""
    if not isinstance(opened, OpenFunction):
        return opened
    return opened.close(_Left(iter(contents.arrays), contents.modules, contents.rows))


class _Left(NamedTuple):
    arrays: Iterator[Any]
    modules: list[Any]
    rows: Mapping[str, Any]


@dataclass(frozen=True)
class _Cell:
    """What one variable of a closure holds.

    Attributes:
        rows: its name, if it holds rows.
        treedef: the structure of the tree that it is.
        leaves: `_ARRAY`, a `_Module`, an OpenFunction, or a `_Leaf`.
        original: the variable, if nothing was taken out of it.
    """

    rows: str | None
    treedef: Any
    leaves: tuple[Any, ...]
    original: types.CellType | None = field(compare=False)

    def close(self, left: _Left) -> types.CellType:
        if self.original is not None:
            return self.original
        if self.rows is not None:
            return types.CellType(left.rows[self.rows])
        leaves = [_close_leaf(leaf, left) for leaf in self.leaves]
        return types.CellType(jax.tree.unflatten(self.treedef, leaves))


@dataclass(frozen=True)
class _Module:
    """Stands for an NNX module: the same one, wherever it is closed over."""

    number: int


@dataclass(frozen=True)
class _Leaf:
    """Anything else: equal if it can be told to be the same for good, or if it is the same object.

    Attributes:
        key: type and value (1, 1.0 and True are equal), or the identity.
        value: what it is; kept alive, so that no other object can have its identity.
    """

    key: tuple[type, Any]
    value: Any = field(compare=False)


def _close_leaf(leaf: Any, left: _Left) -> Any:
    if leaf is _ARRAY:
        return next(left.arrays)
    if isinstance(leaf, _Module):
        return left.modules[leaf.number]
    return leaf.close(left) if isinstance(leaf, OpenFunction) else leaf.value


class _Opener:
    """Collects the contents on its way through closures."""

    def __init__(self, names: Collection[str]) -> None:
        self.arrays: list[Any] = []
        self.modules: list[Any] = []
        self.rows: dict[str, Any] = {}
        self._names = names
        self._way: list[Any] = []
        self._num_taken = 0  # in all, the same thing in two places counted twice
        self._may_change = False

    def open(self, fun: types.FunctionType) -> OpenFunction:
        before, outer, self._may_change = self._num_taken, self._may_change, False
        self._way.append(fun)
        variables = zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True)
        cells = tuple(self._open_cell(name, cell) for name, cell in variables)
        self._way.pop()
        used = {name: fun.__globals__.get(name) for name in _global_names(fun.__code__)}
        global_modules = tuple(
            (name, self._module(value)) for name, value in used.items() if is_nnx(value)
        )
        bare = fun.__code__, fun.__globals__, fun.__defaults__, fun.__kwdefaults__
        key: tuple[Any, ...] = (_leaf(fun),)
        if not self._may_change and "<locals>" in fun.__qualname__:  # made anew by each call
            defaults = [*(fun.__defaults__ or ()), *(fun.__kwdefaults__ or {}).values()]
            values = [value for value in used.values() if not is_nnx(value)]
            key = (fun.__code__, *map(_leaf, defaults), *map(_leaf, values))
        self._may_change |= outer
        original = fun if self._num_taken == before else None
        return OpenFunction(key, cells, global_modules, bare, original)

    def inside(self, fun: Any) -> Any:
        """What `jax.jit` was given, if rows are looked for: it hides a closure."""
        is_jitted = bool(self._names) and isinstance(fun, jax.stages.Wrapped)
        return getattr(fun, "__wrapped__", fun) if is_jitted else fun

    def _module(self, module: Any) -> _Module:
        self._num_taken += 1
        for number, known in enumerate(self.modules):
            if known is module:
                return _Module(number)
        self.modules.append(module)
        return _Module(len(self.modules) - 1)

    def _open_cell(self, name: str, cell: types.CellType) -> _Cell:
        try:
            held = cell.cell_contents
        except ValueError:  # a variable that has no value yet
            self._may_change = True
            return _Cell(None, None, (), cell)
        if name in self._names and self.rows.setdefault(name, held) is held:
            self._num_taken += 1
            return _Cell(name, None, (), None)
        before = self._num_taken
        leaves, treedef = jax.tree.flatten(held, is_leaf=is_nnx)
        arrays = (jax.Array, int, float) if _is_record(held, leaves) else jax.Array
        opened = tuple(self._open_leaf(leaf, arrays) for leaf in leaves)
        if self._num_taken > before:
            return _Cell(None, treedef, opened, None)
        if isinstance(held, tuple) or held is None or (leaves and treedef_is_leaf(treedef)):
            return _Cell(None, treedef, opened, cell)
        # A list or dict without arrays stays itself: the function may want to write into it.
        self._may_change = True
        return _Cell(None, None, (_leaf(held),), cell)

    def _open_leaf(self, leaf: Any, arrays: Any) -> Any:
        leaf = self.inside(leaf)
        if is_nnx(leaf):
            return self._module(leaf)
        if isinstance(leaf, arrays) and not isinstance(leaf, bool):
            self._num_taken += 1
            self.arrays.append(leaf)
            return _ARRAY
        if isinstance(leaf, types.FunctionType) and leaf not in self._way:
            return self.open(leaf)
        self._may_change |= not _is_value(leaf)
        return _leaf(leaf)


@functools.lru_cache(maxsize=1024)
def _global_names(code: types.CodeType) -> tuple[str, ...]:
    """The globals that a function reads itself."""
    names = (step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL")
    return tuple(dict.fromkeys(names))


def _leaf(value: Any) -> _Leaf:
    if isinstance(value, float | complex):
        return _Leaf((type(value), repr(value)), value)  # 0.0 and -0.0 are equal
    return _Leaf((type(value), value if _is_value(value) else id(value)), value)


def _is_record(held: Any, leaves: list[Any]) -> bool:
    """Whether numbers in a tree are data, as the step of Flax's TrainState, and no settings."""
    is_class = not isinstance(held, tuple | list | dict) and not is_equinox(held)
    return is_class and any(isinstance(leaf, jax.Array) for leaf in leaves)


def _is_value(leaf: Any) -> bool:
    """Whether it is equal to another one only if both are the same for good."""
    if isinstance(leaf, types.MethodType):
        return _is_value(leaf.__self__)
    if isinstance(leaf, type | types.ModuleType | types.BuiltinFunctionType | jax.stages.Wrapped):
        return True
    try:
        hash(leaf)
    except TypeError:
        return False
    return type(leaf).__hash__ is not object.__hash__

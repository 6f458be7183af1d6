"""Takes a function apart: its code, what it uses, and the arrays that it closes over."""

import functools
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from jax.tree_util import treedef_is_leaf

from multitower.models.bytecode import WRITES, Chain, Free, Names
from multitower.models.callables import as_function, is_made_here, made_for, of_partial
from multitower.models.dependencies import Dependencies, code_in, content_of, dependencies_of
from multitower.models.equinox import is_equinox
from multitower.models.nnx import is_nnx
from multitower.models.open_function import (
    ARRAY,
    Again,
    Bare,
    Cell,
    Leaf,
    Module,
    OpenFunction,
)
from multitower.models.structure import code_around, fixed_in, nodes_of, orders_of
from multitower.models.values import (
    METHOD,
    NO_VALUE,
    UnknownDependencyError,
    fits_device,
    is_installed,
    is_jitted,
    is_value,
    may_have_code,
    value_in,
)
from multitower.towers.leaves import is_key, is_legacy_key, is_traced

_WHOLE: tuple[Chain, ...] = ((),)  # the whole value, and not one attribute
_ONE_LEAF = jax.tree.structure(0)
_PLAIN = (bool, int, float, str, bytes, types.NoneType)


class Opener:
    """Takes functions apart, with those that they close over, and collects the contents."""

    def __init__(self, names: Collection[str], values: bool) -> None:
        self.arrays: list[Any] = []
        self.modules: list[Any] = []
        self.rows: dict[str, Any] = {}
        self._names = names
        self._values = values
        self._way: list[Any] = []
        self._num_taken = 0  # in all; the same object in two places counts twice
        self._may_change = False

    def open(self, fun: types.FunctionType, read: Collection[str] = ()) -> OpenFunction:
        """Takes the contents out of a function.

        Args:
            fun: the function.
            read: what the function that closes over it reads of its attributes, by name.
        """
        outer, self._may_change = self._may_change, False
        code = fun.__code__
        variables = dict(zip(code.co_freevars, fun.__closure__ or (), strict=True))
        held = {name: value_in(cell) for name, cell in variables.items()}
        stored, attributes = self._stored_on(fun, held, read)
        self._way.append(fun)
        rebound = Names.of(code).rebound
        cells = tuple(
            self._open_cell(name, cell, name in rebound) for name, cell in variables.items()
        )
        globals_ = tuple(self._open_globals(fun))
        key: tuple[Any, ...] = (Leaf.of(fun),)
        if not self._may_change:
            try:
                others = [name for name, _ in globals_]
                used = dependencies_of(fun, others, self._way[0])
                # The globals themselves too: a program that is traced again reads them again.
                key = (code, fun.__name__, fun.__qualname__, id(fun.__globals__), stored, used)
            except UnknownDependencyError:
                self._may_change = True
        self._way.pop()
        self._may_change |= outer
        wrapped = vars(fun).get("__wrapped__", fun)
        is_wrapped = [one is wrapped is not fun for one in held.values()]
        number = is_wrapped.index(True) if any(is_wrapped) else None
        given = fun.__name__, fun.__qualname__, fun.__defaults__, fun.__kwdefaults__
        bare = Bare(code, fun.__globals__, *given, attributes)
        return OpenFunction(key, cells, globals_, number, bare)

    def _stored_on(
        self, fun: types.FunctionType, held: Mapping[str, Any], read: Collection[str]
    ) -> tuple[Any, dict[str, Any] | None]:
        """What is stored on a function that others may read, or that it closes over itself.

        Numbers and names count wherever they are read. Anything else is there only if it is read by
        name, and then it counts, or if the function may write it itself.

        Returns:
            What counts, hashable; and the attributes that the function gets, if any.
        """
        own_names = [Free(name) for name, one in held.items() if one is fun]
        if not (self._way or own_names) or not vars(fun).keys() - {"__wrapped__"}:
            return (), None
        stored = Names.of(fun.__code__).stored
        written = {chain[1] for chain in stored if chain[0] in own_names}
        plain = {
            name: one
            for name, one in vars(fun).items()
            if isinstance(one, _PLAIN) and name not in written
        }
        count = tuple((name, Leaf.of(one)) for name, one in plain.items())
        # The very attributes, where the function or the one that closes over it may write them.
        return count, (vars(fun) if own_names or read else plain)

    def inside(self, fun: Any) -> Any:
        """The function inside of `jax.jit`, if rows are looked for: `jax.jit` hides its closure."""
        return getattr(fun, "__wrapped__", fun) if self._names and is_jitted(fun) else fun

    def _open_globals(self, fun: types.FunctionType) -> Iterator[tuple[str, Cell]]:
        """The globals that are rows, modules or arrays; with any, the function gets new globals."""
        names = Names.of(fun.__code__)
        if names.stores_globals:
            return
        for name in dict.fromkeys(chain[0] for chain in names.chains):
            value = fun.__globals__.get(name)
            is_named = name in self._names and name in fun.__globals__
            is_taken = is_nnx(value) or _is_method_of_nnx(value)
            if is_named or is_taken or self._is_taken(value, jax.Array):
                yield name, self._open_cell(name, types.CellType(value))

    def _module(self, module: Any) -> Module:
        self._num_taken += 1
        for number, known in enumerate(self.modules):
            if known is module:
                return Module(number)
        self.modules.append(module)
        return Module(len(self.modules) - 1)

    def _open_cell(self, name: str, cell: types.CellType, is_rebound: bool = False) -> Cell:
        held = value_in(cell)
        if is_rebound and held is not NO_VALUE and is_installed(self._way[-1]):
            # A library's function, such as that of jax.vmap, does the same with the same value.
            return Cell(None, None, (self._compared(held, _WHOLE),), original=cell)
        if is_rebound or held is NO_VALUE:
            self._may_change = True
            return Cell(None, None, (), original=cell)
        nodes, leaves, treedef = nodes_of(held)
        code = code_around(nodes, leaves, treedef)
        orders = orders_of(nodes)
        used = code_in(code, self._way[0]) if code else None
        fixed = fixed_in(nodes, leaves, treedef)
        if name in self._names and self.rows.setdefault(name, held) is held:
            self._num_taken += 1
            return Cell(name, None, (), orders, code=used, fixed=fixed)
        before = self._num_taken
        arrays: Any = jax.Array | np.ndarray
        if _is_record(held, leaves):
            arrays |= int | float
        elif isinstance(held, float | np.floating | tuple) and _takes_floats(self._way[-1]):
            arrays |= float | np.floating
        is_leaf = bool(leaves) and treedef_is_leaf(treedef)
        chains = Names.of(self._way[-1].__code__).free.get(name, _WHOLE) if is_leaf else _WHOLE
        opened = tuple(self._open_leaf(leaf, arrays, chains) for leaf in leaves)
        if self._num_taken > before or held is None or isinstance(held, tuple) or is_leaf:
            read = self._attributes(name, held)
            return Cell(None, treedef, opened, orders, code=used, fixed=fixed, attributes=read)
        # A list or dict without arrays stays itself: the function may want to write into it.
        read = Names.of(self._way[-1].__code__).free.get(name, ())
        if any(chain[:1] and chain[0] in WRITES for chain in read):
            self._may_change = True
            return Cell(None, None, (Leaf.of(held),), original=cell)
        return Cell(None, _ONE_LEAF, (self._compared(held, _WHOLE),))

    def _attributes(self, name: str, held: Any) -> Dependencies | None:
        """What is read by name of a function's attributes, and neither written nor filled."""
        if not isinstance(held, types.FunctionType) or not vars(held):
            return None
        names = Names.of(self._way[-1].__code__)
        written = {chain[1] for chain in names.stored if chain[0] == Free(name)}
        chains = [
            chain
            for chain in names.free.get(name, ())
            if chain and chain[0] in vars(held).keys() - written and chain[-1] not in WRITES
        ]
        try:
            return content_of(held, chains) if chains else None
        except UnknownDependencyError:
            self._may_change = True
            return None

    def _open_leaf(self, leaf: Any, arrays: Any, chains: Iterable[Chain]) -> Any:
        if isinstance(leaf, functools.partial):
            leaf = of_partial(leaf)
        if _is_method_of_nnx(leaf):
            leaf = as_function(leaf)
        leaf = self.inside(leaf)
        if is_nnx(leaf):
            return self._module(leaf)
        if self._is_taken(leaf, arrays):
            self._num_taken += 1
            self.arrays.append(leaf)
            return ARRAY
        if isinstance(leaf, types.FunctionType):
            if leaf in self._way:
                return Again(self._way.index(leaf))
            return self.open(leaf, [chain[0] for chain in chains if chain])
        is_plain = is_value(leaf) and not may_have_code(leaf)
        return Leaf.of(leaf) if is_plain else self._compared(leaf, chains)

    def _compared(self, leaf: Any, chains: Iterable[Chain]) -> Leaf:
        """A leaf that is compared by its content, and by its identity if the content may change."""
        is_alike = is_value(leaf) or isinstance(leaf, METHOD)
        stays = is_alike and not isinstance(leaf, METHOD | type | types.ModuleType)
        try:
            content = content_of(leaf, chains, self._way[0] if stays else None)
            return Leaf((type(leaf), None if is_alike else id(leaf), content), leaf)
        except UnknownDependencyError:
            self._may_change = True
            return Leaf.of(leaf)

    def _is_taken(self, leaf: Any, arrays: Any) -> bool:
        if not isinstance(leaf, arrays) or isinstance(leaf, bool) or not fits_device(leaf):
            return False
        if isinstance(leaf, np.ndarray | np.generic):
            # A NumPy array is never a key, but one that looks like a key would be taken for it.
            return not self._values and leaf.dtype.kind in "biufc" and not is_legacy_key(leaf)
        return not self._values or is_traced(leaf) or is_key(leaf) or is_legacy_key(leaf)


def _is_method_of_nnx(value: Any) -> bool:
    return isinstance(value, types.MethodType) and is_nnx(value.__self__)


def _takes_floats(fun: types.FunctionType) -> bool:
    """Whether the floats that a function closes over may be arrays while it is traced.

    A library's function may check that a number is a Python float, and some users' do.
    """
    code = getattr(made_for(fun), "__code__", fun.__code__)
    asks_types = any(chain[0] in ("isinstance", "type") for chain in Names.of(code).chains)
    return not asks_types and (is_made_here(fun) or not is_installed(fun))


def _is_record(held: Any, leaves: list[Any]) -> bool:
    """Whether numbers in a tree are data, like the step of Flax's TrainState, and not settings."""
    is_class = not isinstance(held, tuple | list | dict) and not is_equinox(held)
    return is_class and any(isinstance(leaf, jax.Array) for leaf in leaves)

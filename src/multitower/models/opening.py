"""A function taken apart: its code, what it uses, and the arrays that it closes over."""

import collections
import functools
import types
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.tree_util import treedef_is_leaf

from multitower.models.bytecode import WRITES, Chain, Free, Names
from multitower.models.callables import as_function, is_made_here, made_for, of_partial
from multitower.models.dependencies import (
    Dependencies,
    code_in,
    content_of,
    dependencies_of,
    settings_in,
)
from multitower.models.equinox import is_equinox
from multitower.models.nnx import code_of_nnx, is_nnx
from multitower.models.values import (
    METHOD,
    NO_VALUE,
    UnknownDependencyError,
    code_within,
    fits_device,
    is_installed,
    is_jitted,
    is_value,
    may_have_code,
    types_in,
    value_in,
)
from multitower.towers.leaves import is_key, is_legacy_key, is_traced

_ARRAY = "array"
_WHOLE: tuple[Chain, ...] = ((),)  # the whole value, and not one attribute
_ONE_LEAF = jax.tree.structure(0)
_PLAIN = (bool, int, float, str, bytes, types.NoneType)
_DICTS = (dict, collections.defaultdict)
_CONTAINERS = (None, type(None), tuple, list, dict)
_PLAIN_NODES = {types.NoneType, tuple, list, dict}  # none of them has anything beside its leaves
_NUMBERS, _TEXTS = {bool, int, float, complex}, {str, bytes, types.NoneType}
# What is equal in two structures only if it is the same; what it uses besides counts as code.
_CODE: Any = (types.FunctionType, METHOD, type, functools.partial, jax.custom_jvp, jax.custom_vjp)


@dataclass(frozen=True)
class OpenFunction:
    """A function without its contents. Two are equal if they do the same with the same contents.

    Attributes:
        key: what it does, hashable: its code and what it uses besides the contents; or the function
            itself, if what it uses cannot be compared.
        cells: the variables that it closes over.
        globals_: globals that are NNX modules, arrays or rows, by name.
        wrapped: which of the variables holds the function that it wraps (`functools.wraps`).
        bare: what else it is made of.
    """

    key: tuple[Any, ...]
    cells: tuple["_Cell", ...]
    globals_: tuple[tuple[str, "_Cell"], ...]
    wrapped: int | None
    bare: "_Bare" = field(compare=False, repr=False)

    def close(self, left: "Left") -> Callable[..., Any]:
        """The function again, with the next of these contents put in."""
        bare, scope = self.bare, self.bare.scope
        left.way.append(([], bare.attributes))
        cells = tuple(cell.close(left) for cell in self.cells)
        if self.globals_:
            taken = {name: cell.close(left).cell_contents for name, cell in self.globals_}
            scope = {**scope, **taken}
        fun = types.FunctionType(bare.code, scope, bare.name, bare.defaults, cells)
        fun.__qualname__, fun.__kwdefaults__ = bare.qualname, bare.keyword_defaults
        if bare.attributes is not None:
            fun.__dict__ = bare.attributes
        elif self.wrapped is not None:
            vars(fun)["__wrapped__"] = cells[self.wrapped].cell_contents
        left.way.pop()[0].append(fun)
        return fun


class _Bare(NamedTuple):
    """What a function is made of besides its contents.

    Attributes:
        scope: its globals.
        attributes: what is stored on it and may be read.
    """

    code: types.CodeType
    scope: dict[str, Any]
    name: str
    qualname: str
    defaults: Any
    keyword_defaults: Any
    attributes: dict[str, Any] | None


class Left(NamedTuple):
    """What is still to be put in, in the order in which it was taken out.

    Attributes:
        arrays: for the places of arrays.
        modules: the NNX modules.
        rows: trees of rows, by the name of the variable.
        way: for each function that is being put together, a list that will hold it, and its
            attributes.
    """

    arrays: Iterator[Any]
    modules: list[Any]
    rows: Mapping[str, Any]
    way: list[tuple[list[Any], dict[str, Any] | None]]


@dataclass(frozen=True)
class _Cell:
    """What one variable of a closure holds.

    Attributes:
        rows: the variable's name, if it holds rows.
        treedef: the structure of the tree that it holds.
        orders: the keys of each dict in it, in their order, which JAX does not keep.
        leaves: `_ARRAY`, a `_Module`, an OpenFunction, an `_Again`, or a `_Leaf`.
        original: the variable, if the function may want to write into it.
        code: what users' methods, and functions in static fields, use.
        fixed: what else static fields hold; see `_fixed_in`.
        attributes: what is read by name of a function that it holds, such as `helper.calls`.
    """

    rows: str | None
    treedef: Any
    leaves: tuple[Any, ...]
    orders: tuple[tuple[Any, ...], ...] = ()
    original: types.CellType | None = field(default=None, compare=False)
    code: Dependencies | None = None
    fixed: Any = None
    attributes: Dependencies | None = None

    def close(self, left: Left) -> types.CellType:
        if self.original is not None:
            return self.original
        if self.rows is not None:
            return types.CellType(_in_order(left.rows[self.rows], self.orders))
        leaves = [_close_leaf(leaf, left) for leaf in self.leaves]
        return types.CellType(_in_order(jax.tree.unflatten(self.treedef, leaves), self.orders))


@dataclass(frozen=True)
class _Module:
    """Stands for an NNX module: the same one, wherever it is closed over."""

    number: int


@dataclass(frozen=True)
class _Again:
    """Stands for a function that is closed over by itself, or by one that it closes over."""

    depth: int


@dataclass(frozen=True)
class _Leaf:
    """Any other leaf: equal to another one if both surely stay the same, or are the same object.

    Attributes:
        key: type and value, since 1, 1.0 and True are equal; or its `id`, perhaps with its content.
        value: the leaf, kept alive so that no other object can get its `id`.
    """

    key: Any
    value: Any = field(compare=False)


def _close_leaf(leaf: Any, left: Left) -> Any:
    if leaf is _ARRAY:
        return next(left.arrays)
    if isinstance(leaf, _Module):
        return left.modules[leaf.number]
    if isinstance(leaf, _Again):
        held, attributes = left.way[leaf.depth]  # empty until that function is complete

        def again(*args: Any, **kwargs: Any) -> Any:
            return held[0](*args, **kwargs)

        if attributes is not None:
            again.__dict__ = attributes
        return again
    return leaf.close(left) if isinstance(leaf, OpenFunction) else leaf.value


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
        key: tuple[Any, ...] = (_leaf(fun),)
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
        bare = _Bare(code, fun.__globals__, *given, attributes)
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
        count = tuple((name, _leaf(one)) for name, one in plain.items())
        # The very attributes, where the function or the one that closes over it may write them.
        return count, (vars(fun) if own_names or read else plain)

    def inside(self, fun: Any) -> Any:
        """The function inside of `jax.jit`, if rows are looked for: `jax.jit` hides its closure."""
        return getattr(fun, "__wrapped__", fun) if self._names and is_jitted(fun) else fun

    def _open_globals(self, fun: types.FunctionType) -> Iterator[tuple[str, _Cell]]:
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

    def _module(self, module: Any) -> _Module:
        self._num_taken += 1
        for number, known in enumerate(self.modules):
            if known is module:
                return _Module(number)
        self.modules.append(module)
        return _Module(len(self.modules) - 1)

    def _open_cell(self, name: str, cell: types.CellType, is_rebound: bool = False) -> _Cell:
        held = value_in(cell)
        if is_rebound and held is not NO_VALUE and is_installed(self._way[-1]):
            # A library's function, such as that of jax.vmap, does the same with the same value.
            return _Cell(None, None, (self._compared(held, _WHOLE),), original=cell)
        if is_rebound or held is NO_VALUE:
            self._may_change = True
            return _Cell(None, None, (), original=cell)
        nodes, leaves, treedef = nodes_of(held)
        code = _code_around(nodes, leaves, treedef)
        orders = _orders_of(nodes)
        used = code_in(code, self._way[0]) if code else None
        has_plain_nodes = {*map(type, nodes)} - {*map(type, leaves)} <= _PLAIN_NODES
        fixed = None if has_plain_nodes else _fixed_in(treedef)
        if name in self._names and self.rows.setdefault(name, held) is held:
            self._num_taken += 1
            return _Cell(name, None, (), orders, code=used, fixed=fixed)
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
            return _Cell(None, treedef, opened, orders, code=used, fixed=fixed, attributes=read)
        # A list or dict without arrays stays itself: the function may want to write into it.
        read = Names.of(self._way[-1].__code__).free.get(name, ())
        if any(chain[:1] and chain[0] in WRITES for chain in read):
            self._may_change = True
            return _Cell(None, None, (_leaf(held),), original=cell)
        return _Cell(None, _ONE_LEAF, (self._compared(held, _WHOLE),))

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
            return _ARRAY
        if isinstance(leaf, types.FunctionType):
            if leaf in self._way:
                return _Again(self._way.index(leaf))
            return self.open(leaf, [chain[0] for chain in chains if chain])
        is_plain = is_value(leaf) and not may_have_code(leaf)
        return _leaf(leaf) if is_plain else self._compared(leaf, chains)

    def _compared(self, leaf: Any, chains: Iterable[Chain]) -> _Leaf:
        """A leaf that is compared by its content, and by its identity if the content may change."""
        is_alike = is_value(leaf) or isinstance(leaf, METHOD)
        stays = is_alike and not isinstance(leaf, METHOD | type | types.ModuleType)
        try:
            content = content_of(leaf, chains, self._way[0] if stays else None)
            return _Leaf((type(leaf), None if is_alike else id(leaf), content), leaf)
        except UnknownDependencyError:
            self._may_change = True
            return _leaf(leaf)

    def _is_taken(self, leaf: Any, arrays: Any) -> bool:
        if not isinstance(leaf, arrays) or isinstance(leaf, bool) or not fits_device(leaf):
            return False
        if isinstance(leaf, np.ndarray | np.generic):
            # A NumPy array is never a key, but one that looks like a key would be taken for it.
            return not self._values and leaf.dtype.kind in "biufc" and not is_legacy_key(leaf)
        return not self._values or is_traced(leaf) or is_key(leaf) or is_legacy_key(leaf)


def nodes_of(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """All nodes of a tree, the root first; its leaves; its structure. An NNX module is a leaf."""
    nodes: list[Any] = []

    def look(node: Any) -> bool:
        nodes.append(node)
        return is_nnx(node)

    return nodes, *jax.tree.flatten(tree, is_leaf=look)


def code_of(tree: Any) -> list[Any]:
    """The code in a tree: users' own classes, functions among its leaves and in static fields."""
    nodes, leaves, treedef = nodes_of(tree)
    functions = [leaf for leaf in leaves if callable(leaf) and not is_nnx(leaf)]
    return [*_code_around(nodes, leaves, treedef), *functions]


def _code_around(nodes: list[Any], leaves: list[Any], treedef: Any) -> list[Any]:
    """As `code_of`, but without the leaves of the tree that are no NNX modules."""
    modules = [leaf for leaf in leaves if is_nnx(leaf)]
    in_modules = (one for module in modules for one in code_of_nnx(module))
    classes = dict.fromkeys(map(type, nodes))
    return [*code_within([*classes, *in_modules]), *_code_in_structure(treedef)]


def _code_in_structure(treedef: Any) -> tuple[Any, ...]:
    """The code that a structure holds beside the leaves of its tree, such as in static fields."""
    try:
        return _code_in_hashable(treedef)
    except Exception:  # what it holds has no hash or no ==, and so hardly shares its program
        return ()


@functools.lru_cache(maxsize=256)
def _code_in_hashable(treedef: Any) -> tuple[Any, ...]:
    kind, fixed = treedef.node_data() or (None, None)
    found = {id(one): one for one in code_within([fixed] if kind not in _CONTAINERS else ())}
    inner = (one for child in treedef.children() for one in _code_in_hashable(child))
    return (*found.values(), *inner)


def _fixed_in(treedef: Any) -> Any:
    """What a structure holds beside the leaves of its tree and beside code, hashable.

    The `==` of two structures does not see all of it: a dict of settings in a static field is equal
    to itself after a change, and 1 is equal to 1.0 and True.
    """
    numbers: list[Any] = []
    others: dict[int, Any] = {}
    left = [treedef]
    while left:
        inner = left.pop()
        left += inner.children()
        kind, data = inner.node_data() or (None, None)
        held = [] if kind in _CONTAINERS else [data]
        while held:
            one = held.pop()
            of = type(one)  # looked up, since a large model has thousands of them
            if of in _NUMBERS:
                numbers.append(of if one else repr(one))  # 0.0 and -0.0 are equal
            elif isinstance(one, tuple):
                held += one
            elif of not in _TEXTS and id(one) not in others and not isinstance(one, _CODE):
                others[id(one)] = one
    return tuple(numbers), settings_in([*others.values()]) if others else None


def _orders_of(nodes: Iterable[Any]) -> tuple[tuple[Any, ...], ...]:
    """The keys of each dict among nodes, in their order. JAX sorts them."""
    return tuple(tuple(node) for node in nodes if type(node) in _DICTS)


def _in_order(tree: Any, orders: tuple[tuple[Any, ...], ...]) -> Any:
    """Gives the keys of each dict in a tree their order again; the dicts are changed."""
    if orders:
        dicts = [node for node in nodes_of(tree)[0] if type(node) in _DICTS]
        for node, keys in zip(dicts, orders, strict=True):
            held = {key: node[key] for key in keys}
            node.clear()
            node.update(held)
    return tree


def _is_method_of_nnx(value: Any) -> bool:
    return isinstance(value, types.MethodType) and is_nnx(value.__self__)


def _takes_floats(fun: types.FunctionType) -> bool:
    """Whether the floats that a function closes over may be arrays while it is traced.

    A library's function may check that a number is a Python float, and some users' do.
    """
    code = getattr(made_for(fun), "__code__", fun.__code__)
    asks_types = any(chain[0] in ("isinstance", "type") for chain in Names.of(code).chains)
    return not asks_types and (is_made_here(fun) or not is_installed(fun))


def _leaf(value: Any) -> _Leaf:
    if isinstance(value, float | complex):
        return _Leaf((type(value), repr(value)), value)  # 0.0 and -0.0 are equal
    return _Leaf((type(value), types_in(value), value if is_value(value) else id(value)), value)


def _is_record(held: Any, leaves: list[Any]) -> bool:
    """Whether numbers in a tree are data, like the step of Flax's TrainState, and not settings."""
    is_class = not isinstance(held, tuple | list | dict) and not is_equinox(held)
    return is_class and any(isinstance(leaf, jax.Array) for leaf in leaves)

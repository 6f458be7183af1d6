"""A function without its contents, and how it is put together again with others."""

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax

from multitower.models.dependencies import Dependencies
from multitower.models.structure import in_order
from multitower.models.values import is_value, types_in

ARRAY = "array"


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
    cells: tuple["Cell", ...]
    globals_: tuple[tuple[str, "Cell"], ...]
    wrapped: int | None
    bare: "Bare" = field(compare=False, repr=False)

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


class Bare(NamedTuple):
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
class Cell:
    """What one variable of a closure holds.

    Attributes:
        rows: the variable's name, if it holds rows.
        treedef: the structure of the tree that it holds.
        orders: the keys of each dict in it, in their order, which JAX does not keep.
        leaves: `ARRAY`, a `Module`, an OpenFunction, an `Again`, or a `Leaf`.
        original: the variable, if the function may want to write into it.
        code: what users' methods, and functions in static fields, use.
        fixed: what else static fields hold; see `multitower.models.structure.fixed_in`.
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
        """A variable that holds the same, with the next contents put in."""
        if self.original is not None:
            return self.original
        if self.rows is not None:
            return types.CellType(in_order(left.rows[self.rows], self.orders))
        leaves = [_close_leaf(leaf, left) for leaf in self.leaves]
        return types.CellType(in_order(jax.tree.unflatten(self.treedef, leaves), self.orders))


@dataclass(frozen=True)
class Module:
    """Stands for an NNX module: the same one, wherever it is closed over."""

    number: int


@dataclass(frozen=True)
class Again:
    """Stands for a function that is closed over by itself, or by one that it closes over."""

    depth: int


@dataclass(frozen=True)
class Leaf:
    """Any other leaf: equal to another one if both surely stay the same, or are the same object.

    Attributes:
        key: type and value, since 1, 1.0 and True are equal; or its `id`, perhaps with its content.
        value: the leaf, kept alive so that no other object can get its `id`.
    """

    key: Any
    value: Any = field(compare=False)

    @classmethod
    def of(cls, value: Any) -> "Leaf":
        """A leaf that is compared by its value, or by its identity if its value may change."""
        if isinstance(value, float | complex):
            return cls((type(value), repr(value)), value)  # 0.0 and -0.0 are equal
        return cls((type(value), types_in(value), value if is_value(value) else id(value)), value)


def _close_leaf(leaf: Any, left: Left) -> Any:
    if leaf is ARRAY:
        return next(left.arrays)
    if isinstance(leaf, Module):
        return left.modules[leaf.number]
    if isinstance(leaf, Again):
        held, attributes = left.way[leaf.depth]  # empty until that function is complete

        def again(*args: Any, **kwargs: Any) -> Any:
            return held[0](*args, **kwargs)

        if attributes is not None:
            again.__dict__ = attributes
        return again
    return leaf.close(left) if isinstance(leaf, OpenFunction) else leaf.value

"""Numbers that a function keeps for its next call, as `self.step += 1` does.

A function is traced several times, and what is compiled keeps the number that it was traced with.
"""

import functools
import types
from collections.abc import Iterator
from typing import Any

from multitower.models.bytecode import Free, Names
from multitower.models.values import value_in

_DEPTH = 3  # methods that call methods


def counters_of(fun: Any) -> dict[str, int | float]:
    """The attributes that a function both assigns to and reads, if they are numbers, by name.

    They are those of its `self` and of the objects that it closes over, also in the methods that
    it calls.
    """
    return {name: value for name, value in _kept(fun, _DEPTH) if isinstance(value, int | float)}


def _kept(fun: Any, depth: int) -> Iterator[tuple[str, Any]]:
    while isinstance(fun, functools.partial):
        fun = fun.func
    plain = getattr(fun, "__func__", fun)
    code = getattr(plain, "__code__", None)
    if code is None:
        return
    cells = zip(code.co_freevars, getattr(plain, "__closure__", None) or (), strict=False)
    owners = {name: value_in(cell) for name, cell in cells}
    if hasattr(fun, "__self__") and code.co_argcount:
        owners[code.co_varnames[0]] = fun.__self__
    names = Names.of(code)
    read = [(owners.get(name), chain) for name, found in names.free.items() for chain in found]
    held = getattr(plain, "__globals__", {})
    read += [(held.get(name), chain) for name, *chain in names.chains if isinstance(name, str)]
    for owner, chain in read if depth else ():
        method = getattr(owner, chain[0], None) if chain else None
        if isinstance(method, types.MethodType):
            yield from _kept(method, depth - 1)
    for owner, *chain in names.stored:
        if isinstance(owner, Free) and tuple(chain) in names.free.get(owner.name, ()):
            value = owners.get(owner.name)
            for attribute in chain:
                value = getattr(value, attribute, None)
            yield ".".join([owner.name, *chain]), value

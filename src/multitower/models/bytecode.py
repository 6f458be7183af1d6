"""Which names a function uses, read off its bytecode."""

import dis
import functools
import types
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_GLOBALS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS")  # the latter in a class body
_CLASS_BODY = ("LOAD_CLASSDEREF", "LOAD_FROM_DICT_OR_DEREF")  # its reads of a closure
WRITES = ("append", "add", "extend", "insert", "remove", "update")


class Imported(NamedTuple):
    """A module that a function imports itself: name and level, as `__import__` takes them."""

    name: str
    level: int


# A global or a module, and the attributes that are read from it: `config.scale` is
# `("config", "scale")`.
Chain = tuple[Any, ...]


class Names:
    """The names that a function uses, including those of the functions inside of it.

    Attributes:
        chains: the globals and imported modules that it reads, with the attributes that it reads.
        free: the attributes that it reads from its first argument and from the variables that it
            closes over, by the variable's name.
        stored: the attributes of globals, of its first argument and of closed-over variables
            (`Free`) that it assigns to, such as a counter of its calls. It does not depend on them.
        filled: globals of which it uses only the methods that fill a list, dict or set.
        stores_globals: whether it assigns to a global.
        rebound: variables of its closure that it assigns to (`nonlocal`).
    """

    def __init__(self, code: types.CodeType) -> None:
        reading = _Reading()
        for inner in _codes(code):
            first = code.co_varnames[: min(1, code.co_argcount)] if inner is code else ()
            reading.read(inner, first)
        chains = [
            chain
            for chain in reading.chains
            if chain[0] not in reading.globals_stored
            and not any(chain[: len(stored)] == stored for stored in reading.stored)
        ]
        used_else = {chain[0] for chain in chains if len(chain) != 2 or chain[1] not in WRITES}
        self.chains = tuple(chains)
        self.filled = frozenset(chain[0] for chain in chains) - used_else
        self.free = {name: tuple(found) for name, found in reading.free.items()}
        self.stored = tuple(reading.stored)
        self.stores_globals = bool(reading.globals_stored)
        self.rebound = frozenset(reading.rebound) & set(code.co_freevars)

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, code: types.CodeType) -> "Names":
        """The names of a function's code, read once."""
        return cls(code)


class _Reading:
    """Reads instructions in order; `at` is what the last ones put on the stack, if known."""

    def __init__(self) -> None:
        self.chains: dict[Chain, None] = {}
        self.free: dict[str, dict[Chain, None]] = {}
        self.stored: dict[Chain, None] = {}
        self.globals_stored: set[str] = set()
        self.rebound: set[str] = set()
        # The modules imported here that each variable may hold.
        self._variables: dict[str, dict[Chain, None]] = {}
        self._cells: tuple[str, ...] = ()
        self._first: tuple[str, ...] = ()

    def read(self, code: types.CodeType, first: tuple[str, ...]) -> None:
        """Reads one code object; `first` has the name of its first argument, if that counts."""
        steps = [step for step in dis.get_instructions(code) if step.opname != "EXTENDED_ARG"]
        self._cells, self._first = code.co_cellvars, first
        at: Chain = ()
        module: Chain = ()
        counted: list[str] = []  # attributes between `x.n` and `x.n += 1`
        for number, step in enumerate(steps):
            before = steps[max(number - 2, 0) : number]
            if step.opname == "IMPORT_NAME":
                at = module = (_imported(before, step.argval),)
            elif step.opname == "IMPORT_FROM":
                at = (*(at or module), step.argval)
            elif at and step.opname in _ATTRIBUTES and before[-1].opname == "COPY":
                self.stored[*at, step.argval] = None
                counted.append(step.argval)
                at = ()
            elif at and step.opname in _ATTRIBUTES:
                at = (*at, step.argval)
            elif not _keeps(at, step, steps[number + 1 : number + 2]):
                if step.opname == "STORE_ATTR" and step.argval in counted:
                    counted.remove(step.argval)
                else:
                    at = self._store(at, step)
                self._use(at)
                at = self._load(step)
        self._use(at)

    def _store(self, at: Chain, step: dis.Instruction) -> Chain:
        """Records what a step assigns to; returns the part of `at` that is used in another way."""
        is_module = bool(at) and isinstance(at[0], Imported)
        variable = _variables(step, "STORE_")[:1]
        if step.opname in ("STORE_ATTR", "DELETE_ATTR"):
            if not at or isinstance(at[0], Imported):
                return at
            self.stored[*at, step.argval] = None
            is_whole = isinstance(at[0], str) or len(at) == 1
            return () if is_whole else at  # writing into an object does not read it
        if step.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self.globals_stored.add(step.argval)
        if step.opname == "STORE_DEREF":
            self.rebound.add(step.argval)
        if is_module and variable:
            self._variables.setdefault(variable[0], {})[at] = None
            return ()
        return at

    def _load(self, step: dis.Instruction) -> Chain:
        """What a step puts on the stack, if it is a global, a module, or a variable of a closure.

        Some instructions load two variables; of the first one, all attributes count as used.
        """
        if step.opname in _GLOBALS:
            return (step.argval,)
        at: Chain = ()
        for variable in _variables(step, "LOAD_"):
            if "FAST" in step.opname and variable in self._cells:
                continue  # it is passed to an inner function, which is read by itself
            self._use(at)
            held = [*self._variables.get(variable, ())]
            for one in held[1:] and held:  # it is unknown which of them: each one counts
                self._use(one)
            at = held[0] if len(held) == 1 else ()
            if not held and ("DEREF" in step.opname or variable in self._first):
                at = (Free(variable),)
        return at

    def _use(self, at: Chain) -> None:
        if at and isinstance(at[0], Free):
            self.free.setdefault(at[0].name, {})[at[1:]] = None
        elif at:
            self.chains[at] = None


class Free(NamedTuple):
    """A variable of the closure, or the first argument."""

    name: str


def _keeps(at: Chain, step: dis.Instruction, after: Sequence[dis.Instruction]) -> bool:
    """Whether a step leaves `at` where it is, on the stack."""
    if step.opname == "COPY":  # x.n += 1
        return bool(at and after) and after[0].opname in _ATTRIBUTES
    return bool(at) and isinstance(at[0], Imported) and step.opname in ("SWAP", "POP_TOP")


def _variables(step: dis.Instruction, kind: str) -> tuple[str, ...]:
    """The local variables that an instruction loads or stores; some do two things at once."""
    names = any(kind + where in step.opname for where in ("FAST", "DEREF", "NAME"))
    if not (names or (kind == "LOAD_" and step.opname in _CLASS_BODY)):
        return ()
    given = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return given[1:] if kind == "LOAD_" and step.opname.startswith("STORE_") else given


def _imported(before: Iterable[dis.Instruction], name: str) -> Imported:
    """The module that `import` puts on the stack; `before` loads its level and the names wanted."""
    level, wanted = (step.argval for step in before)
    return Imported(name if wanted or level else name.partition(".")[0], level)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)

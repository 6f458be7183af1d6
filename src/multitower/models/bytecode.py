"""Which names a function uses, read off its bytecode."""

import dis
import functools
import types
from collections.abc import Iterator

_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("append", "add", "extend", "insert", "pop", "popleft", "remove", "setdefault", "update")

Chain = tuple[str, ...]


class Names:
    """The names that a function uses; the functions inside of it included.

    Attributes:
        chains: the globals that it reads, with the attributes that it takes of them: `config.scale`
            is `("config", "scale")`.
        written: globals, attributes and containers that it changes itself, such as a counter of its
            calls: these are not what it depends on.
        stores_globals: whether it assigns to a global.
        rebound: variables of its closure that it assigns to (`nonlocal`).
    """

    def __init__(self, code: types.CodeType) -> None:
        chains: dict[Chain, None] = {}
        written: set[str] = set()
        rebound: set[str] = set()
        self.stores_globals = False
        for inner in _codes(code):
            chain: Chain = ()
            for step in dis.get_instructions(inner):
                if chain and step.opname in _ATTRIBUTES:
                    chain = (*chain, str(step.argval))
                    continue
                if chain:
                    chains[chain] = None
                chain = (str(step.argval),) if step.opname == "LOAD_GLOBAL" else ()
                if step.opname in ("STORE_ATTR", "STORE_GLOBAL", "DELETE_ATTR"):
                    written.add(str(step.argval))
                if step.opname == "STORE_DEREF":
                    rebound.add(str(step.argval))
                self.stores_globals |= step.opname == "STORE_GLOBAL"
        written |= {chain[0] for chain in chains if chain[-1] in _WRITES and len(chain) == 2}
        self.written = frozenset(written)
        self.rebound = frozenset(rebound) & set(code.co_freevars)
        self.chains = tuple(chain for chain in chains if not written & set(chain))

    @classmethod
    @functools.lru_cache(maxsize=4096)
    def of(cls, code: types.CodeType) -> "Names":
        """The names of a function's code, read once."""
        return cls(code)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)

"""What a function uses besides its arguments and its closure: globals, helpers, class attributes.

`jax.jit` traces every new function object, and so sees a changed global or helper. Here functions
with the same code share a compiled program, so that a loop which defines its loss in every step
compiles once. That is right only if everything that they use is the same. If that cannot be
compared, there is an error, and the function shares its program with no other.
"""

import types
import weakref
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from multitower.models.bytecode import Chain
from multitower.models.values import UnknownDependencyError, is_installed

if TYPE_CHECKING:
    from multitower.models.contents import Reader


@dataclass(frozen=True)
class Dependencies:
    """What a function uses; equal to another one's if both use the same.

    Attributes:
        key: all of it, hashable: values, or the identity of what can change and its content.
        alive: what is known by its identity, kept so that nothing else can have it.
    """

    key: Any
    alive: tuple[Any, ...] = field(compare=False, repr=False)


def dependencies_of(fun: types.FunctionType, without: Iterable[str] = ()) -> Dependencies:
    """What a function uses besides its arguments, its closure and the globals called `without`.

    Looked at once for each function object: as by `jax.jit`, a function that was seen before is
    taken to be what it was.

    Raises:
        UnknownDependencyError: it uses something that cannot be compared.
    """
    known = _SEEN.get(fun)
    if known is None:
        try:
            known = _look(fun, frozenset(without))
        except UnknownDependencyError as error:
            known = error
        _SEEN[fun] = known
    if isinstance(known, UnknownDependencyError):
        raise known
    return known


def of_users(classes: Iterable[type]) -> tuple[type, ...]:
    """Those of them that are users' own, each once."""
    return tuple(cls for cls in dict.fromkeys(classes) if not is_installed(cls))


def methods_of(classes: tuple[type, ...], fun: types.FunctionType | None = None) -> Dependencies:
    """What the methods of users' classes use; a class of which that is unknown, by its identity.

    Args:
        classes: those of values that a function is given or closes over.
        fun: a function that closes over them; as the function itself they are looked at once.
    """
    known = {} if fun is None else _SEEN_CLASSES.setdefault(fun, {})
    if classes not in known:
        reader = _new_reader()
        key = tuple(map(reader.if_comparable, classes))
        known[classes] = Dependencies(key, tuple(reader.alive))
    return known[classes]


def content_of(value: Any, chains: Iterable[Chain] = ((),)) -> Dependencies:
    """A value that a function closes over, such as a namespace of settings, and what is in it.

    Args:
        value: any value.
        chains: the attributes that are taken of it; by default all of it counts.

    Raises:
        UnknownDependencyError: it cannot be compared.
    """
    reader = _new_reader()
    key = tuple((chain, reader.at(value, chain)) for chain in chains)
    return Dependencies(key, tuple(reader.alive))


_SEEN: weakref.WeakKeyDictionary[Any, Dependencies | UnknownDependencyError] = (
    weakref.WeakKeyDictionary()
)
_SEEN_CLASSES: weakref.WeakKeyDictionary[Any, dict[tuple[type, ...], Dependencies]] = (
    weakref.WeakKeyDictionary()
)


def _look(fun: types.FunctionType, without: frozenset[str]) -> Dependencies:
    reader = _new_reader()
    reader.leave_out(fun)
    used = () if is_installed(fun) else reader.globals_of(fun, without)
    key = (
        tuple(reader.content(one) for one in fun.__defaults__ or ()),
        tuple((name, reader.content(one)) for name, one in (fun.__kwdefaults__ or {}).items()),
        tuple(used),
    )
    return Dependencies(key, tuple(reader.alive))


def _new_reader() -> "Reader":
    from multitower.models.contents import Reader  # noqa: PLC0415 (at the first look: importing stays quick)

    return Reader()

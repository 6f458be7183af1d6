"""What a function uses besides its arguments and its closure: globals, helpers, class attributes.

`jax.jit` traces every new function object, and so sees a changed global or helper. Here functions
with the same code share a compiled program, so that a loop which defines its loss in every step
compiles once. That is right only if everything that they use is the same. If that cannot be
compared, an error is raised, and the function does not share its program.
"""

import threading
import types
import weakref
from collections.abc import Iterable, Sequence
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
        key: all of it, hashable: values, or identity and content of objects that can change.
        alive: the objects whose identity is in the key, kept so that no other object can get it.
    """

    key: Any
    alive: tuple[Any, ...] = field(compare=False, repr=False)


def dependencies_of(
    fun: types.FunctionType,
    without: Iterable[str] = (),
    called: types.FunctionType | None = None,
) -> Dependencies:
    """What a function uses besides its arguments, its closure and the globals called `without`.

    It is read once for each function that is called. Like `jax.jit`, this assumes that what this
    one does has not changed since.

    Args:
        fun: the function.
        without: globals that do not count.
        called: the function that is called, if it is not `fun` but one that closes over it.

    Raises:
        UnknownDependencyError: it uses something that cannot be compared.
    """
    seen = _of_called(_SEEN, called or fun, weakref.WeakKeyDictionary)
    known = seen.get(fun)
    if known is None:
        try:
            known = _look(fun, frozenset(without))
        except UnknownDependencyError as error:
            known = error
        seen[fun] = known
    if isinstance(known, UnknownDependencyError):
        raise known
    return known


def code_in(held: Sequence[Any], called: types.FunctionType | None = None) -> Dependencies:
    """What users' classes and values with code use; if that is unknown, the identity of each.

    Args:
        held: what a function gets or closes over.
        called: the function that is called; they are then read once for it.
    """
    known = {} if called is None else _of_called(_SEEN_CODE, called, dict)
    place = tuple(map(id, held))
    if place not in known:
        reader = _new_reader()
        known[place] = Dependencies(reader.code_of(held), (*reader.alive, *held))
    return known[place]


def settings_in(held: Sequence[Any]) -> Dependencies:
    """The content of what may change beside the leaves of a tree; of what is unknown, the identity.

    Args:
        held: such as a dict of settings in a static field.
    """
    reader = _new_reader()
    return Dependencies(tuple(map(reader.if_comparable, held)), (*reader.alive, *held))


def content_of(
    value: Any, chains: Iterable[Chain] = ((),), called: types.FunctionType | None = None
) -> Dependencies:
    """The content of a value that a function closes over, such as a namespace of settings.

    Args:
        value: any value.
        chains: the attributes that are read from it; by default all of it counts.
        called: the function that is called, if the value never changes; it is read once for it.

    Raises:
        UnknownDependencyError: the value cannot be compared.
    """
    known = {} if called is None else _of_called(_SEEN_CODE, called, dict)
    place = ("content", id(value), *chains)
    if place not in known:
        reader = _new_reader()
        key = tuple((chain, reader.at(value, chain)) for chain in chains)
        known[place] = Dependencies(key, (*reader.alive, value))
    return known[place]


# By the function that is called. One that closes over an object which holds it keeps its own entry
# alive, so the oldest are dropped beyond so many; what they used is then read anew.
_MOST = 256
_LOCK = threading.RLock()
_SEEN: weakref.WeakKeyDictionary[
    Any, weakref.WeakKeyDictionary[Any, Dependencies | UnknownDependencyError]
] = weakref.WeakKeyDictionary()
_SEEN_CODE: weakref.WeakKeyDictionary[Any, dict[tuple[Any, ...], Dependencies]] = (
    weakref.WeakKeyDictionary()
)


def _of_called(seen: weakref.WeakKeyDictionary[Any, Any], called: Any, make: Any) -> Any:
    with _LOCK:
        if called not in seen:
            num_more = max(0, len(seen) + 1 - _MOST)
            for oldest in list(seen)[:num_more]:
                del seen[oldest]
            seen[called] = make()
        return seen[called]


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

"""Turns callables that are not plain functions into functions that close over their contents.

Their own variables end with _, so that users' variables, which may hold rows, have other names.
"""

import functools
import types
from collections.abc import Callable, Collection
from typing import Any

from multitower.errors import warn
from multitower.models.equinox import is_equinox
from multitower.models.nnx import is_nnx
from multitower.models.values import is_installed


def as_function(fun: Callable[..., Any], rows: Collection[str] = ()) -> Callable[..., Any]:
    """Turns a callable module, a method or a partial into a function that closes over it.

    Args:
        fun: any callable.
        rows: the names of a partial's keyword arguments that are rows.
    """
    if isinstance(fun, functools.partial):
        return of_partial(fun, rows)
    module_, method_ = fun, type(fun).__call__
    if isinstance(fun, types.MethodType):
        module_, method_ = fun.__self__, fun.__func__
    if not (is_nnx(module_) or is_equinox(module_)):
        return _as_closure(fun)

    def call(*args: Any, **kwargs: Any) -> Any:
        return method_(module_, *args, **kwargs)

    return call


def _as_closure(fun: Any) -> Any:
    """Turns a method or callable object into a function that closes over the object."""
    if hasattr(type(fun), "stateless_call"):
        warn(
            f"the function is {type(fun).__name__}, a model of Keras, and keeps the weights of its "
            "first call. If they change, pass them: lambda weights, state, x: "
            "model.stateless_call(weights, state, x)[0], with in_axes=(None, None, 0)."
        )
    is_bound = isinstance(fun, types.MethodType)
    bound_ = fun if is_bound else types.MethodType(type(fun).__call__, fun)
    if not isinstance(bound_.__func__, types.FunctionType) or is_installed(bound_.__func__):
        return fun

    def call(*args: Any, **kwargs: Any) -> Any:
        return bound_(*args, **kwargs)

    return call


def of_partial(fun: "functools.partial[Any]", rows: Collection[str] = ()) -> Callable[..., Any]:
    """A partial as a function that closes over its arguments.

    Args:
        fun: the partial.
        rows: the names of keyword arguments that become closure variables of the same names.
    """
    for name in rows:
        if name in fun.keywords:
            others = {key: value for key, value in fun.keywords.items() if key != name}
            rest = functools.partial(fun.func, *fun.args, **others)
            return _binding(of_partial(rest, rows), name, fun.keywords[name])
    inner_, first_ = fun.func, fun.args
    names_, values_ = tuple(fun.keywords), tuple(fun.keywords.values())

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner_(*first_, *args, **{**dict(zip(names_, values_, strict=True)), **kwargs})

    return call


def _binding(inner_: Callable[..., Any], name_: str, rows_: Any) -> Callable[..., Any]:
    """A function that closes over a variable of a given name, and passes it on by that name."""

    def call(*args: Any, **kwargs: Any) -> Any:
        return inner_(*args, **{name_: rows_, **kwargs})

    code = call.__code__
    variables = tuple(name_ if one == "rows_" else one for one in code.co_freevars)
    code = code.replace(co_freevars=variables)
    return types.FunctionType(code, call.__globals__, name_, None, call.__closure__)


def variables_of(fun: Any) -> tuple[str, ...]:
    """The variables that a function closes over; for a partial, the names that it binds."""
    if getattr(fun, "__code__", None) is None:
        return ()
    held = dict(zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True))
    if not is_made_here(fun):
        return tuple(held)
    if "names_" in held:
        return held["names_"].cell_contents
    bound = tuple(name for name in held if not name.endswith("_"))
    return bound + variables_of(held[_stands_for(held)].cell_contents)


def made_for(fun: Any) -> Any:
    """The user's callable that a function made here stands for; any other one is returned."""
    while isinstance(fun, types.FunctionType) and is_made_here(fun):
        held = dict(zip(fun.__code__.co_freevars, fun.__closure__ or (), strict=True))
        inner = held[_stands_for(held)].cell_contents
        fun = getattr(inner, "__func__", inner)
    return fun


def _stands_for(held: Collection[str]) -> str:
    """Which of the variables of a function made here is what it stands for."""
    (name,) = {"inner_", "method_", "bound_"} & set(held)
    return name


def is_made_here(fun: types.FunctionType) -> bool:
    """Whether a function was made here, to stand for a user's callable."""
    return fun.__code__.co_filename == __file__

"""Functions that close over arrays and modules: these are passed to programs like arguments.

A training step without `jax.jit` defines its loss anew each time, around the current state:

```python
def train_step(state, batch, key):
    def loss_fn(params): ...  # uses state.batch_stats, batch and key
```

If these arrays were constants of the compiled program, every step would compile a new program, a
key would give all towers the same random numbers, and the batch could not be split.
"""

import types
import weakref
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple, TypeVar

import jax

from multitower.errors import ArgumentError, MultitowerError
from multitower.models.callables import made_for, variables_of
from multitower.models.dependencies import code_in
from multitower.models.open_function import Left, OpenFunction
from multitower.models.structure import code_of

_Result = TypeVar("_Result")


class Contents(NamedTuple):
    """What is taken out of a function.

    Attributes:
        arrays: arrays that every tower gets whole.
        modules: NNX modules.
        rows: trees of arrays that are cut into towers, by the name of the variable.
    """

    arrays: list[Any]
    modules: list[Any]
    rows: Mapping[str, Any]


class UsedByArguments:
    """What the code among a function's arguments uses, such as users' methods, at its first call.

    Like `jax.jit`, this assumes that a function object has not changed since its first call.
    """

    def __init__(self) -> None:
        self._known: Any = None

    def of(self, *arguments: Any) -> Any:
        """Hashable; equal to that of another function if the code uses the same."""
        if self._known is None:
            self._known = code_in(code_of(arguments))
        return self._known


def call_opened(
    fun: Callable[..., Any], names: Collection[str], call: Callable[[Any, Contents], _Result]
) -> _Result:
    """Calls `call(opened, contents)`, with as much taken out of a function as it allows.

    Numbers and NumPy arrays that it closes over are taken out too, so that new values need no new
    program. A function that fails with them, because it branches on them, passes them to NumPy or
    needs them to be settings, gets their values instead.

    Args:
        fun: the function.
        names: as for `open_function`.
        call: traces the function; it is called a second time if that fails.

    Returns:
        What `call` returns.

    Raises:
        ArgumentError: as `open_function`.
    """
    code = getattr(made_for(fun), "__code__", getattr(fun, "__code__", None))
    if code is None or code in _NEED_VALUES:
        return call(*open_function(fun, names, values=code is not None))
    opened, contents = open_function(fun, names)
    try:
        return call(opened, contents)
    except (MultitowerError, Warning, jax.errors.JaxRuntimeError, FloatingPointError):
        raise
    except Exception:  # what JAX or the function itself raises where a value is needed
        if not contents.arrays:
            raise
    result = call(*open_function(fun, names, values=True))
    _NEED_VALUES.add(code)
    return result


_NEED_VALUES: weakref.WeakSet[types.CodeType] = weakref.WeakSet()


def open_function(
    fun: Callable[..., Any], names: Collection[str], *, values: bool = False
) -> tuple[Any, Contents]:
    """Takes arrays and modules out of a function, and out of the functions that it closes over.

    Args:
        fun: the function.
        names: the names of closed-over variables or globals that hold rows.
        values: whether the function needs the values of its arrays and numbers while it is traced.
            Then only keys, traced values, modules and rows are taken out.

    Returns:
        An `OpenFunction`, or `fun` itself if it is not a Python function; and its contents.

    Raises:
        ArgumentError: the function does not use a variable of one of these names.
    """
    from multitower.models.opening import Opener  # noqa: PLC0415 (importing stays quick)

    opener = Opener(names, values)
    fun = opener.inside(fun)
    opened = opener.open(fun) if isinstance(fun, types.FunctionType) else fun
    for name in names:
        if name not in opener.rows:
            hidden = "nothing that shows (decorators other than jax.jit and jax.checkpoint hide it)"
            there = ", ".join(variables_of(fun)) or hidden
            raise ArgumentError(
                f"in_axes names {name!r}, and the function closes over {there}. Name "
                "a variable that the function itself reads and that is none of its arguments; or "
                "make it an argument and give each argument its axis: in_axes=(None, 0). (An "
                "attribute, such as self.batch, is no variable.)"
            )
    return opened, Contents(opener.arrays, opener.modules, opener.rows)


def close_function(opened: Any, contents: Contents) -> Callable[..., Any]:
    """The function again, around other contents in the same order."""
    if not isinstance(opened, OpenFunction):
        return opened
    return opened.close(Left(iter(contents.arrays), contents.modules, contents.rows, []))

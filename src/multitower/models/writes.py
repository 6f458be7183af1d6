"""Parameters that a call writes into: noted while the first look traces the call.

A module of NNX can be changed in place, its parameters too: `nnx.SpectralNorm` and `nnx.WeightNorm`
write the weights that they have normalised. Only the optimizer changes parameters here, so what a
call writes is dropped after it, and the user has to be told.
"""

from collections.abc import Generator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

# For each parameter that holds another object after the call, what it was and what it is now. A
# transform such as `nnx.remat` writes all of them, with the values that they had.
Writes = dict[str, tuple[Any, Any]]

_noted: ContextVar[Writes | None] = ContextVar("noted", default=None)


@contextmanager
def noting_writes() -> Generator[Writes]:
    """Collects what calls of modules write into their parameters, by the parameter's name."""
    found: Writes = {}
    token = _noted.set(found)
    try:
        yield found
    finally:
        _noted.reset(token)


def note_writes(name: str, before: Any, after: Any) -> None:
    """Notes what a call has written into a module's parameters, if anybody collects it.

    Args:
        name: the name of the module's class.
        before: trees of parameters before the call.
        after: the same trees after it.
    """
    found = _noted.get()
    if found is None:
        return
    flat, _ = jax.tree_util.tree_flatten_with_path(before)
    for (path, old), new in zip(flat, jax.tree.leaves(after), strict=True):
        if new is not old:
            inside = jax.tree_util.keystr(path[1:]).removesuffix(".value")
            found[f"{name}{inside}"] = old, new

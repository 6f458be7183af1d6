"""Modes: a module that a function closes over is scored in the mode that it has."""

import sys
from collections.abc import Callable
from typing import Any

from multitower.errors import warn
from multitower.models.callables import as_function
from multitower.models.closures import open_function
from multitower.models.nnx import is_in_training_mode


def warn_of_training_mode(fn: Callable[..., Any], what: str, caller: str) -> None:
    """Warns if a function closes over NNX modules in training mode, which nobody copies.

    Args:
        fn: the function of parameters and a batch.
        what: what it is called in the signature of `caller`.
        caller: `"evaluate"` or `"predict"`.
    """
    if "flax.nnx" not in sys.modules:
        return
    _, contents = open_function(as_function(fn), ())
    for name in sorted({type(x).__name__ for x in contents.modules if is_in_training_mode(x)}):
        warn(
            f"{what} closes over the module {name} in training mode: its dropout is on, and its "
            f"BatchNorm takes statistics of each tower's rows. {caller} puts the modules in its "
            f"argument params into evaluation mode: pass it there, {caller}({what}, model, ...), "
            "or call model.eval() before."
        )

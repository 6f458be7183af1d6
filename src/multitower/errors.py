"""Every error and warning that multitower raises.

```text
MultitowerError
├── ConfigurationError (RuntimeError)   set too late, or settings that contradict each other
├── DeviceError        (ValueError)     devices or towers that do not exist or do not fit
├── ArgumentError      (TypeError)      a wrong argument, or two that exclude each other
├── BatchError         (ValueError)     rows that are missing, uneven or of different counts
├── DataError          (ValueError)     files of a data set that are missing, damaged or not safe
├── OutputError        (ValueError)     a returned value that cannot be combined over towers
├── GradientError      (ValueError)     gradients that cannot be taken or averaged
├── CheckpointError    (RuntimeError)   a checkpoint that cannot be written, read or trusted
├── NonFiniteError     (FloatingPointError) a loss or parameter that is no longer finite
├── StateError         (ValueError)     a training state that does not fit its step
├── RunError           (ValueError)     a run that cannot start or continue
└── Interrupted        (InterruptedError)  asked to stop: saved, and can be resumed

MultitowerWarning (UserWarning)         it runs, but probably not as intended
```

Every class also derives from the builtin in brackets, so `except ValueError` keeps working.
"""

import functools
import importlib.metadata
import inspect
import math
import operator
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import jax

_P = ParamSpec("_P")
_R = TypeVar("_R")


class MultitowerError(Exception):
    """Base of every error that multitower raises.

    Example:
        >>> import numpy as np
        >>> import multitower as mt
        >>> try:
        ...     mt.shard(np.zeros((0, 2)))
        ... except mt.MultitowerError as error:
        ...     print(type(error).__name__, isinstance(error, ValueError))
        BatchError True
    """


class ConfigurationError(MultitowerError, RuntimeError):
    """A setting that came too late, or that contradicts another setting."""


class DeviceError(MultitowerError, ValueError):
    """Devices or towers that do not exist or do not fit together."""


class ArgumentError(MultitowerError, TypeError):
    """An argument of a wrong kind or value, or arguments that exclude each other."""


class BatchError(MultitowerError, ValueError):
    """Rows that are missing, that do not fill the towers, or whose counts differ."""


class DataError(MultitowerError, ValueError):
    """Files of a data set that are missing, damaged, not safe to read, or not what was expected."""


class OutputError(MultitowerError, ValueError):
    """A function returned a value that cannot be combined over towers."""


class GradientError(MultitowerError, ValueError):
    """Gradients that cannot be taken, or cannot be averaged."""


class CheckpointError(MultitowerError, RuntimeError):
    """A checkpoint that cannot be written, read or trusted."""


class NonFiniteError(MultitowerError, FloatingPointError):
    """A loss or a parameter that is no longer a finite number."""


class StateError(MultitowerError, ValueError):
    """A training state that does not fit the step it was given to."""


class RunError(MultitowerError, ValueError):
    """A run that cannot start or continue, because of its recipe, settings or directory."""


class Interrupted(MultitowerError, InterruptedError):  # noqa: N818 (nothing went wrong)
    """A run was asked to stop: it finished its step, saved its state, and can be resumed.

    Args:
        message: what was done before the run ended.
        signal: the number of the signal, such as `signal.SIGTERM`; it is kept as an attribute.

    Example:
        >>> import signal
        >>> import multitower as mt
        >>> def train():
        ...     raise mt.Interrupted("stopped after step 3, which is saved.", signal.SIGTERM)
        >>> try:
        ...     train()
        ... except mt.Interrupted as stopped:
        ...     exit_code = 128 + stopped.signal  # as shells number them
        >>> exit_code
        143
    """

    def __init__(self, message: str, signal: int) -> None:
        super().__init__(message)
        self.signal = signal


class MultitowerWarning(UserWarning):
    """The program runs, but probably not as you intended.

    Example:
        >>> import warnings, optax
        >>> import multitower as mt
        >>> losses = lambda w, x: (w - x) ** 2
        >>> with warnings.catch_warnings():
        ...     warnings.simplefilter("error", mt.MultitowerWarning)  # each becomes an error
        ...     mt.train_step(losses, optax.sgd(0.1), devices=4, towers=2)
        Traceback (most recent call last):
        multitower.MultitowerWarning: ...
    """


def install_command(*packages: str) -> str:
    """Returns the `pip install` command for packages that an optional part needs.

    The command works wherever multitower was installed from. It names the packages themselves,
    because pip would look up an extra such as `multitower[cli]` in its package index.

    Args:
        packages: names of packages, such as `"orbax-checkpoint"`.

    Returns:
        The command, in which each package has the version range that the installed multitower
        requires. Without installed metadata, as in a source tree, there are no ranges.

    Example:
        >>> from multitower.errors import install_command
        >>> install_command("left-pad", "right-pad")
        'pip install left-pad right-pad'
    """
    import shlex  # noqa: PLC0415 (importing stays quick)

    try:
        requirements = importlib.metadata.requires("multitower") or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    # A line of the metadata: "orbax-checkpoint>=0.11.20; extra == 'checkpoint'".
    needed = [line.partition(";")[0].strip() for line in requirements]
    ranges = {_normalized(re.split(r"[^\w.-]", one)[0]): one for one in needed}
    return "pip install " + shlex.join(ranges.get(_normalized(name), name) for name in packages)


def _normalized(package: str) -> str:
    return re.sub(r"[-_.]+", "-", package).lower()


def listed(words: Sequence[object], joint: str = "and") -> str:
    """Returns words as a list in a sentence, such as `a, b and c`.

    Args:
        words: any number of words or numbers.
        joint: what stands before the last one.

    Example:
        >>> from multitower.errors import listed
        >>> listed(["weights", "biases"]), listed([1, 2, 4], "or"), listed([])
        ('weights and biases', '1, 2 or 4', '')
    """
    *most, last = map(str, words or [""])
    return f"{', '.join(most)} {joint} {last}" if most else last


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a question with the known word that is most like a mistyped or shortened one.

    Args:
        word: the word that was given.
        known: the words that are valid.

    Returns:
        A question and a space; empty if no known word is similar, or has its letters as initials.

    Example:
        >>> from multitower.errors import did_you_mean
        >>> did_you_mean("digist", ["digits", "mnist"])
        "Did you mean 'digits'? "
        >>> did_you_mean("--lr", ["--log", "--learning-rate"])
        "Did you mean '--learning-rate'? "
    """
    import difflib  # noqa: PLC0415 (only after a mistake)

    names = list(known)
    words_of = lambda name: name.replace("_", "-").split("-")
    initials = ["".join(part[:1] for part in words_of(name)) for name in names]
    short = word.strip("-")
    close = [names[initials.index(short)]] if len(short) > 1 and short in initials else []
    close = close or difflib.get_close_matches(word, names, n=1)
    return f"Did you mean {close[0]!r}? " if close else ""


def whole_number(
    name: str, value: Any, least: int, error: type[MultitowerError] = ArgumentError, more: str = ""
) -> int:
    """The value of an argument, as a Python integer.

    Args:
        name: of the argument.
        value: what was passed; integers of NumPy and JAX count, True and False do not.
        least: the smallest one that is accepted.
        error: the class of the error.
        more: the end of its first sentence.

    Raises:
        MultitowerError: it is not a whole number, or below the least one.

    Example:
        >>> import numpy as np
        >>> from multitower.errors import whole_number
        >>> whole_number("towers", np.int64(8), 1)
        8
    """
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if number < least:
        raise error(f"{name}={value!r}: it must be a whole number, {least} or more{more}.")
    return number


def true_or_false(**flags: Any) -> None:
    """Refuses what is neither True nor False, such as `remat="no"`, which Python takes for True.

    Raises:
        ArgumentError: a flag has another value; 0 and 1 are accepted.
    """
    for name, value in flags.items():
        if isinstance(value, str) or str(value) not in ("True", "False", "0", "1"):
            raise ArgumentError(f"{name}={value!r}: say True or False.")


def refuse_foreign(
    otherwise: str = "Leave it out.", /, **hints: str
) -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Makes a decorator that turns wrong keyword arguments into an `ArgumentError` with a hint.

    It raises for an argument that the function does not have, and for a required argument that has
    a hint and that the call does not pass.

    Args:
        otherwise: what to do with an argument that has no hint and resembles none.
        **hints: by name of the argument, what to write instead of an argument that similar
            functions of other libraries have, or what to pass for a required one.

    Example:
        >>> from multitower.errors import ArgumentError, refuse_foreign
        >>> @refuse_foreign(axis_name="Leave it out.")
        ... def split(x, *, towers=None): ...
        >>> try:
        ...     split(1, axis_name="batch")
        ... except ArgumentError as error:
        ...     print(error)
        split has no argument 'axis_name'. Leave it out.
    """

    def decorate(function: Callable[_P, _R]) -> Callable[_P, _R]:
        known = inspect.signature(function).parameters
        called = function.__qualname__.removesuffix(".__init__")
        needed = {
            name: math.inf if one.kind is one.KEYWORD_ONLY else place
            for place, (name, one) in enumerate(known.items())
            if one.default is one.empty and name in hints
        }

        @functools.wraps(function)
        def call(*args: _P.args, **given: _P.kwargs) -> _R:
            for name in given:
                if name not in known:
                    hint = hints.get(name) or did_you_mean(name, known) or otherwise
                    raise ArgumentError(f"{called} has no argument {name!r}. {hint.strip()}")
            for name, place in needed.items():
                if len(args) <= place and name not in given:
                    raise ArgumentError(f"{called} needs {name}=. {hints[name]}")
            return function(*args, **given)

        return call

    return decorate


def warn(text: str) -> None:
    """Warns with `MultitowerWarning`, at the line of the user's program that led here."""
    level, frame = 1, sys._getframe(1)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and is_inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    warnings.warn(text, MultitowerWarning, stacklevel=level + 1)


def is_inside(file: str) -> bool:
    """Whether a file belongs to multitower, JAX, or a module of Python through which they call."""
    return file.startswith(_OWN) or any(name in file for name in _BETWEEN)


_OWN = str(Path(__file__).parent) + os.sep
# Where libraries are installed; Debian's Python, which Colab uses, has a name of its own for it.
LIBRARIES = ("/site-packages/", "/dist-packages/")
# JAX is always one, also in another folder, where `pip install --target` may have put it.
JAX = str(Path(jax.__file__).parent) + os.sep
_BETWEEN = (JAX, "/contextlib.py", "/functools.py", "<frozen")

"""The directory of one run: made early, never overwritten unasked, results written whole."""

import json
import os
import time
from pathlib import Path
from typing import Any

from multitower.errors import RunError

RESULT = "result.json"


def make_run_directory(path: Path, *, overwrite: bool = False) -> Path:
    """Makes the directory of a run, before any work is done for it.

    Args:
        path: where; it may exist.
        overwrite: whether a result that is there already may be thrown away. It goes at once, so
            that a run that fails leaves no old result behind as if it were its own.

    Returns:
        The path.

    Raises:
        RunError: there is a result already, or the directory cannot be made.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.run_directory import make_run_directory, write_result
        >>> with tempfile.TemporaryDirectory() as here:
        ...     directory = make_run_directory(Path(here) / "first")
        ...     write_result(directory, {"steps": 1}).name
        'result.json'
    """
    result = path / RESULT
    try:
        path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            result.unlink(missing_ok=True)
        _check_writable(path)
    except OSError as error:
        raise RunError(
            f"the run directory {path} cannot be used: {error.strerror or error}. Name another one."
        ) from error
    if result.exists():
        raise RunError(
            f"{result} holds the result of another run. Name another directory, or say --force "
            "(overwrite=True) to replace it."
        )
    return path


def fresh_run_directory(parent: Path, name: str) -> Path:
    """Makes a directory `name-<date>-<time>` that no other run has, not even one just begun.

    Args:
        parent: in which directory.
        name: of the recipe.

    Returns:
        The path.

    Raises:
        RunError: it cannot be made.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.run_directory import fresh_run_directory
        >>> with tempfile.TemporaryDirectory() as here:
        ...     fresh_run_directory(Path(here), "digits") == fresh_run_directory(
        ...         Path(here), "digits"
        ...     )
        False
    """
    stamp = f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            if not parent.is_dir():
                raise RunError(f"{parent} is no directory, and runs go there by default.") from None
            number += 1
        except OSError as error:
            raise RunError(f"the run directory {path} cannot be made: {error.strerror}.") from error
        else:
            return path


def write_result(directory: Path, result: dict[str, Any]) -> Path:
    """Writes `result.json`, whole or not at all.

    Args:
        directory: of the run.
        result: what is to be written; numbers that JSON has no word for (NaN) are refused.

    Returns:
        The path of the file.

    Raises:
        RunError: the file cannot be written.
        ValueError: the result holds a NaN or an infinity.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.run_directory import write_result
        >>> with tempfile.TemporaryDirectory() as here:
        ...     print(write_result(Path(here), {"steps": 1}).read_text())
        {
          "steps": 1
        }
    """
    target = directory / RESULT
    partial = directory / f".{RESULT}.{os.getpid()}"
    text = json.dumps(result, indent=2, allow_nan=False) + "\n"
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, target)  # readers see no file or the whole file
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise RunError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def _check_writable(path: Path) -> None:
    probe = path / f".{RESULT}.{os.getpid()}"
    probe.touch()
    probe.unlink()

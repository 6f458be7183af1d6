"""The directory of a scaling measurement, and the files in it."""

import json
import os
from pathlib import Path
from typing import Any

from multitower.errors import RunError
from multitower.scaling.summary import OPTIONS

NUMBERS = "scale.json"
PICTURE = "scale.png"
PAGE = "scale.html"


def make_scaling_directory(path: Path, *, overwrite: bool = False, add: bool = False) -> Path:
    """Makes the directory of a measurement, before it begins; it may be that of a run.

    Args:
        path: the directory; it may exist.
        overwrite: whether an existing measurement may be deleted.
        add: whether this measurement is added to an existing one.

    Returns:
        The path.

    Raises:
        RunError: the directory holds a measurement, or cannot be made or written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.scaling.directory import make_scaling_directory
        >>> with tempfile.TemporaryDirectory() as here:
        ...     make_scaling_directory(Path(here) / "first").name
        'first'
    """
    old = path / NUMBERS
    if add and read_measurement(path) is not None:
        return path
    if old.exists() and not (overwrite or add):
        raise RunError(
            f"{old} holds another measurement. Name another directory, or say --force to replace "
            "it, or --add to add this one."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        # With `add`, another job may be about to write the first measurement.
        for name in () if add else (NUMBERS, PICTURE, PAGE):
            (path / name).unlink(missing_ok=True)
        probe = path / f".{NUMBERS}.{os.getpid()}"
        probe.touch()  # so that a directory that is not writable is an error now
        probe.unlink(missing_ok=True)  # a process of another host may have the same number
    except OSError as error:
        raise RunError(
            f"the directory {path} cannot be used: {error.strerror or error}. Choose another "
            "directory."
        ) from error
    return path


def read_measurement(path: Path) -> dict[str, Any] | None:
    """The measurement in the `scale.json` of a directory; None if there is no such file.

    Raises:
        RunError: the file holds no measurement, or one of an earlier version.
    """
    file = path / NUMBERS
    try:
        found = json.loads(file.read_text())
        measured = [*(found["strong"] or []), *(found["weak"] or [])]
        is_whole = all("job" in entry and "losses" in entry for entry in measured)
        if is_whole and all(name in found for name in OPTIONS):
            return found
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise RunError(
        f"--add: {file} holds no measurement that another one can be added to. Name another "
        "--run-dir, or say --force instead of --add to replace it."
    )

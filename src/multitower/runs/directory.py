"""The directory of one run: made early, never overwritten unasked, results written whole."""

import contextlib
import json
import os
import shutil
import time
from pathlib import Path
from typing import Any

from multitower.errors import RunError
from multitower.processes.run_lock import held_run_directory

RESULT = "result.json"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
EVENTS = "events"
METRICS = "metrics.jsonl"
REPORT = "report.html"


def make_run_directory(path: Path, *, overwrite: bool = False) -> Path:
    """Makes the directory of a run, before any work is done for it.

    Args:
        path: where; it may exist.
        overwrite: whether a run that is there already may be thrown away. Its result and its
            checkpoints go at once, so that a run that fails leaves none behind as its own.

    Returns:
        The path.

    Raises:
        RunError: there is a run already, or the directory cannot be made; with `overwrite`, a run
            that still trains there.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.runs.directory import make_run_directory, write_result
        >>> with tempfile.TemporaryDirectory() as here:
        ...     directory = make_run_directory(Path(here) / "first")
        ...     write_result(directory, {"steps": 1}).name
        'result.json'
    """
    result = path / RESULT
    try:
        path.mkdir(parents=True, exist_ok=True)
        if overwrite:
            _throw_away(path)
        _check_writable(path)
    except OSError as error:
        raise RunError(
            f"the run directory {path} cannot be used: {error.strerror or error}. Choose another "
            "directory."
        ) from error
    if result.exists():
        raise RunError(
            f"{result} holds the result of another run. Name another directory, or say --force "
            "(overwrite=True) to replace it."
        )
    if (path / CHECKPOINTS).exists():
        raise RunError(
            f"{path} holds a run that is not finished: multitower resume {path} continues it. "
            "Name another directory, or pass --force (overwrite=True) to delete it."
        )
    return path


def run_found_in(path: Path, config: dict[str, Any]) -> str:
    """Looks for the run that the same command began, to go on with it.

    Args:
        path: the directory of the run; it need not exist.
        config: what `write_config` would be given; only `devices` may differ, among its options.

    Returns:
        `"finished"`, `"begun"`, or `"nothing"`.

    Raises:
        RunError: the run there is another one, or nobody can tell.
    """
    if not (path / CONFIG).exists():
        return "nothing"
    before = _said(read_config(path))
    now = _said(json.loads(json.dumps(config)))
    differs = sorted(name for name in before | now if before.get(name) != now.get(name))
    finished = (path / RESULT).exists()
    if differs and not finished and not (path / CHECKPOINTS).exists():
        return "nothing"  # the other one was refused: it has trained nothing
    if differs:
        name = differs[0]
        raise RunError(
            f"{path} holds another run: there {name} is {before.get(name)!r}, and here "
            f"{now.get(name)!r}. Give the command of that run, or another --run-dir."
        )
    return "finished" if finished else "begun"


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
        >>> from multitower.runs.directory import fresh_run_directory
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
        >>> from multitower.runs.directory import write_result
        >>> with tempfile.TemporaryDirectory() as here:
        ...     print(write_result(Path(here), {"steps": 1}).read_text())
        {
          "steps": 1
        }
    """
    return _write_json(directory / RESULT, result)


def write_config(directory: Path, config: dict[str, Any]) -> Path:
    """Writes `config.json`, what `multitower resume` needs to go on, whole or not at all.

    Args:
        directory: of the run.
        config: JSON values.

    Returns:
        The path of the file.

    Raises:
        RunError: the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.runs.directory import read_config, write_config
        >>> with tempfile.TemporaryDirectory() as here:
        ...     _ = write_config(Path(here), {"recipe": "digits"})
        ...     read_config(Path(here))
        {'recipe': 'digits'}
    """
    return _write_json(directory / CONFIG, config)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads what `write_config` wrote.

    Args:
        directory: of the run.

    Returns:
        The configuration.

    Raises:
        RunError: there is none, or it cannot be read.
    """
    path = directory / CONFIG
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise RunError(
            f"{path} is not there: {directory} is not the directory of a run. It is named in the "
            "last line that the run printed, under runs/ if none was chosen."
        ) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}.") from error


def write_whole(target: Path, content: str | bytes) -> Path:
    """Writes a file, whole or not at all.

    Args:
        target: the file; an old one stays until the new one is complete.
        content: what goes in; characters that UTF-8 cannot say are written as escapes.

    Returns:
        The path of the file.

    Raises:
        RunError: the file cannot be written.
    """
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if isinstance(content, str):
            content = content.encode("utf-8", "backslashreplace")
        partial.write_bytes(content)
        os.replace(partial, target)  # readers see no file or the whole file
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        raise RunError(f"{target} cannot be written: {error.strerror or error}.") from error
    return target


def _write_json(target: Path, content: dict[str, Any]) -> Path:
    return write_whole(target, json.dumps(content, indent=2, allow_nan=False) + "\n")


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """Every choice of a configuration, by its name; where it runs is none."""
    options = {**config.get("options", {}), "devices": None}
    settings = {f"--set {name}": value for name, value in config.get("settings", {}).items()}
    return {"recipe": config.get("recipe"), **options, **settings}


def _check_writable(path: Path) -> None:
    probe = path / f".{RESULT}.{os.getpid()}"
    probe.touch()
    probe.unlink()


def _throw_away(path: Path) -> None:
    with held_run_directory(path):
        for old in (CHECKPOINTS, BEST, EVENTS):
            shutil.rmtree(path / old, ignore_errors=True)
        for old in (RESULT, METRICS, REPORT):
            (path / old).unlink(missing_ok=True)

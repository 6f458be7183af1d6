"""The directory of one run: made before training, and overwritten only with `overwrite`."""

import contextlib
import json
import os
import shutil
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from multitower.errors import RunError
from multitower.processes.run_lock import LOCK, held_run_directory
from multitower.runs.options import RunOptions
from multitower.training.tracking.log import LOGGED

RESULT = "result.json"
CONFIG = "config.json"
CHECKPOINTS = "checkpoints"
BEST = "best"
EVENTS = "events"
METRICS = "metrics.jsonl"
REPORT = "report.html"
PROFILE = "profile"


def make_run_directory(path: Path, *, overwrite: bool = False) -> Path:
    """Makes the directory of a run, before training starts.

    Args:
        path: the directory; it may exist.
        overwrite: whether to delete a run that is already there. Its result and checkpoints are
            deleted at once, so that a new run that fails does not leave them behind as its own.

    Returns:
        The path.

    Raises:
        RunError: the directory holds another run, or cannot be made; with `overwrite`, a run
            still trains there.

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
            f"{result} holds the result of another run. Use another directory, or pass --force "
            "(overwrite=True) to replace it."
        )
    if (path / CHECKPOINTS).exists() and not overwrite:
        raise RunError(
            f"{path} holds a run that is not finished: multitower resume {path} continues it. "
            "Use another directory, or pass --force (overwrite=True) to delete it."
        )
    return path


def run_found_in(path: Path, config: dict[str, Any]) -> str:
    """Looks for a run that the same command started, to resume it.

    Args:
        path: the directory of the run; it need not exist.
        config: the configuration of this command, as for `write_config`; only the options
            `devices`, `log` and `profile` may differ.

    Returns:
        `"finished"`, `"begun"`, or `"nothing"`.

    Raises:
        RunError: the directory holds a run with other options, or its files cannot be read.
    """
    if not (path / CONFIG).exists():
        return "nothing"
    before = _said(read_config(path))
    now = _said(json.loads(json.dumps(config)))
    differs = sorted(name for name in before | now if before.get(name) != now.get(name))
    finished = (path / RESULT).exists()
    if differs and not finished and not (path / CHECKPOINTS).exists():
        return "nothing"  # the command was refused before it trained
    if differs:
        name = differs[0]
        raise RunError(
            f"{path} holds a run with {name} {before.get(name)!r}, and this command has {name} "
            f"{now.get(name)!r}. Use the command of that run, or another --run-dir."
        )
    return "finished" if finished else "begun"


def fresh_run_directory(parent: Path, name: str) -> Path:
    """Makes a new directory `name-<date>-<time>`, which no other run uses.

    Args:
        parent: the directory in which it is made.
        name: the recipe's name.

    Returns:
        The path.

    Raises:
        RunError: the directory cannot be made.

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
    stamp = f"{name.replace(os.sep, '-')}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = parent / (stamp if number == 1 else f"{stamp}-{number}")
        try:
            parent.mkdir(parents=True, exist_ok=True)
            path.mkdir()
        except FileExistsError:
            if not parent.is_dir():
                raise RunError(
                    f"{parent} is a file, and runs are written there by default. Pass "
                    "--run-dir DIR."
                ) from None
            number += 1
        except OSError as error:
            raise RunError(f"the run directory {path} cannot be made: {error.strerror}.") from error
        else:
            return path


def remove_refused(path: Path) -> None:
    """Removes the fresh directory of a run that was refused before it trained."""
    if not path.is_dir():
        return  # the recipe has changed the working directory
    saved = any((path / CHECKPOINTS).glob("*"))
    if {one.name for one in path.iterdir()} <= {CONFIG, LOCK, CHECKPOINTS} and not saved:
        shutil.rmtree(path, ignore_errors=True)


def write_result(directory: Path, result: dict[str, Any]) -> Path:
    """Writes `result.json`; readers see the complete file or none.

    Args:
        directory: the directory of the run.
        result: JSON values; NaN and infinity are refused.

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
    """Writes `config.json`, which `multitower resume` reads; readers see the complete file or none.

    Args:
        directory: the directory of the run.
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
        ...     _ = write_config(Path(here), {"recipe": "digits", "options": {}})
        ...     read_config(Path(here))
        {'recipe': 'digits', 'options': {}}
    """
    return _write_json(directory / CONFIG, config)


def read_config(directory: Path) -> dict[str, Any]:
    """Reads what `write_config` wrote.

    Args:
        directory: the directory of the run.

    Returns:
        The configuration: the name of a recipe, and tables of names and values.

    Raises:
        RunError: the file does not exist, cannot be read, or is not a configuration.
    """
    path = directory / CONFIG
    try:
        found: Any = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise RunError(
            f"{path} does not exist, so {directory} is not the directory of a run. The last line "
            "that a run prints names its directory; by default it is under runs/."
        ) from error
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}. Put it back from a copy.") from error
    kinds = {"recipe": str, "options": dict, "settings": dict}
    entries: dict[str, Any] = {"settings": {}, **found} if isinstance(found, dict) else {}
    if not all(isinstance(entries.get(name), kind) for name, kind in kinds.items()):
        raise RunError(
            f"{path} is not the configuration of a run, which has a recipe, options and settings. "
            "Put it back from a copy."
        )
    return found


def write_whole(target: Path, content: str | bytes) -> Path:
    """Writes a file; readers see the complete file or the old one.

    Args:
        target: the file; an old one stays until the new one is complete.
        content: the content; characters that UTF-8 cannot encode are written as escapes.

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


_NO_MATTER = ("devices", "log", "profile")  # options that do not change the result


def _said(config: dict[str, Any]) -> dict[str, Any]:
    """Every option of a configuration by name, without those that change no result."""
    # A run of an earlier version had the defaults of options that it did not know.
    known = {**asdict(RunOptions()), **config.get("options", {})}
    options = {**known, **dict.fromkeys(_NO_MATTER)}
    if options["compute_dtype"] == "float32":
        options["compute_dtype"] = None  # as `RunOptions` reads it
    settings = {f"--set {name}": value for name, value in config.get("settings", {}).items()}
    return {"recipe": config.get("recipe"), **options, **settings}


def _check_writable(path: Path) -> None:
    probe = path / f".{RESULT}.{os.getpid()}"
    probe.touch()
    probe.unlink()


_FILES = (RESULT, METRICS, REPORT, LOGGED, CHECKPOINTS, BEST, EVENTS, PROFILE)


def _throw_away(path: Path) -> None:
    found = [name for name in _FILES if (path / name).exists()]
    if found and not any((path / name).exists() for name in (CONFIG, RESULT, LOCK)):
        raise RunError(
            f"{path} holds {found[0]}, and none of {CONFIG}, {RESULT} and {LOCK}, so this may be "
            "no run, and --force (overwrite=True) would delete what is yours. Delete it yourself, "
            "or use another directory."
        )
    with held_run_directory(path):
        for name in _FILES:
            _remove(path / name)


def _remove(path: Path) -> None:
    """Removes a file or a directory, if it is there; of a link to a directory, what is inside."""
    if not path.is_dir():
        path.unlink(missing_ok=True)
    elif path.is_symlink():  # the user keeps these files elsewhere, such as on a larger disk
        for inside in path.iterdir():
            _remove(inside)
    else:
        shutil.rmtree(path)

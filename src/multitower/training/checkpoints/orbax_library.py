"""Orbax: imported on first use, with its logging off and its errors cut to one line."""

import errno
import functools
import logging
import os
import sys
from typing import Any

from multitower.errors import CheckpointError, install_command

_DISK_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EFBIG,
    errno.EROFS,
    errno.EACCES,
    errno.EIO,
    errno.ENOENT,
)


def load_orbax() -> Any:
    """Imports `orbax.checkpoint` and turns its logging off: what matters is raised as an error.

    Raises:
        CheckpointError: it is not installed.
    """
    try:
        import orbax.checkpoint as ocp  # noqa: PLC0415 (a second to import, and optional)
    except ImportError as error:
        raise CheckpointError(
            "checkpoints need Orbax, which is not installed. "
            f"Run: {install_command('orbax-checkpoint')}"
        ) from error
    _keep_quiet()
    return ocp


@functools.cache  # once
def _keep_quiet() -> None:
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(_is_of_others)
    # If one file of a checkpoint cannot be read or written, Orbax raises an error for it.
    # TensorStore then reports every other file to a closed event loop: hundreds of useless lines.
    before = sys.unraisablehook

    def hook(raised: "sys.UnraisableHookArgs") -> None:
        if not (raised.object is None and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a log line is neither Orbax's nor about TensorStore: other libraries' lines stay."""
    return "/orbax/" not in record.pathname and "tensorstore" not in record.getMessage()


def first_line(error: Exception) -> str:
    """The first line of an error, with an error of the disk in front, if the text has one.

    TensorStore's messages are long, and may name the error of the disk anywhere in them.
    """
    line = next(iter(str(error).splitlines()), "")
    causes = [os.strerror(code) for code in _DISK_ERRORS]
    cause = next((cause for cause in causes if cause in str(error)), "")
    shown = line[:200]
    return f"{cause}: {shown}" if cause and cause not in shown else shown

"""Orbax: imported late, kept quiet, and its errors cut down to a line."""

import errno
import functools
import logging
import os
import sys
from typing import Any

from multitower.errors import CheckpointError, install_command

_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES, errno.EIO, errno.ENOENT)


def load_orbax() -> Any:
    """Imports `orbax.checkpoint`, and has it log nothing: what matters of it is raised.

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
    # Where one file of a checkpoint cannot be read or written, Orbax raises that, and TensorStore
    # goes on to report every other one to a loop that is gone: hundreds of lines that say nothing.
    before = sys.unraisablehook

    def hook(raised: "sys.UnraisableHookArgs") -> None:
        if not (raised.object is None and str(raised.exc_value) == "Event loop is closed"):
            before(raised)

    sys.unraisablehook = hook


def _is_of_others(record: logging.LogRecord) -> bool:
    """Whether a line is neither Orbax's nor about TensorStore: lines of other libraries stay."""
    return "/orbax/" not in record.pathname and "tensorstore" not in record.getMessage()


def first_line(error: Exception) -> str:
    """The first line of an error, and the cause where a disk is one.

    TensorStore's messages are long, and may name what is wrong with the disk anywhere in them.
    """
    line = next(iter(str(error).splitlines()), "")
    causes = [os.strerror(code) for code in _DISK_ERRORS]
    cause = next((cause for cause in causes if cause in str(error)), "")
    shown = line[:200]
    return f"{cause}: {shown}" if cause and cause not in shown else shown

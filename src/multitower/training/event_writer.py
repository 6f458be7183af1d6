"""TensorBoard's event files, by tensorboardX, whose thread would lose errors of the disk."""

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multitower.errors import RunError

# tensorboardX lets a registered factory open files whose names begin with this prefix.
_PREFIX = "multitower"


class EventFile:
    """A file that keeps its first error, to be raised by `check`, not in a thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._descriptor = -1
        self._try(self._open)

    def check(self) -> None:
        """Raises the first error, if there was one.

        Raises:
            RunError: the file could not be written.
        """
        if self.error is not None:
            reason = self.error.strerror or self.error
            raise RunError(f"{self.path} cannot be written: {reason}.") from self.error

    def write(self, content: bytes) -> None:
        """Writes all of `content`."""
        self._try(self._write, content)

    def flush(self) -> None:
        """Waits until everything is on disk."""
        self._try(lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Closes the file, if it is open."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._try(os.close, descriptor)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: a failed write is not tried again when the file object is freed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0)  # of Windows
        self._descriptor = os.open(self.path, flags, 0o644)

    def _write(self, content: bytes) -> None:
        while content:  # a write may be partial
            content = content[os.write(self._descriptor, content) :]

    def _try(self, act: Callable[..., Any], *arguments: Any) -> None:
        if self.error is None:
            try:
                act(*arguments)
            except OSError as error:
                self.error = error


class _Files:
    """The factory from which tensorboardX gets its files."""

    def __init__(self) -> None:
        self.newest: EventFile | None = None

    def directory_check(self, path: str) -> None:
        """Nothing: `EventFile` creates the directory."""

    def open(self, path: str) -> EventFile:
        self.newest = EventFile(Path(path.partition(":")[2]))
        return self.newest


_FILES = _Files()


def open_writer(directory: Path, first_step: int | None) -> tuple[Any, EventFile]:
    """Opens an event file.

    Args:
        directory: the directory of the file.
        first_step: TensorBoard hides older points of this step and later ones, which a resumed run
            makes again; None to hide none.

    Returns:
        The writer, and its file.
    """
    from tensorboardX import SummaryWriter, record_writer  # noqa: PLC0415 (slow, and optional)

    # Its warning of each number that is not finite, with no name in it, would fill the terminal.
    logging.getLogger("tensorboardX.x2num").setLevel(logging.ERROR)
    record_writer.register_writer_factory(_PREFIX, _FILES)
    # Its names have only seconds. TensorBoard reads files by name, so the time comes first.
    suffix = f".{time.time_ns()}.{os.getpid()}"
    path = f"{_PREFIX}:{os.path.abspath(directory)}"
    writer = SummaryWriter(path, purge_step=first_step, filename_suffix=suffix)
    assert _FILES.newest is not None
    return writer, _FILES.newest

"""TensorBoard's event files, through tensorboardX, whose thread would lose what a disk says."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from multitower.errors import RunError

# tensorboardX lets others open files whose names begin so.
_PREFIX = "multitower"


class EventFile:
    """A file that keeps its first error, instead of raising it in a thread, and then at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.error: OSError | None = None
        self._descriptor = -1
        self._try(self._open)

    def check(self) -> None:
        """Raises what it has kept.

        Raises:
            RunError: it could not be written.
        """
        if self.error is not None:
            reason = self.error.strerror or self.error
            raise RunError(f"{self.path} cannot be written: {reason}.") from self.error

    def write(self, content: bytes) -> None:
        """Writes all of it."""
        self._try(self._write, content)

    def flush(self) -> None:
        """Waits until it is on disk."""
        self._try(lambda: os.fsync(self._descriptor))

    def close(self) -> None:
        """Closes it, once."""
        if self._descriptor >= 0:
            descriptor, self._descriptor = self._descriptor, -1
            self._try(os.close, descriptor)

    def _open(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Without a buffer: what could not be written is not tried again when the file is freed.
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC
        self._descriptor = os.open(self.path, flags, 0o644)

    def _write(self, content: bytes) -> None:
        while content:  # a disk may take a part of it
            content = content[os.write(self._descriptor, content) :]

    def _try(self, act: Callable[..., Any], *arguments: Any) -> None:
        if self.error is None:
            try:
                act(*arguments)
            except OSError as error:
                self.error = error


class _Files:
    """What tensorboardX asks for files."""

    def __init__(self) -> None:
        self.newest: EventFile | None = None

    def directory_check(self, path: str) -> None:
        """The file makes it."""

    def open(self, path: str) -> EventFile:
        self.newest = EventFile(Path(path.partition(":")[2]))
        return self.newest


_FILES = _Files()


def open_writer(directory: Path, first_step: int) -> tuple[Any, EventFile]:
    """Opens an event file.

    Args:
        directory: of the file.
        first_step: points of this step and later ones, which a run makes again, are hidden.

    Returns:
        The writer, and its file.
    """
    from tensorboardX import SummaryWriter, record_writer  # noqa: PLC0415 (slow, and optional)

    record_writer.register_writer_factory(_PREFIX, _FILES)
    writer = SummaryWriter(f"{_PREFIX}:{os.path.abspath(directory)}", purge_step=first_step)
    assert _FILES.newest is not None
    return writer, _FILES.newest

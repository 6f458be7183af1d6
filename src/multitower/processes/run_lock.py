"""Run locks: one run at a time in a directory, for two that write there spoil both.

The lock is `flock` on a file that stays: the system gives it back with its process, however that
ends. `gpu_claims` uses it, too.
"""

import contextlib
import errno
import fcntl
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path

from multitower.errors import RunError
from multitower.processes.together import by_first

_NAME = ".lock"
_UNWRITABLE = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS)

# Which thread of this process holds a directory.
_holders: dict[Path, int] = {}


def try_lock(descriptor: int) -> bool:
    """Locks an open file, until it is closed or this process ends, unless another has done so."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks keeps nobody out
    return True


@contextlib.contextmanager
def held_run_directory(path: Path, *, wait_s: float = 0, nested: bool = False) -> Generator[None]:
    """Keeps other runs out of a directory.

    A file system without locks keeps nobody out; nor does a directory that cannot be written, where
    two runs can do no harm.

    Args:
        path: the directory of the run.
        wait_s: how long to wait for another run to end, in seconds: a cluster may start a job again
            while processes of the last time still lie in their last throes.
        nested: whether it will do that this thread holds the directory already.

    Raises:
        RunError: another run trains there; or the lock cannot be made, as the disk is full.
    """
    key = path.absolute()
    if nested and _holders.get(key) == threading.get_ident():
        yield
        return
    try:
        descriptor = _open(path / _NAME)
    except OSError as error:
        if error.errno in _UNWRITABLE:
            yield
            return
        raise RunError(f"{path / _NAME} cannot be made: {error.strerror or error}.") from error
    try:
        _wait_for_lock(descriptor, path, time.monotonic() + wait_s)
        with contextlib.suppress(OSError):  # no room for a line, which is but for people
            (path / _NAME).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        _holders[key] = threading.get_ident()
        try:
            yield
        finally:
            _holders.pop(key, None)
    finally:
        os.close(descriptor)  # and so unlocked


@contextlib.contextmanager
def held_for_all(path: Path, *, wait_s: float = 0, nested: bool = False) -> Generator[None]:
    """As `held_run_directory`, by process 0 for all of them; all together."""
    with contextlib.ExitStack() as stack:
        held = held_run_directory(path, wait_s=wait_s, nested=nested)
        by_first(lambda: str(stack.enter_context(held)))
        yield


def _open(lock: Path) -> int:
    """Opens a lock for reading, so that the disk can be remounted; for writing if NFS wants it."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EBADF:
            os.close(descriptor)
            return os.open(lock, os.O_RDWR | os.O_CLOEXEC)
    return descriptor


def _wait_for_lock(descriptor: int, path: Path, deadline: float) -> None:
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise RunError(
                f"another run trains in {path}{f' ({holder})' if holder else ''}: wait until it "
                "has ended, or name another directory (run_dir=, on the command line --run-dir)."
            )
        time.sleep(0.2)

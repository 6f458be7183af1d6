"""Run locks: one run at a time in a directory, because two runs would damage each other's files.

The lock is `flock` on a file that is never deleted. The system releases it when the process ends,
however it ends. `gpu_claims` uses it, too. Windows has no `flock`, so nothing is locked there.
"""

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Generator
from pathlib import Path

from multitower.errors import RunError
from multitower.processes.together import by_first

try:
    import fcntl
except ImportError:
    fcntl = None

LOCK = ".lock"
_UNWRITABLE = (errno.EACCES, errno.ENOENT, errno.ENOTDIR, errno.EPERM, errno.EROFS)

# Which thread of this process holds a directory.
_holders: dict[Path, int] = {}


def try_lock(descriptor: int) -> bool:
    """Locks an open file until it is closed or this process ends; False if another one holds it."""
    if fcntl is None:
        return True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True  # a file system without locks
    return True


@contextlib.contextmanager
def held_run_directory(
    path: Path, *, wait_s: float = 0, nested: bool = False, lock: str = LOCK
) -> Generator[None]:
    """Keeps other runs out of a directory.

    Where files cannot be locked, and in a read-only directory, it does nothing.

    Args:
        path: the directory of the run.
        wait_s: how long to wait for another run to end, in seconds. A cluster may restart a job
            while the processes of its last attempt are still exiting.
        nested: whether to accept that this thread already holds the directory.
        lock: the name of the lock file. Work that may go on beside a run takes another name.

    Raises:
        RunError: another run trains there; or the lock file cannot be made.
    """
    key = path.absolute() / lock
    if nested and _holders.get(key) == threading.get_ident():
        yield
        return
    try:
        descriptor = _open(path / lock)
    except OSError as error:
        if error.errno in _UNWRITABLE:
            yield
            return
        raise RunError(f"{path / lock} cannot be made: {error.strerror or error}.") from error
    close_in_children(descriptor)
    try:
        _wait_for_lock(descriptor, path, time.monotonic() + wait_s)
        with contextlib.suppress(OSError):  # a full disk: the line is only information
            (path / lock).write_text(f"process {os.getpid()} on {socket.gethostname()}\n")
        _holders[key] = threading.get_ident()
        try:
            yield
        finally:
            _holders.pop(key, None)
    finally:
        _kept.discard(descriptor)
        os.close(descriptor)  # which unlocks it


_kept: set[int] = set()


def close_in_children(descriptor: int) -> None:
    """Closes a lock in processes that are forked from this one, as loaders of data are.

    One that outlives a killed run would keep the run's lock.
    """
    _kept.add(descriptor)


def _close_kept() -> None:
    while _kept:
        with contextlib.suppress(OSError):
            os.close(_kept.pop())


if hasattr(os, "register_at_fork"):  # not on Windows
    os.register_at_fork(after_in_child=_close_kept)


@contextlib.contextmanager
def held_for_all(path: Path, *, wait_s: float = 0, nested: bool = False) -> Generator[None]:
    """Like `held_run_directory`, locked by process 0 for all; call it on every process."""
    with contextlib.ExitStack() as stack:
        held = held_run_directory(path, wait_s=wait_s, nested=nested)
        by_first(lambda: str(stack.enter_context(held)))
        yield


def _open(lock: Path) -> int:
    """Opens a lock for reading, so that the disk can be remounted; for writing if NFS wants it."""
    descriptor = os.open(lock, os.O_RDONLY | os.O_CREAT, 0o644)
    if fcntl is None:
        return descriptor
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno == errno.EBADF:
            os.close(descriptor)
            return os.open(lock, os.O_RDWR)
    return descriptor


def _wait_for_lock(descriptor: int, path: Path, deadline: float) -> None:
    while not try_lock(descriptor):
        if time.monotonic() >= deadline:
            holder = os.read(descriptor, 200).decode(errors="replace").strip()
            raise RunError(
                f"another run trains in {path}{f' ({holder})' if holder else ''}. Wait until it "
                "ends, or use another directory (run_dir=, on the command line --run-dir)."
            )
        time.sleep(0.2)

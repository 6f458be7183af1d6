"""Leaving: how one of several processes ends after an error, so that no other process hangs.

A normal exit waits for the other processes, which wait for this one's part of a sum; JAX would then
report the waiting processes as missing. So a process that fails prints its error and exits at once.
JAX notices that within `HEARTBEAT_S` and ends the others, and the verdict names the failed one.
"""

import contextlib
import functools
import os
import socket
import sys
import time
import traceback
from types import TracebackType

import jax

from multitower.errors import Interrupted
from multitower.processes.together import is_first, lines_of_all
from multitower.processes.verdict import tell_hosts

# A process that sends no heartbeat for this long counts as missing: JAX then ends all the others.
HEARTBEAT_S = 30

# Gloo's messages where hosts cannot find each other, but not where a connection breaks later.
_NEVER_CONNECTED = ("Gloo context initialization failed", "gloo/transport/tcp/device.cc")
# Messages of collectives and of JAX's barriers when a connection breaks; their types differ.
_LOST = (
    "Gloo ",
    "NCCL operation",
    "Barrier failed",
    "CoordinationService/Barrier",
    "CoordinationService/GetKeyValue",
)


def leave_if_together(code: int, error: BaseException | None = None) -> None:
    """Ends this process at once if it is one of several; does nothing in a single process.

    Args:
        code: the exit code.
        error: the error to print, if it has not been printed yet.
    """
    if not jax.distributed.is_initialized():
        return
    if error is not None:
        if any(text in str(error) for text in _NEVER_CONNECTED):
            _say_how_this_host_is_reached()
        await_verdict_if_lost(error)
    with contextlib.suppress(OSError):  # a closed pipe must not keep this process alive
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()
    if is_first():
        # JAX ends the others when process 0 exits: let them print their own errors first.
        time.sleep(1)
    os._exit(code)


def leave_on_errors() -> None:
    """From now on, an uncaught exception ends this process as `leave_if_together` does."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, Interrupted):  # all processes stop at the same step: a normal exit
            before(kind, error, where)
        else:
            leave_if_together(1, error)

    sys.excepthook = hook


def await_verdict_if_lost(error: BaseException) -> None:
    """If an error means that another process is missing, waits until JAX ends this process (134).

    Anything that needs the other processes may fail first. The error of a checkpoint, for example,
    would make you look for a fault of the disk. Does nothing in a single process.

    Args:
        error: the exception that was raised.
    """
    lost = _lost_connection(error) if jax.distributed.is_initialized() else None
    if lost is None:
        return
    with contextlib.suppress(OSError):
        print(
            f"multitower: process {jax.process_index()} has lost the connection to another process "
            f"({str(lost).splitlines()[0]}). JAX names the missing process below, after it has "
            f"sent no heartbeat for {HEARTBEAT_S} s.",
            file=sys.stderr,
            flush=True,
        )
    time.sleep(HEARTBEAT_S + 15)


@functools.cache  # it is the same for as long as the processes live
def hosts_of_all() -> list[str]:
    """The host of every process; call it on every process. Verdicts name the hosts from now on."""
    hosts = lines_of_all(socket.gethostname())
    tell_hosts(jax.process_index(), hosts)
    return hosts


def _lost_connection(error: BaseException) -> BaseException | None:
    """The first error of a lost connection among this error and its causes."""
    found, looked_at = None, error
    while looked_at is not None:
        if any(text in str(looked_at) for text in _LOST):
            found = looked_at
        looked_at = looked_at.__cause__ or looked_at.__context__
    return found


def _say_how_this_host_is_reached() -> None:
    """Warns if other hosts cannot reach this one's CPU devices: Gloo resolves the host's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        print(
            f"multitower: the name of this host, {name}, resolves to {address}. CPU devices of "
            "several hosts connect by these names, so each name must resolve to the address at "
            "which the other hosts reach it. Add these addresses to /etc/hosts on each host.",
            file=sys.stderr,
            flush=True,
        )

"""Leaving: how a process of several ends when something is wrong, so that no other one hangs.

A regular end waits for the others, and they wait for this one's part of a sum: JAX would then call
those missing that only wait. So a process that fails says why and is gone; JAX misses it within
`HEARTBEAT_S` and ends the others, and the verdict names it.
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

# A process that has not been heard of for so long is missing: JAX then ends all the others.
HEARTBEAT_S = 30

# What Gloo says where hosts cannot find each other, and not where a connection breaks later on.
_NEVER_CONNECTED = ("Gloo context initialization failed", "gloo/transport/tcp/device.cc")
# What exchanges, and JAX's barriers, say where a connection breaks. The errors have several types.
_LOST = (
    "Gloo ",
    "NCCL operation",
    "Barrier failed",
    "CoordinationService/Barrier",
    "CoordinationService/GetKeyValue",
)


def leave_if_together(code: int, error: BaseException | None = None) -> None:
    """Ends a process of several at once; does nothing in a process that is alone.

    Args:
        code: what to exit with.
        error: what to show, if nothing has been said of it.
    """
    if not jax.distributed.is_initialized():
        return
    if error is not None:
        if any(text in str(error) for text in _NEVER_CONNECTED):
            _say_how_this_host_is_reached()
        await_verdict_if_lost(error)
    with contextlib.suppress(OSError):  # a reader that has gone must not keep this process here
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()
    if is_first():
        time.sleep(1)  # the others have the same to say, and are ended when process 0 is gone
    os._exit(code)


def leave_on_errors() -> None:
    """From now on, an exception that nobody catches ends this process as above."""
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, where: TracebackType | None) -> None:
        if isinstance(error, Interrupted):  # all processes have agreed to stop: a regular end
            before(kind, error, where)
        else:
            leave_if_together(1, error)

    sys.excepthook = hook


def await_verdict_if_lost(error: BaseException) -> None:
    """Waits until JAX ends this process with code 134, where an error is that another is missing.

    What fails first may be anything that needs the others, as a checkpoint does, whose own error
    would send its reader to the disk. Does nothing in a process that is alone.

    Args:
        error: what was raised.
    """
    lost = _lost_connection(error) if jax.distributed.is_initialized() else None
    if lost is None:
        return
    with contextlib.suppress(OSError):
        print(
            f"multitower: process {jax.process_index()} has lost the connection to another process "
            f"({str(lost).splitlines()[0]}). Which one is missing is said below, when JAX has not "
            f"heard of it for {HEARTBEAT_S} s.",
            file=sys.stderr,
            flush=True,
        )
    time.sleep(HEARTBEAT_S + 15)


@functools.cache  # it is the same for as long as the processes live
def hosts_of_all() -> list[str]:
    """The host of every process; all together. From now on a verdict names them."""
    hosts = lines_of_all(socket.gethostname())
    tell_hosts(jax.process_index(), hosts)
    return hosts


def _lost_connection(error: BaseException) -> BaseException | None:
    """The error of a lost connection that led to this one, or is this one; the first of them."""
    found, looked_at = None, error
    while looked_at is not None:
        if any(text in str(looked_at) for text in _LOST):
            found = looked_at
        looked_at = looked_at.__cause__ or looked_at.__context__
    return found


def _say_how_this_host_is_reached() -> None:
    """Says so where others cannot reach this host's CPU devices: Gloo goes by the host's name."""
    name = socket.gethostname()
    try:
        address = socket.gethostbyname(name)
    except OSError:
        address = "nothing"
    if address == "nothing" or address.startswith("127."):
        print(
            f"multitower: the name of this host, {name}, means {address} here. For CPU devices of "
            "several hosts it must mean the address that the others reach it at: put that into "
            "/etc/hosts on each of them.",
            file=sys.stderr,
            flush=True,
        )

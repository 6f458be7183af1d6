"""Flags of one process among several, and how such a process starts and leaves."""

import contextlib
import os
import socket
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Annotated, Any

import jax
import tyro

from multitower.cli.console import show_error
from multitower.cli.flags import flag, switch
from multitower.joining import HEARTBEAT_S
from multitower.processes import is_first, lines_of_all


@dataclass(frozen=True)
class Together:
    """Several processes, usually one a machine, that make one run."""

    distributed: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("This is one process of a cluster's job: join the others, which JAX finds."),
    ] = False
    coordinator: Annotated[
        str | None,
        flag("HOST:PORT", "The same where JAX detects no cluster: where process 0 is.", "detected"),
    ] = None
    num_processes: Annotated[
        int | None, flag("N", "With --coordinator: how many processes there are.", "detected")
    ] = None
    process_id: Annotated[
        int | None, flag("I", "With --coordinator: which one this is, from 0.", "detected")
    ] = None
    simulate_processes: Annotated[
        int | None,
        flag("N", "Start N processes on this machine, with --simulate M devices each.", "none"),
    ] = None

    def settings(self) -> dict[str, Any]:
        """What `multitower.configure` is to be told."""
        given = {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }
        if self.distributed or any(value is not None for value in given.values()):
            return {"distributed": True, **given}
        return {}


ALONE = Together()
TOGETHER = tyro.conf.OmitArgPrefixes


def keep_stdout_clean() -> None:
    """Sends what libraries write to standard output themselves to standard error.

    Gloo, which connects CPU devices of several processes, reports its connections there. Only
    Python's own output is left, for a progress bar or for programs that read it.
    """
    try:
        own = os.dup(sys.stdout.fileno())
    except (OSError, ValueError, AttributeError):
        return  # captured, as in a test: it is no file
    sys.stdout.flush()
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout = os.fdopen(own, "w", buffering=1, encoding=sys.stdout.encoding)


def hosts_in_words() -> str:
    """Which processes are on which hosts, so that a number in a message says where to look."""
    hosts = lines_of_all(socket.gethostname())
    at: dict[str, list[str]] = {}
    for process, host in enumerate(hosts):
        at.setdefault(host, []).append(str(process))
    where = "; ".join(f"{', '.join(numbers)} on {host}" for host, numbers in at.items())
    return f"{len(hosts)} processes ({where})"


def leave_if_together(code: int, error: BaseException | None = None) -> None:
    """Ends a process of several at once, if it failed; does nothing in a process that is alone.

    A regular end waits for the others, and they wait for this one's part of a sum. They end when
    JAX misses this process, within `multitower.joining.HEARTBEAT_S`.

    Args:
        code: what to exit with.
        error: what to show, if nothing has been said of it.
    """
    if not jax.distributed.is_initialized():
        return
    if error is not None and _is_of_a_lost_connection(error):
        _await_verdict(error)
    with contextlib.suppress(OSError):  # a reader that has gone must not keep this process here
        if error is not None:
            traceback.print_exception(error)
        sys.stderr.flush()
        sys.stdout.flush()
    if is_first():
        time.sleep(1)  # the others have the same to say, and are ended when process 0 is gone
    os._exit(code)


def _is_of_a_lost_connection(error: BaseException) -> bool:
    return isinstance(error, jax.errors.JaxRuntimeError) and any(
        name in str(error) for name in ("Gloo", "NCCL", "oordination")
    )


def _await_verdict(error: BaseException) -> None:
    """Waits until JAX says which process is missing; it then ends this one with code 134."""
    show_error(
        f"process {jax.process_index()} has lost the connection to another one "
        f"({str(error).splitlines()[0]}). Within {HEARTBEAT_S} s JAX says below which tasks are "
        "unhealthy: that is where to look. The last checkpoint is intact; resume from it."
    )
    time.sleep(HEARTBEAT_S + 15)

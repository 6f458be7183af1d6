"""Flags of one process among several, and how such a process starts."""

import os
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import tyro

from multitower.cli.flags.shared import WholeNumber, flag, switch
from multitower.processes.leaving import hosts_of_all


@dataclass(frozen=True)
class Together:
    """Several processes, usually one a machine, that make one run."""

    distributed: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("This process is one of a cluster job: join the others, which JAX detects."),
    ] = False
    coordinator: Annotated[
        str | None,
        flag("HOST:PORT", "The address of process 0, if JAX detects no cluster.", "detected"),
    ] = None
    num_processes: Annotated[
        WholeNumber, flag("N", "With --coordinator: the number of processes.", "detected")
    ] = None
    process_id: Annotated[
        WholeNumber,
        flag("I", "With --coordinator: the number of this process, from 0.", "detected"),
    ] = None
    simulate_processes: Annotated[
        WholeNumber,
        flag("N", "Start N processes on this machine, with --simulate M devices each.", "none"),
    ] = None

    def settings(self) -> dict[str, Any]:
        """The arguments for `multitower.configure`."""
        given = {
            "coordinator": self.coordinator,
            "num_processes": self.num_processes,
            "process_id": self.process_id,
        }
        if self.distributed or any(value is not None for value in given.values()):
            return {"distributed": True, **given}
        return {}


ALONE = Together()
TOGETHER = tyro.conf.arg(name="multi-process")  # the heading in --help


def keep_stdout_clean() -> None:
    """Redirects what libraries write directly to standard output to standard error.

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
    """Which processes are on which hosts, in words, to find the host of a process in a message."""
    hosts = hosts_of_all()
    at: dict[str, list[str]] = {}
    for process, host in enumerate(hosts):
        at.setdefault(host, []).append(str(process))
    where = "; ".join(f"{', '.join(numbers)} on {host}" for host, numbers in at.items())
    return f"{len(hosts)} processes ({where})"

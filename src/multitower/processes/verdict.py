"""Verdict: the last line of a process that JAX has ended names the missing process and its host.

When one of several processes is missing, JAX ends the others from C++. It names the missing one
within a page of text, and no Python code runs after that. So a small child process relays standard
error of its parent, adds the process number to each line, and adds the verdict at the end. The
child runs this file alone, without multitower and JAX, so that it starts within milliseconds.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress

_ENDED_BY_JAX = "JAX distributed service detected fatal errors"
_WHILE_JOINING = "CoordinationService/RegisterTask"
_UNHEALTHY = re.compile(r"(?:tasks are unhealthy|timed out task names:)[^\n]*\n((?:\d+\n)+)")
# Lines that are dropped: C++ stack frames, and Gloo's report of every connection.
_NOISE = re.compile(rb"\s+@ +(0x)?[0-9a-f]{6,}|\*\*\* Check failure stack trace|\[Gloo\] Rank ")
_LINE_S = 0.1  # an unfinished line, such as a progress bar, is relayed after this time

_children: list[subprocess.Popen[bytes]] = []


def start_verdict(process: int | None) -> None:
    """Starts the child process that relays standard error.

    Args:
        process: the number of this process, if it is known.
    """
    if _children or sys.stderr is None:
        return
    source, own = os.pipe()
    known = [] if process is None else [str(process)]
    _children.append(
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(source), *known],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[source],
        )
    )
    sys.stderr.flush()
    os.dup2(own, 2)
    os.close(own)
    os.close(source)


def tell_hosts(process: int, hosts: Sequence[str]) -> None:
    """Tells the child the number of this process and the hosts of all processes."""
    for child in _children:
        if child.stdin is not None:
            told = json.dumps({"process": process, "hosts": list(hosts)}) + "\n"
            child.stdin.write(told.encode())
            child.stdin.flush()  # it stays open: its end tells the child that this process ended


def verdict(text: str, process: int | None = None, hosts: Sequence[str] = ()) -> str:
    r"""The last line to print; empty unless JAX has ended the process.

    Args:
        text: what the process wrote, at least from JAX's fatal line on.
        process: its number, if known.
        hosts: the hosts of all processes, if known.

    Example:
        >>> from multitower.processes.verdict import verdict
        >>> said = "JAX distributed service detected fatal errors: tasks are unhealthy:\n1\n"
        >>> verdict(said, 0, ["anna", "bert"]).split(". ")[0]
        'multitower: missing: process 1 on bert'
    """
    if _ENDED_BY_JAX not in text:
        return ""
    fatal = text[text.index(_ENDED_BY_JAX) :]
    if _WHILE_JOINING in fatal:
        return _not_joined("ALREADY_EXISTS" in fatal)
    found = _UNHEALTHY.search(fatal)
    # If process 0 does not answer, which keeps the list, JAX names no number.
    missing = [int(number) for number in found.group(1).split()] if found else [0]
    others = [_named(number, hosts) for number in missing if number != process]
    this = "this process" if process is None else _named(process, hosts)
    return (
        f"multitower: missing: {', '.join(others) or 'another process'}. It was killed or stopped, "
        "ran out of memory, lost its network, or failed with an error: look at its last lines and "
        f"at its host. JAX therefore ended {this}, too. The last complete checkpoint is intact: "
        "--resume auto continues from it on the command line.\n"
    )


def _not_joined(is_number_taken: bool) -> str:
    if is_number_taken:
        return (
            "multitower: two processes have the same number. Give each process its own "
            "(--process-id, or what the cluster sets).\n"
        )
    return (
        "multitower: not all processes connected in time. Start as many as --num-processes, and "
        "look at the last lines of those that did not connect: they must be able to reach process "
        "0.\n"
    )


def _named(process: int, hosts: Sequence[str]) -> str:
    return f"process {process}{f' on {hosts[process]}' if process < len(hosts) else ''}"


class _Relay:
    """Relays the parent's lines, and keeps what a verdict needs."""

    def __init__(self, process: int | None) -> None:
        self.unfinished = b""
        self._process = process
        self._hosts: list[str] = []
        self._is_line_begun = False
        self._is_noise_begun = False
        self._fatal = b""
        self._told = b""

    def know(self, told: bytes) -> None:
        """Takes what the parent sends with `tell_hosts`, piece by piece."""
        self._told += told
        if self._told.endswith(b"\n"):
            known = json.loads(self._told)
            self._process, self._hosts, self._told = known["process"], known["hosts"], b""

    def take(self, data: bytes) -> None:
        """Relays the lines that are complete."""
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        for line in lines:
            self._pass_on(line + b"\n")

    def flush(self) -> None:
        """Relays an unfinished line."""
        line, self.unfinished = self.unfinished, b""
        if line:
            self._pass_on(line)

    def end(self) -> None:
        """Adds the verdict."""
        self.flush()
        text = verdict(self._fatal.decode(errors="replace"), self._process, self._hosts)
        if text:
            self._pass_on(text.encode())

    def _pass_on(self, line: bytes) -> None:
        if self._fatal or _ENDED_BY_JAX.encode() in line:
            self._fatal += line
        # The rest of a line that was flushed unfinished shares its fate.
        if self._is_noise_begun or _NOISE.match(line):
            self._is_noise_begun = not line.endswith(b"\n")
            return
        numbered = self._process is not None and not self._is_line_begun
        with suppress(OSError):  # a full disk, or nobody who reads: the process goes on
            os.write(2, (f"[process {self._process}] ".encode() if numbered else b"") + line)
        self._is_line_begun = not line.endswith(b"\n")


def _relay(source: int, process: int | None) -> None:
    """Relays until the pipe is closed, or the parent has ended and its children are silent."""
    relay, parent_lives = _Relay(process), True
    waiting = selectors.DefaultSelector()
    for one in (0, source):
        waiting.register(one, selectors.EVENT_READ)
    while True:
        timeout = _LINE_S if relay.unfinished or not parent_lives else None
        ready = {key.fd for key, _ in waiting.select(timeout)}
        if 0 in ready:
            told = os.read(0, 2**16)
            if told:
                relay.know(told)
            else:
                parent_lives = False
                waiting.unregister(0)
        if source in ready:
            more = os.read(source, 2**16)
            if not more:
                break
            relay.take(more)
        if not ready:
            relay.flush()
            if not parent_lives:
                break
    relay.end()


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # they are for the parent; this process ends with it
    _relay(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)

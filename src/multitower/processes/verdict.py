"""Verdict: the last line of a process that JAX has ended says which process is missing, and where.

When one of several processes is missing, JAX ends the others from C++: its number stands in a page
of other words, and nothing in Python runs after that. So a small child process passes on what its
parent writes to standard error, with the number of the process, and adds the line. The child runs
this file alone, without multitower and JAX: it is there within milliseconds.
"""

import json
import os
import re
import selectors
import signal
import subprocess
import sys
from collections.abc import Sequence

_ENDED_BY_JAX = "JAX distributed service detected fatal errors"
_WHILE_JOINING = "CoordinationService/RegisterTask"
_UNHEALTHY = re.compile(r"(?:tasks are unhealthy|timed out task names:)[^\n]*\n((?:\d+\n)+)")
# What is not passed on: frames of C++, and Gloo's report of every connection of CPU devices.
_NOISE = re.compile(rb"\s+@ +(0x)?[0-9a-f]{6,}|\*\*\* Check failure stack trace|\[Gloo\] Rank ")
_LINE_S = 0.1  # a line without an end, such as a progress bar, is passed on after so long

_children: list[subprocess.Popen[bytes]] = []


def start_verdict(process: int | None) -> None:
    """Has a child process pass on standard error.

    Args:
        process: the number of this one, if it is known.
    """
    if _children or sys.stderr is None:
        return
    source, own = os.pipe()
    _children.append(
        subprocess.Popen(
            [sys.executable, "-I", "-S", __file__, str(source), *_known(process)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[source],
        )
    )
    sys.stderr.flush()
    os.dup2(own, 2)
    os.close(own)
    os.close(source)


def _known(process: int | None) -> list[str]:
    return [] if process is None else [str(process)]


def tell_hosts(process: int, hosts: Sequence[str]) -> None:
    """Says which process this is, and on which host each one is, once this is known."""
    for child in _children:
        if child.stdin is not None:
            told = json.dumps({"process": process, "hosts": list(hosts)}) + "\n"
            child.stdin.write(told.encode())
            child.stdin.flush()  # and it stays open: its end says that this process is gone


def verdict(text: str, process: int | None = None, hosts: Sequence[str] = ()) -> str:
    r"""The line to end with; empty, unless JAX has ended the process.

    Args:
        text: what the process wrote, at least from JAX's fatal line on.
        process: its number, where it is known.
        hosts: of all processes, where they are known.

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
    # JAX names no number when it is process 0, which keeps the list, that does not answer.
    missing = [int(number) for number in found.group(1).split()] if found else [0]
    others = [_named(number, hosts) for number in missing if number != process]
    this = "this process" if process is None else _named(process, hosts)
    return (
        f"multitower: missing: {', '.join(others) or 'another process'}. Killed, stopped, out of "
        "memory, cut off from the network, or ended by an error of its own: look at what it wrote "
        f"last, and at its host. So {this} was ended too. The last complete checkpoint is intact; "
        "on the command line --resume auto goes on from it.\n"
    )


def _not_joined(is_number_taken: bool) -> str:
    if is_number_taken:
        return (
            "multitower: another process has joined under the same number: give each one its own "
            "(--process-id, or what the cluster sets).\n"
        )
    return (
        "multitower: not all processes came in time. Start as many as --num-processes says, and "
        "look at the last lines of those that did not come: can they reach process 0?\n"
    )


def _named(process: int, hosts: Sequence[str]) -> str:
    return f"process {process}{f' on {hosts[process]}' if process < len(hosts) else ''}"


class _Relay:
    """Passes on what the parent writes, line by line, and keeps what a verdict needs."""

    def __init__(self, process: int | None) -> None:
        self.unfinished = b""
        self._process = process
        self._hosts: list[str] = []
        self._is_line_begun = False
        self._fatal = b""
        self._told = b""

    def know(self, told: bytes) -> None:
        """Takes what the parent says of itself and of the hosts, piece by piece."""
        self._told += told
        if self._told.endswith(b"\n"):
            known = json.loads(self._told)
            self._process, self._hosts, self._told = known["process"], known["hosts"], b""

    def take(self, data: bytes) -> None:
        """Passes on what are whole lines by now."""
        *lines, self.unfinished = (self.unfinished + data).split(b"\n")
        for line in lines:
            self._pass_on(line + b"\n")

    def flush(self) -> None:
        """Passes on the beginning of a line."""
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
        if _NOISE.match(line):
            return
        numbered = self._process is not None and not self._is_line_begun
        os.write(2, (f"[process {self._process}] ".encode() if numbered else b"") + line)
        self._is_line_begun = not line.endswith(b"\n")


def _relay(source: int, process: int | None) -> None:
    """Until nobody can write any more, or the parent is gone and its children are silent."""
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
        signal.signal(number, signal.SIG_IGN)  # the parent's; this process ends when it does
    _relay(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else None)

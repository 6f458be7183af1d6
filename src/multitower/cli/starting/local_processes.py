"""`--simulate-processes N`: the same command as N processes of this machine, for trying things out.

They communicate over the loopback interface. The output of process 0 is passed on; of the others
only what they write to stderr.
"""

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import IO

from multitower.cli.console import show_error
from multitower.errors import RunError

_FLAG = "--simulate-processes"
_POLL_S = 0.1
# Seconds that other processes get when one has ended with such a code: they report the same error,
# or finish their step. After any other end they only wait for it, and report follow-up errors.
_GRACE_S = {2: 2.0, 128 + signal.SIGINT: 30.0, 128 + signal.SIGTERM: 30.0}


def split_off_processes(words: Sequence[str]) -> tuple[int | None, list[str]]:
    """Takes `--simulate-processes N` out of the words of a command.

    Returns:
        N, or None if it is not given; and the words for each of the N processes, without its
        number.

    Raises:
        RunError: N is not a whole number above 0.
    """
    rest = list(words)
    at = next((i for i, word in enumerate(rest) if _flag(word) == _FLAG), None)
    if at is None or "--help" in rest:
        return None, rest
    word = rest.pop(at)
    value = word.partition("=")[2] if "=" in word else (rest.pop(at) if at < len(rest) else "")
    if not value.isdecimal() or int(value) < 1:
        raise RunError(f"{_FLAG} {value}: say how many processes, such as {_FLAG} 2.")
    if "--simulate" not in map(_flag, rest):
        rest += ["--simulate", "1"]
    return int(value), rest


def _flag(word: str) -> str:
    """The flag that a word begins with, which may be typed with _ for -; else the word."""
    return word.partition("=")[0].replace("_", "-") if word.startswith("--") else word


def run_local_processes(
    count: int,
    words: Sequence[str],
    *,
    stdout: IO[str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> int:
    """Runs a command as several processes and waits for all of them.

    Args:
        count: the number of processes.
        words: the words of the command after `multitower`.
        stdout: the file that process 0 writes to; None for this process's standard output.
        environment: environment variables for them, added to those of this process.

    Returns:
        0, or the exit code of the first process that fails (128 + n if signal n ended it); the
        others are then ended, too.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{probe.getsockname()[1]}"
    command = [sys.executable, "-m", "multitower", *words, "--coordinator", where]
    command += ["--num-processes", str(count), "--process-id"]
    running: list[subprocess.Popen[str]] = []
    readers: list[threading.Thread] = []
    try:
        with _passed_on_signals(running) as pass_on_missed:
            for number in range(count):
                process = subprocess.Popen(
                    [*command, str(number)],
                    stdin=None if number == 0 else subprocess.DEVNULL,
                    stdout=stdout if number == 0 else subprocess.DEVNULL,
                    stderr=subprocess.PIPE,
                    env={**os.environ, **(environment or {})},
                    text=True,
                    errors="replace",
                )
                running.append(process)
                reader = threading.Thread(target=_pass_on, args=(process.stderr,), daemon=True)
                reader.start()
                readers.append(reader)
            pass_on_missed()
            failed = _wait(running)
    finally:
        for process in running:
            process.kill()
            process.wait()
        for reader in readers:
            reader.join(timeout=5)
    if failed is None:
        return 0
    code = running[failed].returncode
    if code < 0:
        name = signal.Signals(-code).name
        show_error(f"process {failed} of {count} was ended by {name}, and the others with it.")
    return code if code >= 0 else 128 - code


def _wait(running: Sequence[subprocess.Popen[str]]) -> int | None:
    """Waits for all, or for the first that fails and its grace time; returns its number."""
    while True:
        codes = [process.poll() for process in running]
        failed = next((number for number, code in enumerate(codes) if code), None)
        if failed is not None:
            break
        if all(code == 0 for code in codes):
            return None
        time.sleep(_POLL_S)
    deadline = time.monotonic() + _GRACE_S.get(codes[failed] or 0, 0)
    while time.monotonic() < deadline and any(process.poll() is None for process in running):
        time.sleep(_POLL_S)
    return failed


def _pass_on(stream: IO[str] | None) -> None:
    assert stream is not None
    with stream:
        for line in stream:
            with contextlib.suppress(OSError):  # nobody reads it: the process must not wait for it
                sys.stderr.write(line)
                sys.stderr.flush()


@contextlib.contextmanager
def _passed_on_signals(
    running: Sequence[subprocess.Popen[str]],
) -> Generator[Callable[[], None]]:
    """Passes signals on to all processes, except Ctrl-C, which the terminal sends to them.

    Yields a function to call once all are started: those who came too late for a signal get it.
    """
    missed: list[tuple[int, int]] = []  # the signal, and the first process that came too late

    def pass_on_missed() -> None:
        for number, first in missed:
            for process in running[first:]:
                process.send_signal(number)

    def pass_on(number: int, _: object) -> None:
        missed.append((number, len(running)))
        for process in running:
            if not (number == signal.SIGINT and _in_foreground()) and process.poll() is None:
                process.send_signal(number)

    if threading.current_thread() is not threading.main_thread():
        yield pass_on_missed  # only the main thread may handle signals
        return
    # What is ignored here is ignored by those that were started, too.
    wanted = [n for n in (signal.SIGTERM, signal.SIGINT) if signal.getsignal(n) != signal.SIG_IGN]
    before = {n: signal.signal(n, pass_on) for n in wanted}
    try:
        yield pass_on_missed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _in_foreground() -> bool:
    """Whether a terminal sends Ctrl-C to this process and to those that it has started."""
    try:
        with Path("/dev/tty").open("rb", buffering=0) as terminal:  # wherever stdin comes from
            return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    except OSError:  # there is no terminal
        return False

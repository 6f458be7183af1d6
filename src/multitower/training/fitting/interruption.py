"""Interruption: SIGTERM and SIGINT end a run after its step, not in the middle of it."""

import os
import signal
import threading
from collections.abc import Generator
from contextlib import contextmanager
from types import FrameType

# The signals that each run of this process has caught; a test phase may train a model of its own.
_noted: list[list[int]] = []


def is_stopping() -> bool:
    """Whether a run of this process has been asked to stop, and is finishing its step."""
    return any(_noted)


@contextmanager
def noted_signals() -> Generator[list[int]]:
    """Yields a list that gets the first SIGTERM or SIGINT; a second one acts as it did before.

    A signal that is ignored, as SIGINT is in a background job of a shell script, stays so.
    """
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # only the main thread may handle signals
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # None: a handler of a program in C around Python, which could not be put back.
    others = None, signal.SIG_IGN
    before = {number: handler for number, handler in found.items() if handler not in others}
    own = os.getpid()

    def note(number: int, _: FrameType | None) -> None:
        for one in _noted:  # the run around this one stops, too
            one.append(number)
        restore()
        if os.getpid() != own:  # a worker that a loader forked: the signal is for the worker
            os.kill(os.getpid(), number)

    def restore() -> None:
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, note)
    _noted.append(caught)
    try:
        yield caught
    finally:
        _noted[:] = [one for one in _noted if one is not caught]
        restore()

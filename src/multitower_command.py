"""The command `multitower`. Outside of the package, so that Ctrl-C is heard while that is imported.

Python's own answer to Ctrl-C is an exception wherever the program is. It ends an import of JAX in a
page of lines or in a hang, and a compilation in a crash of threads that go on. So the process is
ended at once, with one line: what is on disk is whole at any moment. While a run trains, `Trainer`
takes the first Ctrl-C or SIGTERM: it finishes the step and saves.
"""

import os
import signal
import sys
from types import FrameType


def main() -> None:
    """Runs the command line as a program, and ends it."""
    hear_signals()
    from multitower.cli.main import main as run  # noqa: PLC0415 (from here on it is heard)

    try:
        code = run()
    except BrokenPipeError:  # nobody reads what a command prints, as after `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # Python flushes it once more at exit
        code = 128 + signal.SIGPIPE
    sys.exit(code)


def hear_signals() -> None:
    """From now on, Ctrl-C and SIGTERM end this process with one line, where nothing else does."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, stop)
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        signal.signal(signal.SIGTERM, stop)


def stop(number: int, _: FrameType | None = None) -> None:
    """Ends this process with one line and code 130 or 143, wherever it is."""
    # A moving line has hidden the cursor, and stands where this one goes.
    shown = "\r\x1b[K\x1b[?25h" if os.isatty(2) else ""
    by = "" if number == signal.SIGINT else f" by {signal.Signals(number).name}"
    os.write(2, f"{shown}multitower: stopped{by}\n".encode())
    os._exit(128 + number)

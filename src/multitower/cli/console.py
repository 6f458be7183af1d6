"""Output of the command line: an animated line on a terminal, plain lines elsewhere."""

import contextlib
import sys
import warnings
from collections.abc import Callable, Generator, Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from multitower.cli.wording import in_flags
from multitower.errors import MultitowerWarning
from multitower.training.console import (
    REFRESH_PER_S,
    console_on,
    is_alive,
    live_line,
    plain_lines,
)
from multitower.training.display import WorkLine
from multitower.training.progress import Progress

# With several processes, only process 0 prints what is the same in all.
_quiet: list[bool] = []


def _output(*, stderr: bool = False) -> Console:
    return console_on(sys.stderr if stderr else sys.stdout)


def _print(text: Text, *, stderr: bool = False) -> None:
    _output(stderr=stderr).print(text, end=text.end, soft_wrap=True)


def be_quiet() -> None:
    """Silences `say` and `show_progress` from now on; errors and warnings are still shown."""
    _quiet.append(True)


def say(line: str) -> None:
    """Prints one line of any length, without wrapping."""
    if not _quiet:
        _print(Text(line))


def say_parts(parts: Sequence[str]) -> None:
    """Prints parts on one line; on a narrow terminal, it breaks lines between parts."""
    console, lines = _output(), list(parts[:1])
    for part in parts[1:]:
        line = f"{lines[-1]}  {part}"
        if console.is_terminal and len(line) > console.width:
            lines.append(part)
        else:
            lines[-1] = line
    for line in lines:
        say(line)


def show_error(message: str) -> None:
    """Prints an error as one red line on stderr."""
    _print(Text(f"multitower: {message}", style="red"), stderr=True)


def make_show_warning() -> Callable[..., None]:
    """Makes a stand-in for `warnings.showwarning`.

    Returns:
        A function that prints warnings of multitower as one yellow line on stderr, each once, even
        if several parts of a run give it; and other warnings in Python's form.
    """
    shown: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
    ) -> None:
        is_ours = issubclass(category, MultitowerWarning)
        text = f"multitower: {in_flags(str(message))}\n"
        if not is_ours:
            text = warnings.formatwarning(message, category, filename, lineno)
        if text not in shown:
            shown.add(text)
            _print(Text(text, style="yellow" if is_ours else "", end=""), stderr=True)

    return show


@contextlib.contextmanager
def show_progress(num_steps: int) -> Generator[Callable[[Progress], None]]:
    """Shows the progress of a run.

    Args:
        num_steps: updates that the run makes; 0 if it is not known before the first one.

    Yields:
        A function to call after every step.
    """
    console = _output()
    if _quiet:
        yield lambda _: None
        return
    if not is_alive(console):
        yield plain_lines(say)
        return
    with live_line(num_steps, console) as display:
        yield display.show


@contextlib.contextmanager
def show_work(doing: str) -> Generator[Callable[[str], None]]:
    """Shows the current work of a command on a terminal, on stderr; removes the line at the end.

    Args:
        doing: the work, in words.

    Yields:
        A function to change these words.
    """
    console = _output(stderr=True)
    if _quiet or not is_alive(console):
        yield lambda _: None
        return
    line = WorkLine(doing)
    with Live(line, console=console, refresh_per_second=REFRESH_PER_S, transient=True):
        yield lambda words: setattr(line, "doing", words)

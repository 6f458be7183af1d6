"""What the command line shows: a progress bar on a terminal, plain lines elsewhere."""

import contextlib
import warnings
from collections.abc import Callable, Generator
from typing import Any

from rich.console import Console
from rich.text import Text

from multitower.errors import MultitowerWarning
from multitower.training.console import live_line, plain_lines
from multitower.training.progress import Progress

# Of several processes only the first one says what is the same in all.
_quiet: list[bool] = []


def be_quiet() -> None:
    """Has `say` and `show_progress` show nothing from now on; errors and warnings are shown."""
    _quiet.append(True)


def say(line: str) -> None:
    """Prints one line, however long, as it is."""
    if not _quiet:
        Console().print(Text(line), soft_wrap=True)


def show_error(message: str) -> None:
    """Prints an error as one red line on stderr."""
    line = Text(f"multitower: {message}", style="red")
    Console(stderr=True).print(line, soft_wrap=True)


def make_show_warning() -> Callable[..., None]:
    """Makes a stand-in for `warnings.showwarning`.

    Returns:
        A function that prints our own warnings as one yellow line on stderr, each one once,
        although every part of a run that places towers may give the same one; and those of
        others in Python's own form.
    """
    shown: set[str] = set()

    def show(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, *_: Any
    ) -> None:
        is_ours = issubclass(category, MultitowerWarning)
        text = f"multitower: {message}\n"
        if not is_ours:
            text = warnings.formatwarning(message, category, filename, lineno)
        if text not in shown:
            shown.add(text)
            line = Text(text, style="yellow" if is_ours else "")
            Console(stderr=True).print(line, end="", soft_wrap=True)

    return show


@contextlib.contextmanager
def show_progress(num_steps: int) -> Generator[Callable[[Progress], None]]:
    """Shows the progress of a run.

    Args:
        num_steps: updates that the run makes.

    Yields:
        What is to be called after every step.
    """
    console = Console()
    if _quiet:
        yield lambda _: None
    elif not console.is_terminal:
        yield plain_lines(say)
    else:
        with live_line(num_steps, console) as display:
            yield display.show

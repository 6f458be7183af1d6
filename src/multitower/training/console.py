"""Shows a run while it trains: a live line on a terminal, plain lines elsewhere."""

import contextlib
import sys
import time
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, NamedTuple

from multitower.training.display import RunLine, line_in_words
from multitower.training.progress import Hook, Progress
from multitower.training.scoring.chunks import num_rows_of_all

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY = 100
REFRESH_PER_S = 5  # drawing takes time from CPU devices


class Display(NamedTuple):
    """Functions that show a run.

    Attributes:
        show: a hook, called after every step.
        say: shows one line of text.
    """

    show: Hook
    say: Callable[[str], None]


@contextlib.contextmanager
def shown_on_stderr(num_steps: int) -> Generator[Display]:
    """Shows the progress of a run on stderr.

    Args:
        num_steps: updates that the run makes in all.

    Yields:
        The `Display`: a live line on a terminal, if `rich` is installed, else plain lines.
    """
    console = _terminal()
    if console is None:
        yield Display(plain_lines(_print_on_stderr), _print_on_stderr)
        return
    with live_line(num_steps, console) as display:
        yield display


def _print_on_stderr(line: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it, or the disk is full: no reason to stop
        print(line, file=sys.stderr, flush=True)


def _terminal() -> "Console | None":
    if not sys.stderr.isatty():
        return None
    try:
        from rich.console import Console  # noqa: PLC0415 (slow, and optional)
    except ImportError:
        return None
    console = Console(stderr=True)
    return console if console.is_terminal and not console.is_dumb_terminal else None


@contextlib.contextmanager
def live_line(num_steps: int, console: "Console") -> Generator[Display]:
    """Draws a progress bar for the run, and test phases as lines above it.

    Args:
        num_steps: updates that the run makes in all.
        console: the console of a terminal.

    Yields:
        The `Display`.
    """
    from rich.live import Live  # noqa: PLC0415 (slow, and optional)
    from rich.text import Text  # noqa: PLC0415 (likewise)

    line = RunLine(num_steps)
    say = lambda words: console.print(Text(words), soft_wrap=True)

    def show(now: Progress) -> None:
        if now.phase == "test":
            console.print(Text(line_in_words(now)))  # above the bar, not wrapped
        else:
            line.show(now)

    with Live(
        line,
        console=console,
        redirect_stdout=sys.stdout.isatty(),  # output to a file is not drawn above the bar
        refresh_per_second=REFRESH_PER_S,
    ) as live:
        try:
            yield Display(show, say)
        finally:
            live.transient = not line.end()


@contextlib.contextmanager
def shown_rows(data: Any, is_wanted: bool) -> Generator[Callable[[int], None] | None]:
    """Shows on a terminal how many rows of some data are done.

    Args:
        data: as for `predict`.
        is_wanted: whether to show it.

    Yields:
        A function to call with the number of rows done; None if nothing is shown.
    """
    console = _terminal() if is_wanted else None
    if console is None:
        yield None
        return
    total = num_rows_of_all(data) or 0
    with live_line(total, console) as display:
        yield lambda done: display.show(Progress("train", done, total, {}))


def plain_lines(say: Callable[[str], None], clock: Callable[[], float] = time.monotonic) -> Hook:
    """Makes a hook that shows a line every 100 steps, after the last step, and after test phases.

    Args:
        say: shows a line.
        clock: returns the time in seconds.
    """
    began: tuple[int, float] | None = None

    def show(now: Progress) -> None:
        nonlocal began
        began = began or (now.step, clock())  # after the first step, which compiles
        if now.phase == "test" or now.step == now.num_steps:
            say(line_in_words(now))
        elif now.step % LINE_EVERY == 0:
            say(f"{line_in_words(now)}{_remaining(now, clock() - began[1], now.step - began[0])}")

    return show


def _remaining(now: Progress, passed_s: float, steps: int) -> str:
    if not steps:
        return ""
    left_s = int(passed_s / steps * (now.num_steps - now.step))
    return f"  {left_s // 3600}:{left_s // 60 % 60:02}:{left_s % 60:02} left"

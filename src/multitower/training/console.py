"""Shows a run while it trains: a live line on a terminal, plain lines elsewhere."""

import contextlib
import errno
import os
import sys
import time
from collections.abc import Callable, Generator
from typing import IO, TYPE_CHECKING, Any, NamedTuple, cast

from multitower.training.display import RunLine, line_in_words
from multitower.training.progress import Hook, Progress
from multitower.training.scoring.chunks import num_rows_of_all

if TYPE_CHECKING:
    from rich.console import Console

LINE_EVERY = 100
REFRESH_PER_S = 5  # drawing takes time from CPU devices


class Unheeded:
    """An output for lines that nobody may read: what cannot be written is dropped.

    A run goes on after `| head`, on a full disk, without stderr, and after its terminal has gone.

    Args:
        file: such as `sys.stderr`; None if the process has none.
    """

    def __init__(self, file: Any) -> None:
        self._file = file
        self.encoding: str = getattr(file, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        """Writes text; characters that the output does not have become question marks."""
        try:
            self._call("write", text)
        except UnicodeEncodeError:
            known = text.encode(self.encoding, "replace").decode(self.encoding)
            self._call("write", known)
        return len(text)

    def flush(self) -> None:
        """Writes what is in a buffer."""
        self._call("flush")

    def isatty(self) -> bool:
        """Whether this is a terminal."""
        return self._file is not None and self._file.isatty()

    def fileno(self) -> int:
        """Its number; as for `io.IOBase`, with an error if it has none."""
        if self._file is None:
            raise OSError(errno.EBADF, "there is no output")
        return self._file.fileno()

    def _call(self, name: str, *args: str) -> None:
        if self._file is None:
            return
        try:
            getattr(self._file, name)(*args)
        except OSError as error:
            if error.errno in (errno.EPIPE, errno.EIO):  # for good: Python would fail at its end
                nothing = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nothing, self._file.fileno())
                os.close(nothing)


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
    print(line, file=Unheeded(sys.stderr), flush=True)


def _terminal() -> "Console | None":
    if not Unheeded(sys.stderr).isatty():
        return None
    try:
        console = console_on(sys.stderr)
    except ImportError:
        return None
    return console if is_alive(console) else None


def console_on(file: Any) -> "Console":
    """A console whose lines may get lost; `file` is as for `Unheeded`."""
    from rich.console import Console  # noqa: PLC0415 (slow, and optional)

    return Console(file=cast("IO[str]", Unheeded(file)))


def is_alive(console: "Console") -> bool:
    """Whether a line can be redrawn: the console is a terminal that can move its cursor."""
    return console.is_terminal and not console.is_dumb_terminal


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
        redirect_stdout=Unheeded(sys.stdout).isatty(),  # files are not drawn above the bar
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

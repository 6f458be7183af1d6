"""The animated line that a terminal shows while a command works; it fits into any width.

`rich.live.Live(RunLine(100))` draws it; rich itself, which is optional, is not imported here.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from multitower.training.fitting.interruption import is_stopping
from multitower.training.progress import Progress

_FRAMES, _ASCII_FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏", "|/-\\"
_FRAMES_PER_S = 10
_SHORTEST_BAR, _LONGEST_BAR = 10, 40
_GAP = "  "
# Formats of whole numbers and of very small ones; others see `number_in_words`.
_FORMATS = {"staleness": ".0f", "skipped": ".0f", "loss_scale": ".0f", "learning_rate": ".3g"}


class WorkLine:
    """A line with the current work and its seconds so far.

    Args:
        doing: the work in words; it may be changed at any time.
        clock: returns the time in seconds.

    Example:
        >>> from multitower.training.display import WorkLine
        >>> WorkLine("compiling", clock=iter([0, 12]).__next__).text(40)
        '⠋ compiling  12 s'
    """

    def __init__(self, doing: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.doing = doing
        self._clock = clock
        self._began = clock()

    def text(self, width: int, *, ascii_only: bool = False) -> str:
        """The line, in at most `width` columns."""
        seconds = self._clock() - self._began
        for words in (f"{self.doing}{_GAP}{seconds:.0f} s", self.doing):
            if len(words) + 2 <= width:
                return f"{_frame(seconds, ascii_only)} {words}"
        return self.doing[:width]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        yield _one_line(self, console, options)


class RunLine:
    """The line of a run: bar, steps, metrics, speed and remaining time, as many of them as fit.

    Before the first step it says that the run compiles; after Ctrl-C, that it stops.

    Args:
        num_steps: steps of the run; 0 if they are not known before the first step.
        clock: returns the time in seconds.
    """

    def __init__(self, num_steps: int, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._num_steps = num_steps
        self._clock = clock
        self._start = WorkLine("setting up and compiling", clock=clock)
        self._began = clock()
        self._first: tuple[float, int] | None = None
        self._last: tuple[float, Progress] | None = None
        self._has_ended = False

    def show(self, now: Progress) -> None:
        """Shows a step or a test phase from now on."""
        at = self._clock()
        self._first = self._first or (at, now.step)
        self._last = at, now
        if now.phase == "train":
            self._num_steps = now.num_steps

    def end(self) -> bool:
        """Stops the animation; returns whether the line shows a step."""
        self._has_ended = True
        return self._last is not None

    def text(self, width: int, *, ascii_only: bool = False) -> str:
        """The line, in at most `width` columns."""
        if self._last is None:
            self._start.doing = "stopping ..." if is_stopping() else "setting up and compiling"
            return self._start.text(width, ascii_only=ascii_only)
        now = self._last[1]
        seconds = self._clock() - self._began
        moving = [] if self._has_ended else [_frame(seconds, ascii_only)]
        steps = f"{now.step}/{self._num_steps}" if self._num_steps else str(now.step)
        numbers = numbers_in_words(now)
        # In the order in which they are shown, each with its rank: low ranks are kept first.
        parts = [
            *((one, 0) for one in moving),
            *(("", 4) for _ in range(self._num_steps > 0)),  # the bar
            (steps, 1),
            *((one, 1) for one in self._state()),
            *((one, 2) for one in numbers[:1]),
            *((one, 5) for one in numbers[1:]),
            *((one, 3) for one in self._left()),
        ]
        kept = _that_fit(parts, width)
        if "" in kept:
            free = width - len(_joined(kept)) + _SHORTEST_BAR
            kept[kept.index("")] = self._bar(min(free, _LONGEST_BAR), ascii_only)
        return _joined(kept)[:width]

    def __rich_console__(self, console: Any, options: Any) -> Iterator[Any]:
        text = _one_line(self, console, options)
        text.highlight_regex(r"━+|#+", "bar.complete")
        text.highlight_regex(r"─+", "bar.back")
        text.highlight_regex(r"stopping \.\.\.", "yellow")
        yield text

    def _state(self) -> list[str]:
        """The current work in words, if it is not training."""
        if self._has_ended or self._last is None:
            return []
        if self._last[1].step == self._num_steps:
            return ["finishing ..."]
        return ["stopping ..."] if is_stopping() else []

    def _left(self) -> list[str]:
        """The remaining time, estimated from the mean time of the steps so far."""
        assert self._last is not None
        assert self._first is not None
        (at, now), (began, first) = self._last, self._first
        if self._has_ended or not self._num_steps or now.step in (first, self._num_steps):
            return []
        left = (at - began) / (now.step - first) * (self._num_steps - now.step)
        minutes, seconds = divmod(round(max(0.0, left - (self._clock() - at))), 60)
        hours, minutes = divmod(minutes, 60)
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        return [f"{clock} left"]

    def _bar(self, width: int, ascii_only: bool) -> str:
        assert self._last is not None
        done = width * self._last[1].step // self._num_steps
        full, empty = "#-" if ascii_only else "━─"
        return full * done + empty * (width - done)


def number_in_words(value: float) -> str:
    """A metric with four decimals, or with an exponent where these would say little.

    Example:
        >>> from multitower.training.display import number_in_words
        >>> [number_in_words(value) for value in (0.5, 0.0, 0.00012345, -2.5e9)]
        ['0.5000', '0.0000', '1.234e-04', '-2.500e+09']
    """
    is_usual = not value or not math.isfinite(value) or 1e-3 <= abs(value) < 1e9
    return f"{value:.4f}" if is_usual else f"{value:.3e}"


def numbers_in_words(now: Progress) -> list[str]:
    """The loss first, then the other metrics by name, then the epoch and the speed.

    Example:
        >>> from multitower.training.display import numbers_in_words
        >>> from multitower.training.progress import Progress
        >>> numbers_in_words(Progress("train", 1, 9, {"accuracy": 0.5, "loss": 2.0}, 1234.5))
        ['loss 2.0000', 'accuracy 0.5000', '1,234 examples/s']
    """
    names = sorted(now.metrics, key=lambda name: (name != "loss", name))
    said = lambda name, value: (
        f"{value:{_FORMATS[name]}}" if name in _FORMATS else number_in_words(value)
    )
    words = [f"{name} {said(name, now.metrics[name])}" for name in names]
    if now.epoch is not None and now.phase == "train":
        words.append(f"epoch {now.epoch:.2f}")
    if now.examples_per_s is not None:
        words.append(f"{now.examples_per_s:,.0f} examples/s")
    return words


def line_in_words(now: Progress) -> str:
    """A step or a test phase as a line of its own, with the time of day."""
    clock, numbers = time.strftime("%H:%M:%S"), _GAP.join(numbers_in_words(now))
    if now.phase == "test":
        return f"{clock}  test after step {now.step}  {numbers}"
    width = len(str(now.num_steps))
    return f"{clock}  step {now.step:{width}}/{now.num_steps}  {numbers}"


def _one_line(line: "WorkLine | RunLine", console: Any, options: Any) -> Any:
    """The text that rich draws, in one line of the terminal."""
    words = line.text(options.max_width, ascii_only=options.ascii_only)
    text = console.render_str(words, markup=False, emoji=False, highlight=False)
    text.no_wrap, text.overflow = True, "crop"
    return text


def _that_fit(parts: Sequence[tuple[str, int]], width: int) -> list[str]:
    """The parts that fit into `width`, chosen by rank, low ranks first; in their given order."""
    kept: list[int] = []
    for place in sorted(range(len(parts)), key=lambda place: parts[place][1]):
        tried = sorted([*kept, place])
        if len(_joined([parts[one][0] for one in tried])) <= width:
            kept = tried
    return [parts[place][0] for place in kept]


def _joined(parts: Sequence[str]) -> str:
    """The parts in one line; an empty part leaves room for the shortest bar."""
    return _GAP.join(part or " " * _SHORTEST_BAR for part in parts)


def _frame(seconds: float, ascii_only: bool) -> str:
    frames = _ASCII_FRAMES if ascii_only else _FRAMES
    return frames[int(seconds * _FRAMES_PER_S) % len(frames)]

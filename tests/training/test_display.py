"""The line of a run: it moves, says what is going on, and fits into any terminal."""

import signal

import pytest
from rich.console import Console

import multitower as mt
from multitower.training.display import RunLine, WorkLine, numbers_in_words
from multitower.training.fitting.interruption import noted_signals

METRICS = {"loss": 0.25, "accuracy": 0.875, "bits_per_byte": 2.5}


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def at_step(clock, step, num_steps=100):
    """A run whose first step took ten seconds, and every other one a second."""
    line = RunLine(num_steps, clock=clock)
    for number in range(1, step + 1):
        clock.now = 9.0 + number
        line.show(mt.Progress("train", number, num_steps, METRICS, 1234.5))
    return line


def drawn(line, width, **how):
    console = Console(width=width, force_terminal=True, color_system=None, **how)
    with console.capture() as shown:
        console.print(line)
    return shown.get()


def test_it_moves_while_it_compiles(clock):
    line = RunLine(9, clock=clock)
    seen = set()
    for clock.now in (0.0, 0.1, 12.0):
        seen.add(line.text(40))
    assert len(seen) == 3
    assert line.text(40) == "⠋ setting up and compiling  12 s"


@pytest.mark.parametrize("width", [10, 20, 40, 60, 80, 120, 160, 200])
def test_it_fits_and_what_matters_stays(width, clock):
    """Lie: a line that wraps, and is drawn again below itself."""
    text = at_step(clock, 30).text(width)
    assert len(text) <= width
    assert drawn(at_step(clock, 30), width).count("\n") == 1
    rows = [
        (10, "30/100"),
        (40, "loss 0.2500"),
        (40, "1:10 left"),
        (60, "━"),
        (80, "accuracy 0.8750"),
        (120, "bits_per_byte 2.5000  1,234 examples/s"),
    ]
    assert all(words in text for least, words in rows if width >= least)


def test_the_bar_is_as_full_as_the_run(clock):
    text = at_step(clock, 30).text(200)
    assert (text.count("━"), text.count("─")) == (12, 28)


def test_the_remaining_time_goes_down_between_steps(clock):
    line = at_step(clock, 30, num_steps=4000)
    assert "1:06:10 left" in line.text(80)
    clock.now += 10
    assert "1:06:00 left" in line.text(80)
    assert "left" not in at_step(clock, 1).text(80)  # one step has compiled: it says nothing


@pytest.mark.parametrize("step", [0, 30])
def test_after_ctrl_c_it_says_that_it_stops(step, clock):
    line = at_step(clock, step)
    assert "stopping" not in line.text(40)
    with noted_signals():
        signal.raise_signal(signal.SIGINT)
        assert "stopping ..." in line.text(40)
    assert "stopping" not in line.text(40)


def test_at_the_end_it_stands_still(clock):
    line = at_step(clock, 100)
    assert "100/100  finishing ...  loss 0.2500" in line.text(80)
    assert line.end()
    assert "finishing" not in line.text(80)
    assert line.text(80).startswith("━")
    assert not RunLine(9, clock=clock).end()  # nothing to leave on the screen


def test_other_terminals(clock):
    ascii_only = at_step(clock, 30).text(80, ascii_only=True)
    assert ascii_only.isascii()
    assert "###---" in ascii_only
    assert WorkLine("step 1 of 5 on 2 devices", clock=clock).text(12) == "step 1 of 5 "


def test_numbers_that_four_digits_would_hide():
    metrics = {"loss": 2e-6, "learning_rate": 2.5e-5, "loss_scale": 32768.0, "skipped": 0.0}
    expected = ["loss 2.000e-06", "learning_rate 2.5e-05", "loss_scale 32768", "skipped 0"]
    assert numbers_in_words(mt.Progress("train", 1, 2, metrics)) == expected

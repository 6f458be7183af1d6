"""Output that nobody reads, or that cannot be written, ends no run."""

import io
import os
import pty
import subprocess
import sys

import pytest

from multitower.cli.console import say, show_error, show_progress
from multitower.cli.starting import local_processes
from multitower.training.console import shown_on_stderr
from multitower.training.progress import Progress

# As a command that prints, without the seconds that its imports take.
PRINTS = """
import sys, types
command = sys.modules["multitower.cli.main"] = types.ModuleType("multitower.cli.main")
command.main = lambda: print("words", flush=True)
from multitower_command import main
main()
"""


class Lines(io.StringIO):
    """Knows what was left in it when it was closed."""

    def close(self):
        if not self.closed:
            self.left = self.read()
        super().close()


def unread():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


def full():
    return os.open("/dev/full", os.O_WRONLY)


@pytest.mark.parametrize("make", [unread, full])
def test_what_cannot_be_printed_ends_no_run(make, monkeypatch):
    """Lie: `multitower train ... | head` that loses the steps since the last checkpoint."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, os.fdopen(make(), "w"))
    for _ in range(2):
        say("step 100")
        show_error("an error")
        with shown_on_stderr(3) as display:
            display.say("step 200")
        lines = Lines("of process 0\nof process 1\n")
        local_processes._pass_on(lines)
        assert lines.left == ""  # a process would wait for ever on a full pipe
    for file in (sys.stdout, sys.stderr):
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())  # what is left of /dev/full
        file.close()


def test_a_process_without_outputs_ends_no_run(monkeypatch):
    """Lie: there is always a stderr; a daemon has none."""
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, None)
    say("step 100")
    show_error("an error")
    with show_progress(3) as show, shown_on_stderr(3) as display:
        show(Progress("train", 3, 3, {}))
        display.say("step 200")


def test_a_terminal_that_goes_away_ends_no_run(monkeypatch):
    """Lie: a run that was disowned fails when its terminal is closed."""
    reader, terminal = pty.openpty()
    monkeypatch.setattr(sys, "stderr", os.fdopen(terminal, "w"))
    monkeypatch.setenv("TERM", "xterm")
    with shown_on_stderr(3) as display:
        display.show(Progress("train", 1, 3, {"loss": 1.0}))
        assert os.read(reader, 4096)
        os.close(reader)
        display.show(Progress("test", 1, 3, {"loss": 1.0}))
        display.say("words")
    sys.stderr.close()


def test_characters_that_an_output_lacks_are_question_marks(monkeypatch):
    """Lie: a run fails at its last line, which has the name of its directory."""
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="latin-1"))
    say("wrote 日本/result.json")
    sys.stdout.flush()
    assert written.getvalue() == b"wrote ??/result.json\n"


def test_a_command_whose_output_nobody_reads_ends_in_silence():
    """Lie: a page of Python's lines after `multitower train --help | head`."""
    with os.fdopen(unread(), "w") as out:
        words = [sys.executable, "-c", PRINTS]
        ran = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (141, b"")

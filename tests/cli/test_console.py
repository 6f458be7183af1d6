"""Output that nobody reads, or that cannot be written, ends no run."""

import io
import os
import subprocess
import sys

import pytest

from multitower.cli.console import say, show_error
from multitower.cli.starting import local_processes
from multitower.training.console import shown_on_stderr

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


def test_a_command_whose_output_nobody_reads_ends_in_silence():
    """Lie: a page of Python's lines after `multitower train --help | head`."""
    with os.fdopen(unread(), "w") as out:
        words = [sys.executable, "-c", PRINTS]
        ran = subprocess.run(words, stdout=out, stderr=subprocess.PIPE, check=False)
    assert (ran.returncode, ran.stderr) == (141, b"")

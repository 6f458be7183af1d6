"""The last line of a process that JAX has ended. The lies: a page of C++, and nobody named."""

import subprocess
import sys

import pytest

from multitower.processes.verdict import verdict
from processes import clean_environment

FATAL = "F1121 client.h:86] Terminating process because the JAX distributed service detected fatal "
UNHEALTHY = "errors. UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):\n"
GONE = "errors. UNAVAILABLE: Failed to send RPC to coordination service. Either the leader task\n"
BARRIER = "errors. INTERNAL: Shutdown barrier has failed.\nSome timed out task names:\n3\n [type"
HOSTS = ["anna", "bert", "carl", "dora"]

# What JAX does, in short: it writes, and ends the process without a word from Python.
PROGRAM = f"""
import os, subprocess, sys
from multitower.processes import verdict
verdict.start_verdict(None)
print("early", file=sys.stderr)
{{}}
os.write(2, b"[Gloo] Rank 0 is connected\\n")
os.write(2, {(FATAL + UNHEALTHY)!r}.encode() + b"1\\n")
os.write(2, b"*** Check failure stack trace: ***\\n    @     0x7f3206dd8aa4  absl::Flush()\\n")
os.abort()
"""


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        (UNHEALTHY + "1\nThe tasks have crashed.\n", "process 1 on bert"),
        (UNHEALTHY + "1\n3\n", "process 1 on bert, process 3 on dora"),
        (GONE, "process 0 on anna"),
        (BARRIER, "process 3 on dora"),
        ("errors. DEADLINE_EXCEEDED: Deadline Exceeded\n\nRPC: Heartbeat\n", "process 0 on anna"),
        (UNHEALTHY + "2\n", "another process"),  # this one itself: it was only not heard of
    ],
)
def test_who_is_missing(said, missing):
    line = verdict(FATAL + said, 2, HOSTS)
    assert f"missing: {missing}. It was killed" in line
    assert "JAX therefore ended process 2 on carl, too" in line


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("ALREADY_EXISTS: Aborted connect attempt as there", "two processes have the same number"),
        ("DEADLINE_EXCEEDED: Deadline Exceeded", "not all processes connected in time"),
    ],
)
def test_what_kept_a_process_from_joining(said, told):
    """Lie: a process that has died and is missing, where none has begun."""
    rpc = "\n\nRPC: /xla.coordination.CoordinationService/RegisterTask\n"
    line = verdict(f"{FATAL}errors. absl::Status: {said}{rpc}", 2)
    assert told in line
    assert "missing" not in line


def test_no_verdict_on_any_other_end():
    assert not verdict("Traceback: tasks are unhealthy\n1\n", 2, HOSTS)


def test_before_the_hosts_are_known():
    assert "missing: process 1. It was killed" in verdict(FATAL + UNHEALTHY + "1\n")


def run(known):
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(known)],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert process.returncode == -6
    return process.stderr


def test_a_process_that_is_aborted_has_the_last_word():
    shown = run("verdict.tell_hosts(0, ['anna', 'bert'])").splitlines()
    assert "early" in shown[0]
    assert shown[-1].startswith("[process 0] multitower: missing: process 1 on bert. It was killed")
    assert all(line.startswith("[process 0] ") for line in shown[1:])
    assert not any("@" in line or "Gloo" in line or "stack trace" in line for line in shown)


@pytest.mark.slow
def test_noise_that_comes_in_pieces():
    # The lie: the second piece of the line, when the first was dropped long ago, looks like news.
    pieces = "os.write(2, b'[Gloo] Rank '); time.sleep(0.3); os.write(2, b'1 is connected\\n')"
    shown = run(f"import time; {pieces}; os.write(2, b'after\\n')")
    assert "connected" not in shown
    assert "after\n" in shown


@pytest.mark.slow
def test_the_names_of_very_many_hosts():
    """Lie: a relay that ends at half a message, and with it the process that writes next."""
    shown = run("verdict.tell_hosts(0, ['h' * 60, 'bert'] + 2000 * ['c' * 60])")
    assert "missing: process 1 on bert. It was killed" in shown


@pytest.mark.slow
def test_a_child_that_holds_on_to_stderr_does_not_keep_the_verdict_waiting():
    # For longer than `run` waits: else a verdict that comes after the child would do, too.
    shown = run("subprocess.Popen(['sleep', '75'], stdout=subprocess.DEVNULL)")
    assert "missing: process 1. It was killed" in shown

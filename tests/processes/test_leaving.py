"""A process of several that fails. The lie: JAX's verdict that those are missing who only wait."""

import sys

import jax
import pytest

import multitower as mt
from multitower.processes import leaving


class Left(BaseException):
    pass


@pytest.fixture
def together(monkeypatch):
    def leave(code):
        raise Left(code)

    monkeypatch.setattr("os._exit", leave)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(sys, "excepthook", lambda *_: print("as usual"))


def test_a_process_that_is_alone_goes_on():
    leaving.leave_if_together(1, ValueError("mine"))


def test_what_nobody_catches_is_shown_and_ends_the_process(together, capsys):
    leaving.leave_on_errors()
    with pytest.raises(Left, match="1"):
        sys.excepthook(KeyError, KeyError("mine"), None)
    assert "KeyError: 'mine'" in capsys.readouterr().err


def test_a_lost_connection_says_where_to_look(together, capsys):
    error = ValueError("UNKNOWN: Gloo all-reduce failed: Connection closed by peer\nmore")
    with pytest.raises(Left):
        leaving.leave_if_together(1, error)
    shown = capsys.readouterr().err
    assert "process 0 has lost the connection to another process (UNKNOWN: Gloo all-reduce" in shown
    assert "JAX names the missing process below" in shown


def test_a_stop_that_all_have_agreed_on_is_a_regular_end(together, capsys):
    leaving.leave_on_errors()
    sys.excepthook(mt.errors.Interrupted, mt.errors.Interrupted("SIGTERM", 15), None)
    assert capsys.readouterr().out == "as usual\n"


NEVER = "Gloo context initialization failed: [gloo/transport/tcp/pair.cc:144]"
LATER = "Gloo all-reduce failed: [gloo/transport/tcp/pair.cc:547] Connection closed by peer"


@pytest.mark.parametrize(
    ("address", "text", "told"),
    [("127.0.1.1", NEVER, True), ("10.0.0.7", NEVER, False), ("127.0.0.1", LATER, False)],
)
def test_a_host_that_others_cannot_reach_says_why(
    together, capsys, monkeypatch, address, text, told
):
    """Lies: "process 1 is missing", where Debian's /etc/hosts has it connect to itself; and that
    it is /etc/hosts, where a process of one machine was killed."""
    monkeypatch.setattr("socket.gethostbyname", lambda _: address)
    error = ValueError(text)
    with pytest.raises(Left):
        leaving.leave_if_together(1, error)
    assert ("Add these addresses to /etc/hosts" in capsys.readouterr().err) == told

"""Waiting for what another process does, with a deadline and a reason."""

import time
from collections.abc import Callable


def wait_until(done: Callable[[], object], timeout_s: float, explain: Callable[[], str]) -> None:
    """Until `done()`; an AssertionError with what `explain()` says if that takes too long."""
    deadline = time.monotonic() + timeout_s
    while not done():
        assert time.monotonic() < deadline, f"waited {timeout_s} s\n{explain()}"
        time.sleep(0.1)

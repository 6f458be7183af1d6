"""A pytest plugin for mutants.py: which functions of the library does each test run?

It writes one JSON file for every worker of pytest into the folder RECORD_TO: for each test its
seconds, and the functions of RECORD_OF as `engines/reduction.py:31`, with their first lines. What
other processes run is not in it.
"""

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

import pytest

_SOURCE = os.environ["RECORD_OF"] + "/"
_WATCH = sys.monitoring
_TOOL = 4  # a number that no debugger or profiler of Python's own list has
_running: set[str] = set()
_tests: dict[str, dict[str, Any]] = {}


def _note(code: CodeType, offset: int) -> object:
    del offset
    if code.co_filename.startswith(_SOURCE):
        _running.add(f"{code.co_filename.removeprefix(_SOURCE)}:{code.co_firstlineno}")
    return _WATCH.DISABLE  # once a test is enough


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _running.clear()
    _WATCH.restart_events()
    start_s = time.monotonic()
    done = yield
    seconds = time.monotonic() - start_s
    _tests[item.nodeid] = {"seconds": seconds, "functions": sorted(_running)}
    return done


def pytest_sessionfinish() -> None:
    worker = os.environ.get("PYTEST_XDIST_WORKER", "alone")
    Path(os.environ["RECORD_TO"], f"{worker}.json").write_text(json.dumps(_tests))


_WATCH.use_tool_id(_TOOL, __name__)
_WATCH.register_callback(_TOOL, _WATCH.events.PY_START, _note)
_WATCH.set_events(_TOOL, _WATCH.events.PY_START)

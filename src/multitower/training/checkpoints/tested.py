"""Tested: a note in a run's last checkpoint that the test phase after it has been made.

The last step is saved before its test phase, so that a kill in the midst of it costs no step. By
the note, a resume knows that nothing is left to do.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multitower.processes.together import by_first, is_first

_NOTE = "tested.json"


def note_tested(checkpoint: Path, counted: Mapping[str, Any]) -> None:
    """Notes that the test phase has been made; in process 0 alone.

    Args:
        checkpoint: its directory, complete: the note goes wherever it goes.
        counted: what early stopping has counted, as JSON values.
    """
    if is_first():
        with suppress(OSError):  # without the note, a resume makes the test phase again
            (checkpoint / _NOTE).write_text(json.dumps(counted), encoding="utf-8")


def read_tested(checkpoint: Path) -> dict[str, Any] | None:
    """What `note_tested` was given; None without a whole note. Call it on every process."""

    def read() -> str:
        with suppress(OSError, ValueError):  # a killed process may leave half of one
            return json.dumps(json.loads((checkpoint / _NOTE).read_text(encoding="utf-8")))
        return ""

    text = by_first(read)
    return json.loads(text) if text else None

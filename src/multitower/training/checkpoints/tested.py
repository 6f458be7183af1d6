"""Tested: a note in a run's last checkpoint that the test phase after it has been made.

The last step is saved before its test phase, so that no step is lost if the process is killed
during the phase. From the note, a resume knows that nothing is left to do.
"""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multitower.processes.together import by_first, is_first

_NOTE = "tested.json"


def note_tested(checkpoint: Path, counted: Mapping[str, Any]) -> None:
    """Notes that the test phase has been made; only process 0 writes.

    Args:
        checkpoint: directory of the checkpoint, complete; the note is kept inside.
        counted: the counts of early stopping, as JSON values.
    """
    if is_first():
        with suppress(OSError):  # without the note, a resume makes the test phase again
            (checkpoint / _NOTE).write_text(json.dumps(counted), encoding="utf-8")


def read_tested(checkpoint: Path) -> dict[str, Any] | None:
    """The counts that `note_tested` wrote, or None. Call it on every process."""

    def read() -> str:
        with suppress(OSError, ValueError):  # a killed process may leave half a note
            return json.dumps(json.loads((checkpoint / _NOTE).read_text(encoding="utf-8")))
        return ""

    text = by_first(read)
    return json.loads(text) if text else None

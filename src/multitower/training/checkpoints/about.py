"""About: the JSON values beside a state, of the user and of the run."""

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from multitower.errors import ArgumentError
from multitower.towers.refusals import shown


def check_about(about: Any) -> None:
    """Refuses values that JSON does not have, before any step is made that could not be saved.

    Raises:
        ArgumentError: it is not a dict, or holds other values than those of JSON.
    """
    try:
        if isinstance(about, Mapping):
            json.dumps(dict(about), sort_keys=True)
            return
        why = "it is not a dict"
    except (TypeError, ValueError) as error:
        why = str(error)
    raise ArgumentError(
        f"about={shown(about)}: checkpoints keep a dict of JSON values, and {why}. Convert values, "
        "such as numbers of NumPy and JAX with float(x), arrays with x.tolist(), paths with str(x)."
    )


def digest(written: Mapping[str, Any]) -> str:
    """The checksum of what is written beside a state."""
    return hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()

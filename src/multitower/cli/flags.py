"""Flags that several commands have."""

from pathlib import Path
from typing import Annotated, Any

import tyro

_WHERE = tyro.conf.create_mutex_group(required=False, title="where to run")


def flag(metavar: str, text: str, default: str) -> Any:
    """A flag with its help text."""
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=f"(default: {default})")


Devices = Annotated[
    int | None,
    _WHERE,
    flag(
        "N",
        "Use the first N accelerators, or CPU devices where there are no accelerators.",
        "all accelerators, or else two simulated devices",
    ),
]
Simulate = Annotated[
    int | None,
    _WHERE,
    flag("N", "Use N simulated CPU devices, whatever accelerators there are.", "none"),
]
Data = Annotated[
    Path | None,
    flag("DIR", "Read the data set from this directory.", "where --download puts it"),
]
RunDirectory = Annotated[
    Path,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="DIR", help="The directory of the run.", help_behavior_hint=""),
]

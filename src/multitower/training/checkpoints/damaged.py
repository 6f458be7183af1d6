"""Damaged checkpoints: renamed and not deleted, so that their steps can be saved again."""

from collections.abc import Iterable
from pathlib import Path

from multitower.processes.together import by_first


def set_aside(directory: Path, steps: Iterable[int]) -> None:
    """Renames checkpoints to `damaged-<step>`; call it on every process.

    Orbax would skip the save of a number that exists.
    """

    def rename() -> str:
        for step in steps:
            target, number = directory / f"damaged-{step}", 1
            while target.exists():
                number += 1
                target = directory / f"damaged-{step}-{number}"
            (directory / str(step)).rename(target)
        return ""

    by_first(rename)

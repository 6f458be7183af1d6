"""Damaged checkpoints: renamed and not deleted, so that their steps can be saved again."""

from collections.abc import Iterable
from pathlib import Path

from multitower.processes.together import is_first, of_first


def set_aside(directory: Path, steps: Iterable[int]) -> None:
    """Renames checkpoints to `damaged-<step>`; call it on every process.

    Orbax would skip the save of a number that exists.
    """
    for step in steps if is_first() else ():
        target, number = directory / f"damaged-{step}", 1
        while target.exists():
            number += 1
            target = directory / f"damaged-{step}-{number}"
        (directory / str(step)).rename(target)
    of_first(0)  # other processes wait until it is done

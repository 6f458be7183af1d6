"""`multitower resume DIR`."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from multitower.cli.console import say
from multitower.cli.start import start_devices
from multitower.cli.train import WHERE, finish, flag
from multitower.errors import RunError
from multitower.recipes import find_recipe
from multitower.run import RunOptions
from multitower.run_directory import RESULT, read_config


def resume(
    directory: Annotated[
        Path,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="DIR", help="The directory of the run.", help_behavior_hint=""),
    ],
    *,
    devices: Annotated[
        int | None,
        WHERE,
        flag("N", "Use the first N accelerators, or CPU devices.", "all, as for train"),
    ] = None,
    simulate: Annotated[
        int | None,
        WHERE,
        flag("N", "Use N simulated CPU devices, whatever accelerators there are.", "none"),
    ] = None,
) -> None:
    """Go on with a run that was stopped or killed, on any number of devices.

    With --towers, the result has the same bits as if the run had never stopped.
    """
    config = read_config(directory)
    if (directory / RESULT).exists():
        raise RunError(f"{directory} is finished: {directory / RESULT} holds its result.")
    recipe = find_recipe(config["recipe"], config.get("settings"))
    options = dataclasses.replace(RunOptions(**config["options"]), devices=devices)
    where = start_devices(devices, simulate, options.towers)
    say(f"resuming {recipe.name} from {directory} on {where}")
    finish(directory, recipe, options, resume=True)

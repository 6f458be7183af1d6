"""`multitower resume DIR` and `multitower eval DIR`: what goes on from a run's directory."""

import dataclasses
import json
from pathlib import Path

from multitower.cli.console import say
from multitower.cli.flags import Devices, RunDirectory, Simulate
from multitower.cli.start import start_devices
from multitower.cli.train import finish
from multitower.errors import RunError
from multitower.recipes import Recipe, find_recipe
from multitower.run import RunOptions, score
from multitower.run_directory import RESULT, read_config


def resume(directory: RunDirectory, *, devices: Devices = None, simulate: Simulate = None) -> None:
    """Go on with a run that was stopped or killed, on any number of devices.

    With --towers, the result has the same bits as if the run had never stopped.
    """
    recipe, options = _read_run(directory, devices)
    if (directory / RESULT).exists():
        raise RunError(f"{directory} is finished: {directory / RESULT} holds its result.")
    where = start_devices(devices, simulate, options.towers)
    say(f"resuming {recipe.name} from {directory} on {where}")
    finish(directory, recipe, options, resume=True)


def evaluate(
    directory: RunDirectory, *, devices: Devices = None, simulate: Simulate = None
) -> None:
    """Score the newest checkpoint of a run on its test set; prints JSON."""
    recipe, options = _read_run(directory, devices)
    start_devices(devices, simulate, options.towers)
    print(json.dumps(score(recipe, options, directory), indent=2))


def _read_run(directory: Path, devices: int | None) -> tuple[Recipe, RunOptions]:
    config = read_config(directory)
    recipe = find_recipe(config["recipe"], config.get("settings"))
    return recipe, dataclasses.replace(RunOptions(**config["options"]), devices=devices)

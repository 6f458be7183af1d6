"""`multitower resume DIR` and `multitower eval DIR`: what goes on from a run's directory."""

import dataclasses
import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import tyro

from multitower.cli.console import say
from multitower.cli.finish import finish
from multitower.cli.flags.settings import collect_settings
from multitower.cli.flags.shared import (
    Data,
    Devices,
    RunDirectory,
    Simulate,
    WholeNumber,
    flag,
    switch,
)
from multitower.cli.starting.devices import start_devices
from multitower.cli.starting.together import ALONE, TOGETHER, Together
from multitower.errors import RunError
from multitower.processes.run_lock import held_for_all
from multitower.processes.together import by_first, is_first
from multitower.recipes.catalog import find_recipe
from multitower.recipes.definition import Recipe
from multitower.recipes.options import convert_options
from multitower.runs.directory import CONFIG, REPORT, RESULT, read_config
from multitower.runs.extension import check_extension, extend_run
from multitower.runs.options import RunOptions
from multitower.runs.setup import steps_of
from multitower.runs.train import score


def resume(
    directory: RunDirectory,
    *,
    devices: Devices = None,
    simulate: Simulate = None,
    steps: Annotated[
        WholeNumber,
        flag("N", "Make N updates in all; more extend the run, also if it is done.", "as begun"),
    ] = None,
    allow_previous: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("If the newest checkpoint is damaged, continue from the one before."),
    ] = False,
    together: Annotated[Together, TOGETHER] = ALONE,
) -> None:
    """Resume a run that was stopped or killed, on any number of devices.

    With --towers, the result has the same bits as an uninterrupted run.
    """
    recipe, options = read_run(directory, devices)
    refuse_finished(directory, steps)
    where = start_devices(devices, simulate, options.towers, together=together)
    say(f"resuming {recipe.name} from {directory} on {where}")
    directory = directory.absolute()  # also if the recipe changes the working directory
    with held_for_all(directory):
        begins: Callable[[], object] = lambda: None
        if steps is not None:
            before = steps_of(recipe, options)  # may load data, so after JAX is set up
            options = dataclasses.replace(options, steps=steps, epochs=None)
            by_first(lambda: check_extension(directory, recipe, options, before))
            begins = functools.partial(by_first, functools.partial(extend_run, directory, steps))
        finish(
            directory, recipe, options, resume=True, allow_previous=allow_previous, begins=begins
        )


def refuse_finished(directory: Path, steps: int | None) -> None:
    """Refuses a run that has its result, unless it is to make more steps and can."""
    file = directory / RESULT
    if not file.exists():
        return
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
        made = result["steps"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise RunError(
            f"{directory} is finished, but {file} cannot be read: {error}. Delete that file, and "
            "resume: the result is then computed again from the last checkpoint."
        ) from error
    if stopped := result.get("stopped"):
        raise RunError(
            f"{directory} is finished, by {stopped}. More steps would not change that: begin "
            "another run, with a larger N in --early-stopping NAME:N."
        )
    if steps in (None, made):
        has_report = (directory / REPORT).exists()
        write_it = f" It was ended before {REPORT}: to have that too, delete {file} and resume."
        raise RunError(
            f"{directory} is finished: {file} holds its result. To extend it, pass --steps with "
            f"more than its {made} steps.{'' if has_report else write_it}"
        )


def evaluate(
    directory: RunDirectory,
    *,
    devices: Devices = None,
    simulate: Simulate = None,
    data: Data = None,
    best: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Score the state that --keep-best kept."),
    ] = False,
    together: Annotated[Together, TOGETHER] = ALONE,
) -> None:
    """Score the newest or the best checkpoint of a run on a test set. Prints JSON."""
    recipe, options = read_run(directory, devices, data)
    start_devices(devices, simulate, options.towers, together=together)
    found = score(recipe, options, directory, best=best)
    if is_first():
        print(json.dumps(found, indent=2))


def read_run(
    directory: Path, devices: int | None, data: Path | None = None
) -> tuple[Recipe, RunOptions]:
    """The recipe and the options of a run, for these devices."""
    config = read_config(directory)
    words = {name: str(value) for name, value in config["options"].items()}
    before = {name: str(value) for name, value in (config.get("settings") or {}).items()}
    settings = collect_settings([], data, synthetic=False, before=before)
    recipe = find_recipe(config["recipe"], settings)
    # The layout is for the devices that the run began on; these have one of their own.
    options = RunOptions(**convert_options(RunOptions, words, f"{directory / CONFIG}: a run"))
    return recipe, dataclasses.replace(options, devices=devices, layout=None)

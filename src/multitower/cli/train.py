"""`multitower train RECIPE`."""

import dataclasses
from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.console import say, show_progress
from multitower.cli.flags import Devices, Simulate, flag
from multitower.cli.settings import SET_HELP, collect_settings, download_data
from multitower.cli.start import start_devices
from multitower.recipes import SHIPPED, Recipe, find_recipe
from multitower.recipes.recipe_file import is_file_name
from multitower.run import RunOptions, run
from multitower.run_directory import (
    fresh_run_directory,
    make_run_directory,
    write_config,
    write_result,
)


def train(
    recipe: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="RECIPE",
            help=f"What to train: {', '.join(SHIPPED)}, or a file of yours, FILE.py.",
            help_behavior_hint="",
        ),
    ],
    *,
    devices: Devices = None,
    simulate: Simulate = None,
    towers: Annotated[
        int | None,
        flag(
            "T",
            "Cut every batch into T towers: the result then has the same bits on any number of "
            "devices.",
            "one per device, as fast as can be",
        ),
    ] = None,
    steps: Annotated[int | None, flag("N", "Make N updates.", "the recipe's number")] = None,
    batch_size: Annotated[
        int | None,
        flag("N", "Take N examples per step, over all towers.", "the recipe's number"),
    ] = None,
    data: Annotated[
        Path | None,
        flag("DIR", "Read the data set from this directory.", "where --download puts it"),
    ] = None,
    synthetic: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(help="Make images up instead of reading files.", help_behavior_hint=""),
    ] = False,
    download: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(
            help="Download the data set first, to --data or to the user's cache directory; files "
            "that are there are kept.",
            help_behavior_hint="",
        ),
    ] = False,
    set_options: Annotated[
        tuple[str, ...],
        tyro.conf.UseAppendAction,
        tyro.conf.arg(name="set", metavar="NAME=VALUE", help=SET_HELP, help_behavior_hint=""),
    ] = (),
    checkpoint_every: Annotated[
        int, flag("N", "Save a checkpoint every N steps, and after the last one.", "1000")
    ] = 1000,
    seed: Annotated[
        int, flag("N", "Draw the first parameters and the order of the examples from N.", "0")
    ] = 0,
    run_dir: Annotated[
        Path | None, flag("DIR", "Write to this directory.", "runs/RECIPE-DATE-TIME")
    ] = None,
    force: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        tyro.conf.arg(
            help="Replace the result of another run in --run-dir.", help_behavior_hint=""
        ),
    ] = False,
) -> None:
    """Train a recipe on all devices and score it; writes DIR/result.json."""
    settings = collect_settings(set_options, data, synthetic)
    chosen = find_recipe(recipe, settings)
    options = RunOptions(
        devices=devices,
        towers=towers,
        steps=steps,
        global_batch=batch_size,
        seed=seed,
        checkpoint_every=checkpoint_every,
    )
    if download:
        download_data(chosen)
    say(f"training {chosen.name} on {start_devices(devices, simulate, towers)}")
    directory = (
        fresh_run_directory(Path("runs"), chosen.name)
        if run_dir is None
        else make_run_directory(run_dir, overwrite=force)
    )
    if is_file_name(recipe):
        recipe = str(Path(recipe).absolute())  # so that a resume finds it from anywhere
    config = {"recipe": recipe, "settings": settings, "options": dataclasses.asdict(options)}
    write_config(directory, config)
    finish(directory, chosen, options)


def finish(directory: Path, recipe: Recipe, options: RunOptions, *, resume: bool = False) -> None:
    """Trains, from the start or from a checkpoint, and writes and prints the result."""
    with show_progress(options.steps or recipe.steps) as watch:
        result = run(recipe, options, watch, directory=directory, resume=resume)
    path = write_result(directory, result)
    say(f"{_scores(result)}  {result['seconds']:.1f} s  fingerprint {result['fingerprint'][:12]}")
    say(f"wrote {path}")


def _scores(result: dict[str, Any]) -> str:
    names = sorted(name for name in result if name.startswith("test_"))
    return "  ".join(f"{name.replace('_', ' ')} {result[name]:.4f}" for name in names)

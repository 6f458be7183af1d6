"""`multitower train RECIPE`."""

from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.console import say, show_progress
from multitower.cli.start import start_devices
from multitower.recipes import SHIPPED, find_recipe
from multitower.run import RunOptions, run
from multitower.run_directory import fresh_run_directory, make_run_directory, write_result

_WHERE = tyro.conf.create_mutex_group(required=False, title="where to run")


def _flag(metavar: str, text: str, default: str) -> Any:
    return tyro.conf.arg(metavar=metavar, help=text, help_behavior_hint=f"(default: {default})")


def train(
    recipe: Annotated[
        str,
        tyro.conf.Positional,
        tyro.conf.arg(
            metavar="RECIPE",
            help=f"What to train: {', '.join(SHIPPED)}.",
            help_behavior_hint="",
        ),
    ],
    *,
    devices: Annotated[
        int | None,
        _WHERE,
        _flag(
            "N",
            "Use the first N accelerators, or CPU devices where there are no accelerators.",
            "all accelerators, or else two simulated devices",
        ),
    ] = None,
    simulate: Annotated[
        int | None,
        _WHERE,
        _flag("N", "Use N simulated CPU devices, whatever accelerators there are.", "none"),
    ] = None,
    towers: Annotated[
        int | None,
        _flag(
            "T",
            "Cut every batch into T towers: the result then has the same bits on any number of "
            "devices.",
            "one per device, as fast as can be",
        ),
    ] = None,
    steps: Annotated[int | None, _flag("N", "Make N updates.", "the recipe's number")] = None,
    batch_size: Annotated[
        int | None,
        _flag("N", "Take N examples per step, over all towers.", "the recipe's number"),
    ] = None,
    seed: Annotated[
        int, _flag("N", "Draw the first parameters and the order of the examples from N.", "0")
    ] = 0,
    run_dir: Annotated[
        Path | None, _flag("DIR", "Write to this directory.", "runs/RECIPE-DATE-TIME")
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
    chosen = find_recipe(recipe)
    options = RunOptions(
        devices=devices, towers=towers, steps=steps, global_batch=batch_size, seed=seed
    )
    say(f"training {recipe} on {start_devices(devices, simulate, towers)}")
    directory = (
        fresh_run_directory(Path("runs"), recipe)
        if run_dir is None
        else make_run_directory(run_dir, overwrite=force)
    )
    with show_progress(chosen.steps if steps is None else steps) as watch:
        result = run(chosen, options, watch)
    path = write_result(directory, result)
    say(
        f"test accuracy {result['test_accuracy']:.4f}  test loss {result['test_loss']:.4f}  "
        f"{result['seconds']:.1f} s  fingerprint {result['fingerprint'][:12]}"
    )
    say(f"wrote {path}")

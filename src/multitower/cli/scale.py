"""`multitower scale RECIPE`."""

import json
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.console import say, show_error
from multitower.cli.counts import DeviceCounts, SimulatedCounts, start_counts
from multitower.cli.flags import (
    AsJson,
    BatchSize,
    Data,
    RecipeName,
    Seed,
    SetOptions,
    ShardParams,
    ShardUpdate,
    Stages,
    Synthetic,
    WholeNumber,
    flag,
    switch,
)
from multitower.cli.settings import collect_settings
from multitower.recipes.catalog import find_recipe
from multitower.runs.directory import fresh_run_directory
from multitower.runs.drawing import drawing_libraries
from multitower.runs.options import RunOptions
from multitower.scaling.directory import make_scaling_directory
from multitower.scaling.measure import STRONG, WEAK, ScalingOptions
from multitower.scaling.measure import scale as measure
from multitower.scaling.stage_times import pipeline_tables, waiting_in_words
from multitower.scaling.words import (
    Table,
    caution,
    losses_in_words,
    prediction_in_words,
    speed_tables,
    split_in_words,
    split_tables,
)

_DEFAULTS = ScalingOptions()


def scale(
    recipe: RecipeName,
    *,
    devices: DeviceCounts = None,
    simulate: SimulatedCounts = None,
    towers: Annotated[
        WholeNumber,
        flag(
            "T",
            "Split every batch into T towers, and measure the mode with the same bits.",
            "one per device, which is faster",
        ),
    ] = None,
    strong: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Measure strong scaling: the same batch on more devices. (default: both)"),
    ] = False,
    weak: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Measure weak scaling: the same number of examples per device."),
    ] = False,
    steps: Annotated[
        int, flag("N", "Measure N steps in each turn.", str(_DEFAULTS.steps))
    ] = _DEFAULTS.steps,
    rounds: Annotated[
        int, flag("N", "Give every number of devices N turns.", str(_DEFAULTS.rounds))
    ] = _DEFAULTS.rounds,
    predict: Annotated[
        WholeNumber, flag("N", "Predict the step time on N devices from those measured.", "none")
    ] = None,
    batch_size: BatchSize = None,
    data: Data = None,
    synthetic: Synthetic = False,
    set_options: SetOptions = (),
    seed: Seed = None,
    shard_update: ShardUpdate = False,
    shard_params: ShardParams = False,
    stages: Stages = None,
    run_dir: Annotated[
        Path | None, flag("DIR", "Write to this directory.", "runs/RECIPE-scale-DATE-TIME")
    ] = None,
    force: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Replace another measurement in --run-dir."),
    ] = False,
    as_json: AsJson = False,
) -> int:
    """Measure a recipe's speed on 1, 2, ... devices; writes DIR/scale.json, scale.png, scale.html.

    Exit code 0 if the loss curve is the same on all of them, 1 if not.
    """
    settings = collect_settings(set_options, data, synthetic)
    chosen = find_recipe(recipe, settings)
    options = RunOptions(
        towers=towers,
        global_batch=batch_size,
        seed=seed or 0,
        shard_update=shard_update,
        shard_params=shard_params,
        stages=stages,
    )
    kinds = tuple(kind for kind, asked in ((STRONG, strong), (WEAK, weak)) if asked)
    how = ScalingOptions(kinds=kinds, steps=steps, rounds=rounds, predict=predict)
    with drawing_libraries("multitower scale"):
        from multitower.scaling.report import write_scaling
    counts, where = start_counts(devices, simulate)
    how.kinds_on(counts, towers)  # mistakes are said before anything is made
    directory = (
        fresh_run_directory(Path("runs"), f"{chosen.name}-scale")
        if run_dir is None
        else make_scaling_directory(run_dir, overwrite=force)
    )
    if not as_json:
        say(f"measuring {chosen.name} on {', '.join(map(str, sorted(set(counts))))} of {where}")
    result = measure(chosen, options, counts, how)
    where_flag = {"devices": devices, "simulate": simulate, "towers": towers, "steps": steps}
    more = {
        "rounds": rounds,
        "predict": predict,
        "batch-size": batch_size,
        "seed": seed,
        "stages": stages,
    }
    more["stages"] = stages
    shards = {"shard-update": shard_update, "shard-params": shard_params}
    switches = (*kinds, *(name for name, asked in shards.items() if asked))
    result["command"] = _command(recipe, switches, {**where_flag, **more}, settings)
    written = write_scaling(directory, result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _say_result(result)
        say(f"wrote {', '.join(map(str, written))}")
    for difference in result["losses"]["differences"]:
        show_error(difference)
    return 1 if result["losses"]["differences"] else 0


def _command(
    recipe: str, switches: Sequence[str], flags: Mapping[str, Any], settings: Mapping[str, str]
) -> str:
    words = ["multitower", "scale", recipe, *(f"--{name}" for name in switches)]
    for name, value in flags.items():
        if value is not None:
            words += [f"--{name}", str(value)]
    for name, value in settings.items():
        words += ["--set", f"{name}={value}"]
    return shlex.join(words)


def _say_result(result: Mapping[str, Any]) -> None:
    for table in speed_tables(result):
        _say_table(table)
    for table in split_tables(result):
        _say_table(table)
    for table in pipeline_tables(result):
        _say_table(table)
    say(split_in_words(result))
    for line in waiting_in_words(result):
        say(line)
    if result["towers"] is not None:
        say("Weak scaling is not measured with --towers: the program is the same on any devices.")
    said = (losses_in_words(result), prediction_in_words(result), caution(result))
    for line in said:
        if line is not None:
            say(line)


def _say_table(table: Table) -> None:
    say(table.title)
    widths = [max(map(len, column)) for column in zip(table.heads, *table.rows, strict=True)]
    for row in (table.heads, *table.rows):
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""`multitower scale RECIPE`."""

import contextlib
import functools
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import tyro

from multitower.cli.console import say, show_error
from multitower.cli.flags.groups import (
    ASYNCHRONOUS,
    LOCAL,
    NO_STAGES,
    NOT_LOCAL,
    STAGES,
    SYNCHRONOUS,
    AsynchronousFlags,
    LocalFlags,
    StageFlags,
)
from multitower.cli.flags.settings import collect_settings
from multitower.cli.flags.shared import (
    AsJson,
    BatchSize,
    ClipNorm,
    ComputeDtype,
    Count,
    Data,
    EmaDecay,
    FileOrDirectory,
    RecipeName,
    Seed,
    SetOptions,
    ShardParams,
    ShardUpdate,
    Synthetic,
    WholeNumber,
    flag,
    switch,
)
from multitower.cli.starting.counts import DeviceCounts, SimulatedCounts, start_counts
from multitower.cli.starting.layouts import (
    Layouts,
    check_layouts,
    read_layouts,
    refuse_with_layouts,
    run_in_layout,
    started_words,
)
from multitower.cli.starting.together import ALONE, TOGETHER, Together
from multitower.errors import RunError
from multitower.processes.run_lock import held_run_directory
from multitower.processes.together import is_first
from multitower.recipes.catalog import find_recipe
from multitower.runs.drawing import drawing_libraries
from multitower.runs.options import RunOptions
from multitower.scaling.measure import ScalingOptions, check_measurable
from multitower.scaling.plan import ScalingPlan
from multitower.scaling.stage_times import pipeline_tables, waiting_in_words
from multitower.scaling.summary import OPTIONS, STRONG, WEAK
from multitower.scaling.words import (
    Table,
    caution,
    losses_in_words,
    prediction_in_words,
    speed_tables,
    split_in_words,
    split_tables,
    turns_in_words,
)

_DEFAULTS = ScalingOptions()
_WAIT_S = 600  # for another job to write its part of a measurement
_LOCK = ".scale.lock"  # a run may train in the same directory meanwhile


def scale(
    recipe: RecipeName,
    *,
    devices: DeviceCounts = None,
    simulate: SimulatedCounts = None,
    layouts: Layouts = None,
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
        Count, flag("N", "Measure N steps in each turn.", str(_DEFAULTS.steps))
    ] = _DEFAULTS.steps,
    rounds: Annotated[
        Count, flag("N", "Give every number of devices N turns.", str(_DEFAULTS.rounds))
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
    clip_norm: ClipNorm = None,
    ema_decay: EmaDecay = None,
    compute_dtype: ComputeDtype = None,
    run_dir: Annotated[
        FileOrDirectory, flag("DIR", "Write to this directory.", "runs/RECIPE-scale-DATE-TIME")
    ] = None,
    force: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Replace another measurement in --run-dir."),
    ] = False,
    add: Annotated[
        bool,
        tyro.conf.FlagCreatePairsOff,
        switch("Add to the measurement in --run-dir, if there is one, such as in another layout."),
    ] = False,
    as_json: AsJson = False,
    in_stages: Annotated[StageFlags, STAGES] = NO_STAGES,
    local: Annotated[LocalFlags, LOCAL] = NOT_LOCAL,
    in_turns: Annotated[AsynchronousFlags, ASYNCHRONOUS] = SYNCHRONOUS,
    together: Annotated[Together, TOGETHER] = ALONE,
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
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        compute_dtype=compute_dtype,
        **in_stages.options(),
        **local.options(),
        **in_turns.options(),
    )
    kinds = tuple(kind for kind, asked in ((STRONG, strong), (WEAK, weak)) if asked)
    how = ScalingOptions(kinds=kinds, steps=steps, rounds=rounds, predict=predict)
    with drawing_libraries("multitower scale"):
        from multitower.scaling.report import write_scaling
    flags: dict[str, Any] = {
        "steps": steps,
        "rounds": rounds,
        "predict": predict,
        **dict.fromkeys(kinds, True),
        **options.as_flags(["global_batch", "seed", *OPTIONS]),
    }
    where_flags = {"devices": devices, "simulate": simulate, "layouts": layouts}
    command = ["multitower", *started_words("scale", recipe, settings, **where_flags, **flags)]
    if add and (run_dir is None or force):
        raise RunError(
            "--add goes on with the measurement in --run-dir DIR, which must be named, and "
            "--force throws it away: leave --force out."
        )
    chosen = replace(chosen, data=functools.cache(chosen.data))  # read once, also for checks
    plan = ScalingPlan(chosen, options, how, run_dir, force=force, add=add)
    if layouts is not None:
        refuse_with_layouts(together, devices=devices, simulate=simulate)
        words = started_words("scale", recipe, settings, **flags, add=True, json=True)
        directory, found = _measure_layouts(plan, layouts, words, quiet=as_json), None
    else:
        counts, where = start_counts(devices, simulate, together)
        on = where if together.settings() else f"{_listed(counts)} of {where}"
        said = f"measuring {chosen.name} on {on}"
        directory, found = plan.measure(counts, lambda: None if as_json else say(said))
        if not is_first():
            return 0
    alone = add or found is None  # so that what other jobs write meanwhile is not lost
    held = held_run_directory(directory, wait_s=_WAIT_S, lock=_LOCK)
    with held if alone else contextlib.nullcontext():
        result: dict[str, Any] = {
            **plan.with_earlier(directory, found),
            "command": shlex.join(command),
        }
        written = write_scaling(directory, result)
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        _say_result(result)
        say(f"wrote {', '.join(map(str, written))}")
    for difference in result["losses"]["differences"]:
        show_error(difference)
    return 1 if result["losses"]["differences"] else 0


def _measure_layouts(plan: ScalingPlan, text: str, words: Sequence[str], *, quiet: bool) -> Path:
    """Has the processes of every layout add their measurement to the directory."""
    layouts = sorted(set(read_layouts(text)), key=lambda one: (one.total, one.processes))
    check_layouts(layouts, plan.options.towers)
    check_measurable(plan.recipe, plan.options, max(layout.processes for layout in layouts))
    counts = [layout.total for layout in layouts]
    how = replace(plan.how, predict=None) if plan.add else plan.how  # others may be there already
    kinds = how.kinds_on(counts, plan.options.towers)
    if plan.how.predict is not None and len(set(counts)) < len(counts):
        raise RunError(
            "--predict takes one step time for each number of devices, and several of these "
            "layouts have equally many: leave it out, or some of them."
        )
    directory = Path(plan.directory(kinds))
    if not quiet:
        named = ", ".join(map(str, layouts))
        say(f"measuring {plan.recipe.name} on {named} (processes x simulated devices of each)")
    for layout in layouts:
        run_in_layout(layout, [*words, "--run-dir", str(directory)])
    return directory


def _listed(counts: Sequence[int]) -> str:
    return ", ".join(map(str, sorted(set(counts))))


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
    said = (
        turns_in_words(result),
        losses_in_words(result),
        prediction_in_words(result),
        caution(result),
    )
    for line in said:
        if line is not None:
            say(line)


def _say_table(table: Table) -> None:
    say(table.title)
    widths = [max(map(len, column)) for column in zip(table.heads, *table.rows, strict=True)]
    for row in (table.heads, *table.rows):
        say("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

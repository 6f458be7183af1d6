"""`multitower verify RECIPE`."""

import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import jax

from multitower.cli.console import say, show_error, show_work
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
    Data,
    EmaDecay,
    FileOrDirectory,
    RecipeName,
    Seed,
    SetOptions,
    ShardUpdate,
    Synthetic,
    WholeNumber,
    flag,
    typed,
)
from multitower.cli.starting.counts import DeviceCounts, SimulatedCounts, start_counts
from multitower.cli.starting.layouts import (
    Layouts,
    ProcessLayout,
    check_layouts,
    read_layouts,
    refuse_with_layouts,
    run_in_layout,
    started_words,
)
from multitower.cli.starting.together import ALONE, TOGETHER, Together
from multitower.processes.together import is_first
from multitower.proof.record import Found, StepRecord
from multitower.proof.verification import Verification, compare_records, with_values
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.runs.verified import (
    OPTIONS,
    Verified,
    read_verified,
    verified_facts,
    verified_from,
)
from multitower.runs.verify import Look, with_defaults
from multitower.runs.verify import verify as compare_runs

_SHOWN = 12  # digits of a fingerprint
_LOOK_AT = "MULTITOWER_LOOK_AT"


def verify(
    recipe: RecipeName,
    *,
    devices: DeviceCounts = None,
    simulate: SimulatedCounts = None,
    layouts: Layouts = None,
    towers: Annotated[
        WholeNumber, flag("T", "Split every batch into T towers.", "8, or the most devices")
    ] = None,
    steps: Annotated[WholeNumber, flag("N", "Compare after each of N steps.", "5")] = None,
    batch_size: BatchSize = None,
    data: Data = None,
    synthetic: Synthetic = False,
    set_options: SetOptions = (),
    seed: Seed = None,
    shard_update: ShardUpdate = False,
    clip_norm: ClipNorm = None,
    ema_decay: EmaDecay = None,
    compute_dtype: ComputeDtype = None,
    against: Annotated[
        FileOrDirectory,
        flag(
            "FILE",
            "Compare with the run that `verify --json > FILE` has printed, perhaps in another "
            "layout; its settings are taken over.",
            "none",
        ),
    ] = None,
    as_json: AsJson = False,
    in_stages: Annotated[StageFlags, STAGES] = NO_STAGES,
    local: Annotated[LocalFlags, LOCAL] = NOT_LOCAL,
    in_turns: Annotated[AsynchronousFlags, ASYNCHRONOUS] = SYNCHRONOUS,
    together: Annotated[Together, TOGETHER] = ALONE,
) -> int:
    """Check that a recipe's steps give the same bits on 1, 2, ... devices and processes.

    Exit code 0 if all of them agree, 1 if not.
    """
    settings = collect_settings(set_options, data, synthetic)
    given = {
        **typed(
            towers=towers,
            steps=steps,
            global_batch=batch_size,
            seed=seed,
            shard_update=shard_update,
            clip_norm=clip_norm,
            ema_decay=ema_decay,
            compute_dtype=compute_dtype,
        ),
        **in_stages.options(),
        **local.options(),
        **in_turns.options(),
    }
    before, settings, options = _with_file(against, recipe, settings, given)
    chosen = find_recipe(recipe, settings)
    if layouts is not None:
        refuse_with_layouts(together, devices=devices, simulate=simulate)
        there = read_layouts(layouts)
        check_layouts(there, options.towers)
        options = with_defaults(options, max(layout.total for layout in there))
        named = ", ".join(map(str, there))
        if not as_json:
            say(f"verifying {chosen.name} on {named} (processes x simulated devices of each)")
        found = _in_layouts(recipe, settings, options, there, has_values=before is None)
    else:
        counts, where = start_counts(devices, simulate, together)
        if _LOOK_AT in os.environ:  # a process that this command has started
            Look.of_text(os.environ[_LOOK_AT]).write(chosen, options, counts[0])
            print("{}")
            return 0
        if not as_json:
            on = where if together.settings() else f"{', '.join(map(str, counts))} of {where}"
            say(f"verifying {chosen.name} on {on}")
        with show_work(f"setting {chosen.name} up") as watch:
            found = compare_runs(chosen, options, counts, watch)
        options = with_defaults(options, jax.process_count() * max(counts))
    if before is not None:
        runs = (f"{against} ({before.run})", *found.runs)
        found = compare_records(runs, (before.steps, *found.records))
    if layouts is not None or is_first():
        if as_json:
            print(json.dumps(verified_facts(found, chosen.name, settings, options), indent=2))
        else:
            _say_table(found)
        for difference in found.differences:
            show_error(str(difference))
        if before is not None and found.differences and (unlike := before.other_software()):
            show_error(
                f"{against} was {unlike}: other versions may give other bits. Compare runs of the "
                "same versions."
            )
    return 1 if found.differences else 0


def _with_file(
    against: Path | None, recipe: str, settings: Mapping[str, str], given: Mapping[str, Any]
) -> tuple[Verified | None, Mapping[str, str], RunOptions]:
    """The run of `--against`, and the settings and options of both."""
    if against is None:
        return None, settings, RunOptions(**given)
    before = read_verified(against)
    settings = before.settings_for(recipe, settings, against)
    return before, settings, before.options_for(given, against, find_recipe(recipe, settings))


def _in_layouts(
    recipe: str,
    settings: Mapping[str, str],
    options: RunOptions,
    layouts: Sequence[ProcessLayout],
    *,
    has_values: bool,
) -> Verification:
    """Runs this command in every layout, and compares what comes out; once more for the values."""
    words = started_words(
        "verify",
        recipe,
        settings,
        **options.as_flags([*OPTIONS, "interleave"]),
        json=True,
    )
    records: list[list[StepRecord]] = []
    for layout in layouts:
        with show_work(f"{options.steps} steps of {layout}"):
            records.append(verified_from(run_in_layout(layout, words)).steps)
    found = compare_records([str(layout) for layout in layouts], records)
    if not has_values:
        return found
    return with_values(found, lambda run, place: _look_again(layouts[run], words, place))


def _look_again(layout: ProcessLayout, words: Sequence[str], place: Found) -> Any:
    with (
        tempfile.TemporaryDirectory() as directory,
        show_work(f"step {place.step} of {layout} once more, to see the values"),
    ):
        look = Look(place, Path(directory) / "value")
        run_in_layout(layout, words, {_LOOK_AT: look.to_text()})
        return look.read()


def _say_table(found: Verification) -> None:
    width = max(_SHOWN, *map(len, found.runs))
    say("  ".join(["step", *(run.ljust(width) for run in found.runs)]).rstrip())
    for number, prints in enumerate(zip(*found.fingerprints, strict=True), start=1):
        cells = [one[:_SHOWN].ljust(width) for one in prints]
        say("  ".join([f"{number:4}", *cells]).rstrip())
    if len(found.runs) == 1:
        say("one run: compare another layout with it, by --json > FILE and --against FILE")
        return
    for name in found.parts[0][-1]:
        agree = all(
            step[name] == first[name]
            for run in found.parts
            for step, first in zip(run, found.parts[0], strict=True)
        )
        say(f"{name:12} {'same bits' if agree else 'DIFFERENT'}")

"""`multitower verify RECIPE`."""

import json
from typing import Annotated

from multitower.cli.console import say, show_error, show_work
from multitower.cli.counts import DeviceCounts, SimulatedCounts, start_counts
from multitower.cli.flags import (
    AsJson,
    BatchSize,
    Data,
    RecipeName,
    Seed,
    SetOptions,
    ShardUpdate,
    Stages,
    Synthetic,
    WholeNumber,
    flag,
)
from multitower.cli.settings import collect_settings
from multitower.proof.verification import Verification
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.runs.verify import verify as compare_runs

_SHOWN = 12  # digits of a fingerprint


def verify(
    recipe: RecipeName,
    *,
    devices: DeviceCounts = None,
    simulate: SimulatedCounts = None,
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
    stages: Stages = None,
    as_json: AsJson = False,
) -> int:
    """Check that a recipe's steps give the same bits on 1, 2, ... devices.

    Exit code 0 if all of them agree, 1 if not.
    """
    chosen = find_recipe(recipe, collect_settings(set_options, data, synthetic))
    options = RunOptions(
        towers=towers,
        steps=steps,
        global_batch=batch_size,
        seed=seed or 0,
        shard_update=shard_update,
        stages=stages,
    )
    counts, where = start_counts(devices, simulate)
    if not as_json:
        say(f"verifying {chosen.name} on {', '.join(map(str, counts))} of {where}")
    with show_work(f"setting {chosen.name} up") as watch:
        found = compare_runs(chosen, options, counts, watch)
    if as_json:
        print(json.dumps(_facts(found), indent=2))
    else:
        _say_table(found)
    for difference in found.differences:
        show_error(str(difference))
    return 1 if found.differences else 0


def _say_table(found: Verification) -> None:
    headings = [f"{count} device{'' if count == 1 else 's'}" for count in found.devices]
    say("  ".join(["step", *(heading.ljust(_SHOWN) for heading in headings)]).rstrip())
    for number, prints in enumerate(zip(*found.fingerprints, strict=True), start=1):
        cells = [one[:_SHOWN].ljust(_SHOWN) for one in prints]
        say("  ".join([f"{number:4}", *cells]).rstrip())
    for name in found.parts[0][-1]:
        agree = all(
            step[name] == first[name]
            for run in found.parts
            for step, first in zip(run, found.parts[0], strict=True)
        )
        say(f"{name:12} {'same bits' if agree else 'DIFFERENT'}")


def _facts(found: Verification) -> dict[str, object]:
    return {
        "devices": list(found.devices),
        "same_bits": not found.differences,
        "fingerprints": [list(run) for run in found.fingerprints],
        "parts": [[dict(step) for step in run] for run in found.parts],
        "differences": [str(one) for one in found.differences],
    }

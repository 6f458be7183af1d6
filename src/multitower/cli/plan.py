"""`multitower plan RECIPE`."""

import json
from typing import Annotated

from multitower.cli.console import say
from multitower.cli.flags.groups import (
    ASYNCHRONOUS,
    LOCAL,
    NO_ROTATION,
    NOT_LOCAL,
    LocalFlags,
    RotationFlags,
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
    RecipeName,
    SetOptions,
    Synthetic,
    WholeNumber,
    flag,
)
from multitower.cli.starting.devices import start_devices
from multitower.cli.wording import in_flags, options_in_flags
from multitower.planning.words import in_lines
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.runs.plan import plan as plan_recipe


def plan(
    recipe: RecipeName,
    *,
    devices: Annotated[
        WholeNumber,
        flag("N", "Plan for N devices on each machine, also if they are not here.", "those here"),
    ] = None,
    machines: Annotated[Count, flag("M", "Plan for M machines.", "1")] = 1,
    towers: Annotated[
        WholeNumber,
        flag("T", "Plan for T towers alone.", "1, 2, 4 and 8 on each device"),
    ] = None,
    memory: Annotated[
        str | None, flag("SIZE", "Memory of one device, such as 24GiB.", "show all layouts")
    ] = None,
    batch_size: BatchSize = None,
    data: Data = None,
    synthetic: Synthetic = False,
    set_options: SetOptions = (),
    clip_norm: ClipNorm = None,
    ema_decay: EmaDecay = None,
    compute_dtype: ComputeDtype = None,
    as_json: AsJson = False,
    local: Annotated[LocalFlags, LOCAL] = NOT_LOCAL,
    in_turns: Annotated[RotationFlags, ASYNCHRONOUS] = NO_ROTATION,
) -> int:
    """Show what a recipe's steps take per device in every layout, before anything runs.

    Exit code 0 if a layout fits into --memory, 1 if none does.
    """
    chosen = find_recipe(recipe, collect_settings(set_options, data, synthetic))
    start_devices(None, None, None)
    options = RunOptions(
        devices=devices,
        towers=towers,
        global_batch=batch_size,
        clip_norm=clip_norm,
        ema_decay=ema_decay,
        compute_dtype=compute_dtype,
        **local.options(),
        **in_turns.options(),
    )
    found = plan_recipe(chosen, options, machines=machines, memory=memory)
    if as_json:
        print(json.dumps(found.to_dict(), indent=2))
    else:
        say(f"planning {chosen.name} for a batch of {found.num_rows} examples")
        about = (found.layouts, found.memory_bytes, found.limits, found.notes)
        for line in in_lines(*about, head="flags of train", named=options_in_flags):
            say(in_flags(line))
    return 0 if found.fits else 1

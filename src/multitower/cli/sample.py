"""`multitower sample DIR --prompt TEXT`."""

import sys
from typing import Annotated

import tyro

from multitower.cli.flags.shared import (
    WHERE,
    Count,
    Number,
    RunDirectory,
    Simulate,
    WholeNumber,
    flag,
    switch,
)
from multitower.cli.resume import read_run
from multitower.cli.starting.devices import start_devices
from multitower.runs.sample import sample as continue_text


def sample(
    directory: RunDirectory,
    *,
    prompt: Annotated[
        str, tyro.conf.arg(metavar="TEXT", help="What the text begins with.", help_behavior_hint="")
    ],
    num_bytes: Annotated[
        Count,
        tyro.conf.arg(
            name="bytes", metavar="N", help="Write N bytes.", help_behavior_hint="(default: 400)"
        ),
    ] = 400,
    temperature: Annotated[
        Number,
        flag("X", "0 takes the most probable byte each time, 1 draws as the model says.", "0.7"),
    ] = None,
    seed: Annotated[WholeNumber, flag("N", "Seed of the draws.", "0")] = None,
    best: Annotated[
        bool, tyro.conf.FlagCreatePairsOff, switch("Use the state that --keep-best kept.")
    ] = False,
    devices: Annotated[
        WholeNumber,
        WHERE,
        flag(
            "N",
            "The number that a run with --sync-every or --asynchronous had, without --towers.",
            "1",
        ),
    ] = None,
    simulate: Simulate = None,
) -> None:
    """Continue a text with the newest or the best checkpoint of a run of gpt."""
    if devices is None and simulate is None:
        devices = 1
    recipe, options = read_run(directory, devices)
    start_devices(devices, simulate, None)
    text = continue_text(
        recipe,
        options,
        directory,
        prompt,
        num_bytes=num_bytes,
        temperature=0.7 if temperature is None else temperature,
        seed=seed or 0,
        best=best,
    )
    # Bytes of the prompt may be no UTF-8, and the terminal may lack characters.
    encoding = sys.stdout.encoding or "utf-8"
    print((prompt + text).encode(encoding, "replace").decode(encoding))

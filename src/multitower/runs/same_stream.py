"""Same stream: a resume trains on the batches that the run began with.

A trainer compares its own settings at a resume. It cannot see the seed, the options of the recipe
and the data, which a run therefore keeps with its checkpoints.
"""

import json
import shlex
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multitower.errors import CheckpointError, RunError, warn
from multitower.processes.together import of_first
from multitower.runs.directory import CHECKPOINTS, CONFIG
from multitower.runs.setup import RecipeJob
from multitower.steps.state.fingerprint import fingerprint
from multitower.training.checkpoints.checkpoint import Checkpoints

_ROWS = 8  # of the first batch: their order comes from the seed and from the size of the data
_DATA = "first_rows"


def describe_stream(job: RecipeJob) -> dict[str, Any]:
    """What determines the batches and the loss of a run, as JSON values."""
    options = {name: value for name, value in job.recipe.options.items() if name != "data"}
    return {
        "recipe": job.recipe.name,
        "seed": job.options.seed,
        "settings": options,
        _DATA: fingerprint(job.first_batch(_ROWS)),
    }


def check_same_stream(now: Mapping[str, Any], directory: Path) -> None:
    """Compares what `describe_stream` returns with what a run's checkpoints hold.

    The data may lie elsewhere; if it has changed, the user is warned.

    Args:
        now: of this run.
        directory: of the run; nothing is compared if it has no checkpoint.

    Raises:
        RunError: the seed or an option of the recipe differs.
    """
    if not of_first((directory / CHECKPOINTS).exists()):  # process 0 may be about to create it
        return
    with Checkpoints(directory / CHECKPOINTS, read_only=True) as checkpoints:
        saved = next(_readable(checkpoints), {})
    there, here = _by_name(saved), _by_name(json.loads(json.dumps(now)))
    for name in here:
        if name in there and there[name] != here[name]:
            raise RunError(
                f"{directory / CONFIG} has {name} {here[name]!r}, and the run began with "
                f"{there[name]!r}. Resuming would give the results of neither run. Put "
                f"{there[name]!r} back, or begin another run: multitower train --config "
                f"{shlex.quote(str(directory / CONFIG))} --run-dir DIR."
            )
    if saved.get(_DATA, now[_DATA]) != now[_DATA]:
        warn(
            f"the training data is not that with which the run in {directory} began: its first "
            "rows are different. The results will be those of neither data set. Put the old data "
            "back, or begin another run."
        )


def _readable(checkpoints: Checkpoints) -> Iterator[dict[str, Any]]:
    """What each checkpoint holds, from the newest on; `fit` says what is damaged."""
    for step in reversed(checkpoints.steps()):
        with suppress(CheckpointError):
            yield checkpoints.about_of(step)


def _by_name(described: Mapping[str, Any]) -> dict[str, Any]:
    names = ("recipe", "seed")
    return {
        **{name: described[name] for name in names if name in described},
        **described.get("settings", {}),
    }

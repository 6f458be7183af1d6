"""What `train` and `resume` have in common: the run itself, and what is told at its end."""

import contextlib
import shlex
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from multitower.cli.console import say, say_parts, show_progress
from multitower.errors import Interrupted, NonFiniteError, RunError
from multitower.recipes.definition import Recipe
from multitower.runs.directory import CHECKPOINTS, CONFIG, PROFILE, REPORT, RESULT
from multitower.runs.options import RunOptions
from multitower.runs.pipeline import pipeline_in_words, planned_pipeline
from multitower.runs.report_page.overview import profile_in_words
from multitower.runs.setup import steps_of
from multitower.runs.train import run
from multitower.training.display import number_in_words


def finish(
    directory: Path,
    recipe: Recipe,
    options: RunOptions,
    *,
    resume: bool = False,
    allow_previous: bool = False,
    begins: Callable[[], object] = lambda: None,
) -> None:
    """Trains, from the start or from a checkpoint, writes the result and the report; says so."""
    known = steps_of(recipe, options) if options.epochs is None else 0  # else the data decides
    pipeline = planned_pipeline(options)
    if pipeline is not None:
        say(pipeline_in_words(pipeline))
    with told_how_to_resume(directory), show_progress(known) as watch:
        result = run(
            recipe,
            options,
            watch,
            directory=directory,
            resume=resume,
            allow_previous=allow_previous,
            begins=begins,
        )
    if result.get("stopped"):
        say(result["stopped"])
    parts = [*_scores(result), f"{result['seconds']:.1f} s"]
    if options.towers is not None:  # without, it depends on the number of devices
        parts.append(f"fingerprint {result['fingerprint'][:12]}")
    say_parts(parts)
    say(f"wrote {directory / RESULT} and {directory / REPORT}")
    found = result.get("pipeline", {})
    if "bubble" in found and found["layout"][1] > 1:
        say(pipeline_in_words(found))
    if "profile" in result:
        say(profile_in_words(directory / PROFILE, result["profile"]))


@contextlib.contextmanager
def told_how_to_resume(directory: Path) -> Generator[None]:
    """Adds the command that resumes a run to the error that it stops with."""
    command = f"multitower resume {shlex.quote(str(directory))}"
    checkpoints = (directory / CHECKPOINTS).absolute()
    try:
        yield
    except Interrupted as stop:
        raise Interrupted(_continued(stop, command), stop.signal) from stop
    except RunError as error:  # such as batches that ran out
        raise RunError(_continued(error, command)) from error
    except NonFiniteError as error:
        if not any(checkpoints.glob("*")):
            raise
        config = shlex.quote(str(directory / CONFIG))
        raise NonFiniteError(
            f"{error} To make the steps since the last one again: {command}. To train anew without "
            f"such steps: multitower train --config {config} --on-nonfinite skip"
        ) from error
    except Exception as error:  # of the user's loader or test phase, with a note that it is saved
        if notes := getattr(error, "__notes__", []):
            error.__notes__ = [_continued(one, command) for one in notes]
        raise


def _continued(error: Exception | str, command: str) -> str:
    """The message of an error, or a note, with a command in place of a call of `fit`."""
    what, call, _ = str(error).partition(" To continue, call fit(")
    return f"{what} To continue: {command}" if call else what


def _scores(result: dict[str, Any]) -> list[str]:
    names = sorted(name for name in result if name.startswith("test_"))
    said = lambda value: "not finite" if value is None else number_in_words(value)
    return [f"{name.replace('_', ' ')} {said(result[name])}" for name in names]

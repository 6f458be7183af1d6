"""One run of a recipe: trains it, scores it on the test set, and returns the result."""

import json
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from multitower.errors import MultitowerError, warn
from multitower.processes.together import is_first, of_first
from multitower.recipes.definition import Recipe
from multitower.runs.directory import EVENTS, METRICS, PROFILE, write_result
from multitower.runs.drawing import drawing_libraries
from multitower.runs.options import RunOptions
from multitower.runs.pipeline import traced_pipeline
from multitower.runs.same_stream import check_same_stream, describe_stream
from multitower.runs.samples import sample_inputs, sample_predictions, sample_texts
from multitower.runs.setup import RecipeJob, for_json, plain
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.state.train_state import TrainState
from multitower.training.observe import EventFiles, MetricsFile
from multitower.training.progress import Hook, Progress
from multitower.training.scoring.chunks import num_rows_of_all
from multitower.training.trace import newest_trace
from multitower.training.tracking.log import ExperimentLog, check_installed


def run(
    recipe: Recipe,
    options: RunOptions,
    watch: Hook = lambda progress: None,
    *,
    directory: Path | None = None,
    resume: bool = False,
    allow_previous: bool = False,
    begins: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    """Trains a recipe and scores it on its test set.

    Args:
        recipe: what to train.
        options: the options of the run.
        watch: called after every step, one step late, so that the devices never wait, and after
            every test phase but the last.
        directory: where to keep checkpoints, `metrics.jsonl` and TensorBoard's `events`, and to
            write `result.json` and `report.html` at the end; None for none of them.
        resume: continue from the newest checkpoint there, if there is one.
        allow_previous: if it is damaged, continue from the one before.
        begins: called in every process before the first step, once nothing can refuse a resume.

    Returns:
        The content of `result.json`: `recipe`, `options` (the recipe's), `seed`, `steps` made,
        `batch_size` (rows of one step over all towers); `test_loss`, `test_accuracy` and so on, the
        recipe's metrics over all test examples, None for one that is not finite; `fingerprint` of
        the whole training state; `towers`, `devices`, and `placement`, the towers of each device;
        `same_bits`, whether the fingerprint is the same on any number of devices; `examples_per_s`
        over the steps after the first one, which compiles (None for a single step); `seconds`, the
        wall time of all of this; `versions` and `host`; of several processes `processes`, how many;
        with stages `pipeline`, as `describe_pipeline`, and with a profile, too, `traced` in it, as
        `traced_pipeline`; with clipping `clip_norm`, the run's or the
        recipe's; with a profile `profile`, its steps; with `keep_best`, `best`: the step and the
        scores of the best state; `ema_decay`, `epochs`, `extra_metrics`, `on_nonfinite`,
        `early_stopping`, if asked for, and `stopped`, why a run with early stopping ended early, or
        None.

    Raises:
        RunError: a resume has another seed, or other options of the recipe, than the run; or the
            test set has no examples.
        NonFiniteError: the loss or a parameter is no longer finite.
        Interrupted: the process received SIGTERM or SIGINT. The step was finished and, with a
            directory, saved.
        MultitowerError: as for `Trainer.fit` and `Trainer.evaluate`.

    Example:
        >>> import jax.numpy as jnp, numpy as np, optax
        >>> from multitower.recipes import DataSets, Recipe
        >>> from multitower.runs.options import RunOptions
        >>> from multitower.runs.train import run
        >>> rows = np.arange(8, dtype=np.float32)
        >>> losses = lambda w, batch: (w - batch) ** 2
        >>> mean = Recipe(
        ...     name="mean",
        ...     data=lambda: DataSets(train=rows, test=rows),
        ...     init=lambda key: jnp.float32(0),
        ...     loss=losses,
        ...     metrics=lambda w, batch: {"loss": losses(w, batch)},
        ...     optimizer=lambda steps: optax.sgd(0.5),
        ...     steps=1,
        ...     global_batch=8,
        ... )
        >>> result = run(mean, RunOptions(devices=1))
        >>> result["steps"], result["towers"], result["test_loss"]
        (1, 1, 5.25)
    """
    began = time.perf_counter()
    if directory is not None:  # also if a recipe changes the working directory
        directory = directory.absolute()
    write_report = None if directory is None else _find_write_report()
    check_installed(options.services())
    job = RecipeJob.of(recipe, options, directory)
    job.check_test_set()
    job.check_scores()
    if options.keep_best is not None and not options.evaluate_every:
        warn(
            f"keep_best={options.keep_best}: the run has one test phase, at its end, so its last "
            "state is kept as the best. Add evaluate_every (--evaluate-every N)."
        )
    stream = None if directory is None else describe_stream(job)
    if directory is not None and stream is not None and resume:
        check_same_stream(stream, directory)
    traced_before = None if directory is None else newest_trace(directory / PROFILE)
    rate: float | None = None
    tested: dict[int, dict[str, float]] = {}

    def note(progress: Progress) -> None:
        nonlocal rate
        if progress.phase == "train":
            rate = progress.examples_per_s
        if progress.phase == "train" or progress.step < job.steps:
            watch(progress)

    def test(state: TrainState) -> None:
        tested[int(state.step)] = job.test(state)

    def batches(first: int) -> Iterator[Any]:
        begins()
        return job.batches(first)

    every = options.evaluate_every or (job.steps if options.keep_best else 0)
    with _observers(directory, job, resume) as observers:
        job.trainer.hooks.extend([note, *observers])
        state = job.trainer.fit(
            batches=batches,
            steps=job.steps,
            resume=resume,
            allow_previous=allow_previous,
            about=stream,
            evaluate=test,
            evaluate_every=min(every, job.steps),
            **job.first_state(),
        )
        made = int(state.step)  # fewer than `steps`, if early stopping ended the run
        if made not in tested:
            test(state)
    result: dict[str, Any] = {
        **job.facts(),
        "steps": made,
        **{
            f"test_{name}": for_json(value)
            for name, value in tested[made].items()
            if not np.ndim(value)  # the report shows no arrays
        },
        "fingerprint": fingerprint(state),
        "examples_per_s": rate,
        "seconds": round(time.perf_counter() - began, 3),
    }
    # A run that is resumed without a profile may have made one before.
    if directory is not None and options.profile is not None and (directory / PROFILE).exists():
        _note_profile(result, job, directory / PROFILE, traced_before)
    if directory is not None and write_report is not None:
        _write(directory, write_report, job, state, result)
    of_first(0)  # all processes wait until everything is written
    return result


def _note_profile(
    result: dict[str, Any], job: RecipeJob, profile: Path, traced_before: Path | None
) -> None:
    """Adds the steps of the profile to the result, and of stages what their trace shows."""
    result["profile"] = job.options.profile
    layout = job.trainer.step.layout
    if layout is not None:
        # A trace from before a resume may be of another layout.
        is_new = newest_trace(profile) != traced_before
        found = traced_pipeline(result["pipeline"], layout, profile)
        result["pipeline"]["traced"] = found if is_new else None


def _write(
    directory: Path,
    write_report: Callable[..., Path],
    job: RecipeJob,
    state: TrainState,
    result: dict[str, Any],
) -> None:
    """Writes the result and the report of a run; call it on every process."""
    if is_first():
        write_result(directory, result)
    recipe = job.recipe
    # On every process: the parameters may be split over all of them.
    shown = {
        "samples": _or_none("samples", lambda: sample_predictions(recipe, state, job.data.test)),
        "texts": _or_none("texts", lambda: sample_texts(recipe, state, job.data.test)),
    }
    if is_first():
        config = {"settings": recipe.options, "options": asdict(job.options)}
        write_report(
            directory,
            config={"recipe": recipe.name, **config},
            result=result,
            placement=list(job.placement().items()),
            **shown,
        )


def _or_none(what: str, make: Callable[[], list[Any]]) -> list[Any]:
    """What a report shows of a model; nothing if it fails: one device may have no room for it."""
    try:
        return make()
    except MultitowerError:
        raise
    except Exception as error:  # the run is finished, and its result is written
        warn(f"the report has no {what}: {type(error).__name__}: {error}")
        return []


def score(
    recipe: Recipe, options: RunOptions, directory: Path, *, best: bool = False
) -> dict[str, Any]:
    """Scores the newest checkpoint of a run on the recipe's test set.

    Args:
        recipe: the recipe of the run.
        options: the options of the run; `devices` may differ.
        directory: the directory of the run.
        best: score the best state that the run has kept.

    Returns:
        `recipe`, `step` (updates made), `test_loss` and so on, None for one that is not finite,
        `fingerprint` of the state, and `examples`, the number of test examples; None for a loader.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        MultitowerError: as for `Trainer.evaluate`.

    Example:
        >>> from pathlib import Path
        >>> from multitower.recipes import find_recipe
        >>> from multitower.runs.options import RunOptions
        >>> from multitower.runs.train import score
        >>> score(find_recipe("digits"), RunOptions(devices=1), Path("nowhere"))
        Traceback (most recent call last):
        multitower.CheckpointError: ...nowhere/checkpoints does not exist: ...
    """
    job = RecipeJob.of(recipe, options, directory.absolute(), keep_best=False)
    state = job.trainer.restore(**job.first_state(), best=best)
    return {
        "recipe": recipe.name,
        "step": int(state.step),
        **{f"test_{name}": for_json(value) for name, value in job.test(state).items()},
        "fingerprint": fingerprint(state),
        "examples": num_rows_of_all(job.data.test),
    }


def _find_write_report() -> Callable[..., Path]:
    with drawing_libraries("the report of a run"):
        from multitower.runs.report import write_report  # noqa: PLC0415 (slow, and optional)
    return write_report


@contextmanager
def _observers(directory: Path | None, job: RecipeJob, resume: bool) -> Generator[list[Hook]]:
    """The hooks that write what the run reports."""
    if directory is None or not is_first():  # with several processes only process 0 writes
        yield []
        return
    found = {"steps": job.steps, "global_batch": job.global_batch}  # also where no flag says it
    options = {**job.recipe.options, **asdict(job.options), **found}
    config = {"recipe": job.recipe.name, **options}
    text = json.dumps(plain(config), indent=2)
    with ExitStack() as opened:
        lines = opened.enter_context(MetricsFile(directory / METRICS))
        texts = {"configuration": f"```\n{text}\n```"}
        events = opened.enter_context(EventFiles(directory / EVENTS, texts))
        logs = [
            opened.enter_context(ExperimentLog(service, directory, config))
            for service in job.options.services()
        ]
        images = None if resume else sample_inputs(job.recipe, job.first_batch)
        if images is not None:
            events.add_images("inputs", images, 0)
        yield [lines, events, *logs]

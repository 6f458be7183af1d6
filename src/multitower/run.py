"""One run of a recipe: train, score on the test set, and say what came out."""

import json
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from multitower import provenance
from multitower.augmentation import augmented
from multitower.data import make_batch, make_batches
from multitower.fingerprint import fingerprint
from multitower.observe import EventFiles, MetricsFile
from multitower.placement import Placement
from multitower.progress import Hook, Progress
from multitower.recipes import DataSets, Recipe
from multitower.recipes.recipe import takes
from multitower.report import write_report
from multitower.rows import take_apart
from multitower.run_directory import EVENTS, METRICS, write_result
from multitower.run_options import LARGEST_SEED, RunOptions
from multitower.samples import sample_inputs, sample_predictions
from multitower.train_state import TrainState
from multitower.trainer import Trainer

__all__ = ["RunOptions", "run", "score"]

# Without gradients so many batches fit where one did: fewer round trips.
_TEST_BATCHES = 4


def run(
    recipe: Recipe,
    options: RunOptions,
    watch: Hook = lambda progress: None,
    *,
    directory: Path | None = None,
    resume: bool = False,
    allow_previous: bool = False,
) -> dict[str, Any]:
    """Trains a recipe and scores it on its test set.

    Args:
        recipe: what to train.
        options: where, how long, from which seed.
        watch: called after every step, one step late, so that the devices are never kept waiting,
            and after every test phase but the last.
        directory: where to keep checkpoints, `metrics.jsonl` and TensorBoard's `events`, and to
            write `result.json` and `report.html` at the end; None for none of them.
        resume: go on from the newest checkpoint there, if there is one.
        allow_previous: when that one is damaged, go on from the one before.

    Returns:
        What goes to `result.json`: `recipe`, `options` (the recipe's), `seed`, `steps`,
        `batch_size` (rows of one step over all towers); `test_loss`, `test_accuracy` and so on,
        the recipe's metrics over all test examples; `fingerprint` of the whole training state;
        `towers`, `devices`, and `placement`, the towers of each device; `same_bits`, whether the
        fingerprint is the same on any number of devices; `examples_per_s` over the steps after the
        first one, which compiles (None for a single step); `seconds`, the wall time of all of this;
        `versions` and `host`; with `keep_best`, `best`: the step and the scores of the best state.

    Raises:
        NonFiniteError: the loss or a parameter is no longer finite.
        Interrupted: SIGTERM or SIGINT came; the step was finished and, with a directory, saved.
        MultitowerError: what `Trainer.fit` and `Trainer.evaluate` raise.

    Example:
        >>> from multitower.recipes import find_recipe
        >>> from multitower.run import RunOptions, run
        >>> result = run(find_recipe("digits"), RunOptions(steps=2, global_batch=16, devices=2))
        >>> result["steps"], result["towers"], 0 <= result["test_accuracy"] <= 1
        (2, 2, True)
    """
    began = time.perf_counter()
    job = _Job.of(recipe, options, directory)
    steps = options.steps or recipe.steps
    rate: float | None = None
    tested: dict[int, dict[str, float]] = {}

    def note(progress: Progress) -> None:
        nonlocal rate
        if progress.phase == "train":
            rate = progress.examples_per_s
        if progress.phase == "train" or progress.step < steps:
            watch(progress)

    def test(state: TrainState) -> None:
        tested[int(state.step)] = job.test(state)

    with _observers(directory, job, resume) as observers:
        job.trainer.hooks.extend([note, *observers])
        state = job.trainer.fit(
            batches=job.batches,
            steps=steps,
            resume=resume,
            allow_previous=allow_previous,
            evaluate=test,
            evaluate_every=options.evaluate_every,
            **job.first_state(),
        )
        if steps not in tested:
            test(state)
    result = {
        **job.facts(),
        "steps": steps,
        **{f"test_{name}": value for name, value in tested[steps].items()},
        "fingerprint": fingerprint(state),
        "examples_per_s": rate,
        "seconds": round(time.perf_counter() - began, 3),
    }
    if directory is not None:
        write_result(directory, result)
        config = {"recipe": recipe.name, "settings": recipe.options, "options": asdict(options)}
        samples = sample_predictions(recipe, state, job.data.test)
        write_report(
            directory,
            config=config,
            result=result,
            placement=list(_placement(job.trainer.step.placement).items()),
            samples=samples,
        )
    return result


def score(
    recipe: Recipe, options: RunOptions, directory: Path, *, best: bool = False
) -> dict[str, Any]:
    """Scores the newest checkpoint of a run on the recipe's test set, once more or elsewhere.

    Args:
        recipe: of the run.
        options: of the run; `devices` may be others.
        directory: of the run.
        best: score the best state that the run has kept instead.

    Returns:
        `recipe`, `step` (updates made), `test_loss` and so on, `fingerprint` of the state, and
        `examples`, how many were counted.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        MultitowerError: what `Trainer.evaluate` raises.
    """
    job = _Job.of(recipe, options, directory, keep_best=False)
    state = job.trainer.restore(**job.first_state(), best=best)
    return {
        "recipe": recipe.name,
        "step": int(state.step),
        **{f"test_{name}": value for name, value in job.test(state).items()},
        "fingerprint": fingerprint(state),
        "examples": take_apart(job.data.test, 0, name="data").num_rows,
    }


@dataclass(frozen=True)
class _Job:
    """A recipe that is set up: its trainer, its data, and the rows of a step."""

    recipe: Recipe
    options: RunOptions
    trainer: Trainer
    data: DataSets
    global_batch: int

    @classmethod
    def of(
        cls, recipe: Recipe, options: RunOptions, directory: Path | None, keep_best: bool = True
    ) -> "_Job":
        steps = options.steps or recipe.steps
        global_batch = options.global_batch or recipe.global_batch
        data = recipe.data()
        num_examples = take_apart(data.train, 0, name="data").num_rows
        trainer = Trainer(
            recipe.loss if recipe.augment is None else augmented(recipe.loss, recipe.augment),
            recipe.make_optimizer(steps, steps_per_epoch=num_examples / global_batch),
            run_dir=directory,
            devices=options.devices,
            towers=options.towers,
            global_batch=global_batch,
            ema_decay=recipe.ema_decay,
            checkpoint_every=options.checkpoint_every,
            keep_best=options.keep_best if keep_best else None,
            best="min" if options.best == "min" else "max",
        )
        return cls(recipe, options, trainer, data, global_batch)

    def batches(self, first: int) -> Iterator[Any]:
        return make_batches(
            self.data.train, global_batch=self.global_batch, first=first, **self._order()
        )

    def first_batch(self, num_rows: int) -> Any:
        return make_batch(self.data.train, global_batch=num_rows, step=0, **self._order())

    def _order(self) -> dict[str, Any]:
        keyed = self.recipe.augment is not None
        return {"seed": self.options.seed, "distort": self.recipe.distort, "keyed": keyed}

    def first_state(self) -> dict[str, Any]:
        """What a run begins with."""
        recipe, key = self.recipe, jax.random.key(self.options.seed)
        # No key that `init` gets by splitting is this one: no split has so many parts.
        rng = jax.random.fold_in(key, LARGEST_SEED) if takes(recipe.loss, "rng") else None
        model_state = None if recipe.model_state is None else recipe.model_state()
        return {"params": recipe.init(key), "model_state": model_state, "rng": rng}

    def test(self, state: TrainState) -> dict[str, float]:
        return self.trainer.evaluate(
            self.recipe.metrics,
            state,
            self.data.test,
            global_batch=_TEST_BATCHES * self.global_batch,
        )

    def facts(self) -> dict[str, Any]:
        """What a result says of the run that does not come out of it."""
        placement = self.trainer.step.placement
        facts: dict[str, Any] = {
            "recipe": self.recipe.name,
            "options": dict(self.recipe.options),
            "seed": self.options.seed,
            "batch_size": self.global_batch,
            "towers": placement.num_towers,
            "devices": len(placement.devices),
            "placement": _placement(placement),
            "same_bits": self.options.towers is not None,
            "versions": provenance.versions(),
            "host": provenance.host(placement.devices[0]),
        }
        if self.trainer.best is not None:
            step, scores = self.trainer.best
            facts["best"] = {"step": step, **scores}
        return facts


def _placement(placement: Placement) -> dict[str, list[int]]:
    return {
        f"{device.platform}:{device.id}": list(towers)
        for device, towers in zip(placement.devices, placement.towers_on, strict=True)
    }


@contextmanager
def _observers(directory: Path | None, job: _Job, resume: bool) -> Generator[list[Hook]]:
    """What writes down what the run reports."""
    if directory is None:
        yield []
        return
    options = {**job.recipe.options, **asdict(job.options)}
    text = json.dumps({"recipe": job.recipe.name, **options}, indent=2)
    with (
        MetricsFile(directory / METRICS) as lines,
        EventFiles(directory / EVENTS, {"configuration": f"```\n{text}\n```"}) as events,
    ):
        images = None if resume else sample_inputs(job.recipe, job.first_batch)
        if images is not None:
            events.add_images("inputs", images, 0)
        yield [lines, events]

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
from multitower.data import make_batches
from multitower.errors import RunError
from multitower.fingerprint import fingerprint
from multitower.observe import EventFiles, MetricsFile
from multitower.placement import check_towers
from multitower.progress import Hook, Progress
from multitower.recipes import DataSets, Recipe
from multitower.recipes.recipe import takes
from multitower.rows import take_apart
from multitower.trainer import Trainer

# As many bits as both NumPy's and JAX's generators take.
_LARGEST_SEED = 2**32 - 1
# Without gradients so many batches fit where one did: fewer round trips.
_TEST_BATCHES = 4


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run may choose.

    Attributes:
        devices: how many to use; all by default.
        towers: how many towers, for the same bits on any number of devices; by default one per
            device, as fast as can be.
        steps: updates to make; by default the recipe's number.
        global_batch: rows of one step, over all towers; by default the recipe's number.
        seed: of the first parameters and of the order of the data, 0 to 2**32 - 1.
        checkpoint_every: steps from one checkpoint to the next; the last step is always saved.

    Raises:
        RunError: a number of steps, rows or a seed that is none.
        DeviceError: a number of towers that is none.
    """

    devices: int | None = None
    towers: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    seed: int = 0
    checkpoint_every: int = 1000

    def __post_init__(self) -> None:
        check_towers(self.towers)
        if self.steps is not None and self.steps < 1:
            raise RunError(f"steps={self.steps}: a run makes at least one step.")
        if self.global_batch is not None and self.global_batch < 1:
            raise RunError(f"a batch of {self.global_batch} examples: a step needs at least one.")
        if self.checkpoint_every < 1:
            raise RunError(f"checkpoint_every={self.checkpoint_every}: it must be 1 or more.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise RunError(f"seed={self.seed} is out of range: use 0 to {_LARGEST_SEED}.")


def run(
    recipe: Recipe,
    options: RunOptions,
    watch: Hook = lambda progress: None,
    *,
    directory: Path | None = None,
    resume: bool = False,
) -> dict[str, Any]:
    """Trains a recipe and scores it on its test set.

    Args:
        recipe: what to train.
        options: where, how long, from which seed.
        watch: called after every step, one step late: the devices are never kept waiting.
        directory: where to keep checkpoints, `metrics.jsonl` and TensorBoard's `events`; None for
            none of them.
        resume: go on from the newest checkpoint there, if there is one.

    Returns:
        What goes to `result.json`: `recipe`, `options` (the recipe's), `seed`, `steps`,
        `batch_size` (rows of one step over all towers); `test_loss`, `test_accuracy` and so on,
        the recipe's metrics over all test examples; `fingerprint` of the whole training state;
        `towers`, `devices`; `same_bits`, whether the fingerprint is the same on any number of
        devices; `examples_per_s` over the steps after the first one, which compiles (None for a
        single step); `seconds`, the wall time of all of this; `versions` and `host`.

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
    steps = options.steps or recipe.steps
    rate: float | None = None

    def note_rate(progress: Progress) -> None:
        nonlocal rate
        if progress.phase == "train":
            rate = progress.examples_per_s
            watch(progress)

    trainer, data, global_batch = _set_up(recipe, options, directory)

    def batches(first: int) -> Iterator[Any]:
        return make_batches(
            data.train,
            global_batch=global_batch,
            seed=options.seed,
            first=first,
            distort=recipe.distort,
            keyed=recipe.augment is not None,
        )

    with _observers(directory, recipe, options) as observers:
        trainer.hooks.extend([note_rate, *observers])
        first = _first_state(recipe, options)
        state = trainer.fit(batches=batches, steps=steps, resume=resume, **first)
        scores = trainer.evaluate(
            recipe.metrics, state, data.test, global_batch=_TEST_BATCHES * global_batch
        )
    placement = trainer.step.placement
    return {
        "recipe": recipe.name,
        "options": dict(recipe.options),
        "seed": options.seed,
        "steps": steps,
        "batch_size": global_batch,
        **{f"test_{name}": value for name, value in scores.items()},
        "fingerprint": fingerprint(state),
        "towers": placement.num_towers,
        "devices": len(placement.devices),
        "same_bits": options.towers is not None,
        "examples_per_s": rate,
        "seconds": round(time.perf_counter() - began, 3),
        "versions": provenance.versions(),
        "host": provenance.host(placement.devices[0]),
    }


def score(recipe: Recipe, options: RunOptions, directory: Path) -> dict[str, Any]:
    """Scores the newest checkpoint of a run on the recipe's test set, once more or elsewhere.

    Args:
        recipe: of the run.
        options: of the run; `devices` may be others.
        directory: of the run.

    Returns:
        `recipe`, `step` (updates made), `test_loss` and so on, `fingerprint` of the state, and
        `examples`, how many were counted.

    Raises:
        CheckpointError: there is no checkpoint, or it cannot be read.
        MultitowerError: what `Trainer.evaluate` raises.
    """
    trainer, data, global_batch = _set_up(recipe, options, directory)
    state = trainer.restore(**_first_state(recipe, options))
    scores = trainer.evaluate(
        recipe.metrics, state, data.test, global_batch=_TEST_BATCHES * global_batch
    )
    return {
        "recipe": recipe.name,
        "step": int(state.step),
        **{f"test_{name}": value for name, value in scores.items()},
        "fingerprint": fingerprint(state),
        "examples": take_apart(data.test, 0, name="data").num_rows,
    }


def _set_up(
    recipe: Recipe, options: RunOptions, directory: Path | None
) -> tuple[Trainer, DataSets, int]:
    """The trainer of a recipe, its data, and the rows of a step."""
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
    )
    return trainer, data, global_batch


def _first_state(recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """What a run begins with."""
    key = jax.random.key(options.seed)
    return {
        "params": recipe.init(key),
        "model_state": None if recipe.model_state is None else recipe.model_state(),
        # No key that `init` gets by splitting is this one: no split has so many parts.
        "rng": jax.random.fold_in(key, _LARGEST_SEED) if takes(recipe.loss, "rng") else None,
    }


@contextmanager
def _observers(
    directory: Path | None, recipe: Recipe, options: RunOptions
) -> Generator[list[Hook]]:
    """What writes down what the run reports."""
    if directory is None:
        yield []
        return
    text = json.dumps({"recipe": recipe.name, **recipe.options, **asdict(options)}, indent=2)
    with (
        MetricsFile(directory / "metrics.jsonl") as lines,
        EventFiles(directory / "events", {"configuration": f"```\n{text}\n```"}) as events,
    ):
        yield [lines, events]

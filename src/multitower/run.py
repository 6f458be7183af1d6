"""One run of a recipe: train, score on the test set, and say what came out."""

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax

from multitower import provenance
from multitower.data import make_batches
from multitower.errors import RunError
from multitower.evaluation import evaluate
from multitower.feeding import prefetch
from multitower.fingerprint import fingerprint
from multitower.placement import check_towers
from multitower.recipes import Recipe
from multitower.train_state import TrainState
from multitower.train_step import TrainStep, train_step

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

    Raises:
        RunError: a number of steps, rows or a seed that is none.
        DeviceError: a number of towers that is none.
    """

    devices: int | None = None
    towers: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        check_towers(self.towers)
        if self.steps is not None and self.steps < 1:
            raise RunError(f"steps={self.steps}: a run makes at least one step.")
        if self.global_batch is not None and self.global_batch < 1:
            raise RunError(f"a batch of {self.global_batch} examples: a step needs at least one.")
        if not 0 <= self.seed <= _LARGEST_SEED:
            raise RunError(f"seed={self.seed} is out of range: use 0 to {_LARGEST_SEED}.")


@dataclass(frozen=True)
class Progress:
    """How far a run has come.

    Attributes:
        step: updates made.
        num_steps: updates to make.
        metrics: of that step: `"loss"` and what else the recipe's loss reports.
        examples_per_s: mean over the steps after the first one, which compiles; None at the first.
    """

    step: int
    num_steps: int
    metrics: dict[str, float]
    examples_per_s: float | None


def run(
    recipe: Recipe, options: RunOptions, watch: Callable[[Progress], None] = lambda progress: None
) -> dict[str, Any]:
    """Trains a recipe and scores it on its test set.

    Args:
        recipe: what to train.
        options: where, how long, from which seed.
        watch: called after every step, one step late: the devices are never kept waiting.

    Returns:
        What goes to `result.json`: `recipe`, `seed`, `steps`, `batch_size` (rows of one step over
        all towers); `test_loss`, `test_accuracy` and so on, the recipe's metrics over all test
        examples; `fingerprint` of the whole training state; `towers`, `devices`; `same_bits`,
        whether the fingerprint is the same on any number of devices; `examples_per_s` over the
        steps after the first one, which compiles (None for a single step); `seconds`, the wall
        time of all of this; `versions` and `host`.

    Raises:
        RunError: the loss is no longer finite.
        MultitowerError: what `train_step` and `evaluate` raise.

    Example:
        >>> from multitower.recipes import find_recipe
        >>> from multitower.run import RunOptions, run
        >>> result = run(find_recipe("digits"), RunOptions(steps=2, global_batch=16, devices=2))
        >>> result["steps"], result["towers"], 0 <= result["test_accuracy"] <= 1
        (2, 2, True)
    """
    began = time.perf_counter()
    steps = options.steps or recipe.steps
    global_batch = options.global_batch or recipe.global_batch
    devices, towers = options.devices, options.towers
    step = train_step(
        recipe.loss,
        recipe.optimizer(steps),
        devices=devices,
        towers=towers,
        global_batch=global_batch,
    )
    data = recipe.data()
    state = step.init(recipe.init(jax.random.key(options.seed)))
    batches = make_batches(
        data.train, global_batch=global_batch, seed=options.seed, distort=recipe.distort
    )
    ahead = prefetch(
        itertools.islice(batches, steps),
        devices=devices,
        towers=towers,
        global_batch=global_batch,
    )
    state, rate = _train(step, state, ahead, (steps, global_batch), watch)
    scores = evaluate(
        recipe.metrics,
        state.params,
        data.test,
        global_batch=_TEST_BATCHES * global_batch,
        devices=devices,
        towers=towers,
    )
    return {
        "recipe": recipe.name,
        "seed": options.seed,
        "steps": steps,
        "batch_size": global_batch,
        **{f"test_{name}": value for name, value in scores.items()},
        "fingerprint": fingerprint(state),
        "towers": step.placement.num_towers,
        "devices": len(step.placement.devices),
        "same_bits": towers is not None,
        "examples_per_s": rate,
        "seconds": round(time.perf_counter() - began, 3),
        "versions": provenance.versions(),
        "host": provenance.host(step.placement.devices[0]),
    }


def _train(
    step: TrainStep,
    state: TrainState,
    batches: Iterator[Any],
    size: tuple[int, int],
    watch: Callable[[Progress], None],
) -> tuple[TrainState, float | None]:
    """Makes all steps; returns the last state and the examples per second."""
    num_steps, global_batch = size
    first_done: float | None = None
    rate: float | None = None

    def read(number: int, metrics: dict[str, jax.Array]) -> None:
        nonlocal first_done, rate
        values = {name: float(value) for name, value in metrics.items()}  # host-device sync
        now = time.perf_counter()
        if first_done is None:
            first_done = now
        else:
            rate = (number - 1) * global_batch / (now - first_done)
        if not math.isfinite(values["loss"]):
            raise RunError(
                f"the loss is {values['loss']} at step {number} of {num_steps}: training has "
                "diverged, or the data hold numbers that are not finite."
            )
        watch(Progress(number, num_steps, values, rate))

    waiting: tuple[int, dict[str, jax.Array]] | None = None
    for number, batch in enumerate(batches, start=1):
        state, metrics = step(state, batch)
        # The metrics of the step before: reading this step's would let the devices run dry, and
        # reading none would let the host run ahead without bound.
        if waiting:
            read(*waiting)
        waiting = (number, metrics)
    assert waiting
    read(*waiting)
    return state, rate

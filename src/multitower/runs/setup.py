"""Sets a recipe up: its trainer, its data, its first state."""

import functools
import math
from collections.abc import Callable, Generator, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from multitower.data.augmentation import augmented
from multitower.data.batches import make_batch, make_batches
from multitower.engines.collectives import axis_of
from multitower.errors import RunError
from multitower.hardware import provenance
from multitower.hardware.devices import device_name
from multitower.processes.together import are_several
from multitower.recipes.definition import DataSets, Recipe, takes
from multitower.runs.options import LARGEST_SEED, RunOptions
from multitower.runs.pipeline import describe_pipeline
from multitower.steps.optimizing.extra_metrics import RATE
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.state.train_state import TrainState
from multitower.towers.leaves import as_python
from multitower.towers.rows import take_apart
from multitower.training.checkpoints.best import check_score
from multitower.training.fitting.calls import Call, Feeding
from multitower.training.fitting.epochs import steps_in
from multitower.training.scoring.chunks import is_iterator
from multitower.training.trainer import Trainer

if TYPE_CHECKING:
    import optax

# Without gradients this many batches fit where one did: fewer host-device round trips.
_TEST_BATCHES = 4


@dataclass(frozen=True)
class RecipeJob:
    """A recipe that is set up: its trainer, its data, and the rows of a step."""

    recipe: Recipe
    options: RunOptions
    trainer: Trainer
    data: DataSets
    global_batch: int
    steps: int

    @classmethod
    def of(
        cls, recipe: Recipe, options: RunOptions, directory: Path | None, keep_best: bool = True
    ) -> "RecipeJob":
        """Sets a recipe up. Its trainer saves to `directory`; with None it saves nothing."""
        data = recipe.load()
        global_batch = options.global_batch or recipe.global_batch
        steps = steps_of(recipe, options, data)
        kept: dict[str, Any] = {}
        if directory is not None:
            kept = {
                "checkpoint_every": options.checkpoint_every,
                "keep_last": options.keep_last,
                "profile": options.profile_pair(),
            }
        trainer = Trainer(
            recipe.loss if recipe.augment is None else augmented(recipe.loss, recipe.augment),
            make_optimizer(recipe, options, steps, data),
            run_dir=directory,
            global_batch=global_batch,
            on_nonfinite="skip" if options.on_nonfinite == "skip" else "stop",
            keep_best=options.keep_best if keep_best else None,
            shard_update=options.shard_update,
            shard_params=options.shard_params,
            stages=options.stages,
            layout=options.layout_pair(),
            interleave=options.interleave,
            remat=options.remat,
            steps_per_call=options.steps_per_call,
            stale_scale=options.scale_of_stale(),
            momentum_correction=options.momentum_correction,
            extra_metrics=options.metric_names(),
            early_stopping=options.stopping_rule(),
            **kept,
            best="min" if options.best == "min" else "max",
            hooks=[],  # the caller of `fit` sets what is shown
            **planned_options(recipe, options),
        )
        return cls(recipe, options, trainer, data, global_batch, steps)

    def batches(self, first: int) -> Iterator[Any]:
        """The training batches from number `first` on."""
        return make_batches(
            self.data.train,
            global_batch=self.global_batch,
            first=first,
            lazy=are_several(),
            **self._order(),
        )

    def calls(self, first: int, last: int) -> Generator[Call]:
        """Yields the calls of steps `first` + 1 to `last`, with batches copied ahead of time.

        With `steps_per_call` a call ends at each meeting of local updates.
        """
        return self._feeding().calls(islice(self.batches(first), last - first), first, last)

    def first_batch(self, num_rows: int) -> Any:
        """The first rows of the first batch, or all if it has fewer."""
        # Of the whole batch, for which a distortion draws its numbers.
        rows = {"step": 0, "places": np.arange(min(num_rows, self.global_batch))}
        return make_batch(self.data.train, global_batch=self.global_batch, **rows, **self._order())

    def _order(self) -> dict[str, Any]:
        keyed = self.recipe.augment is not None
        return {"seed": self.options.seed, "distort": self.recipe.distort, "keyed": keyed}

    def first_state(self) -> dict[str, Any]:
        """The arguments of `TrainStep.init`; if the model is split, `params` may be a function."""
        recipe, key = self.recipe, jax.random.key(self.options.seed)
        # `init` cannot get this key by splitting: no split has so many parts.
        rng = jax.random.fold_in(key, LARGEST_SEED) if takes(recipe.loss, "rng") else None
        model_state = None if recipe.model_state is None else recipe.model_state()
        params = functools.partial(recipe.init, key)
        in_parts = self.options.stages is not None or self.options.shard_params
        if not in_parts or not _can_be_traced(params):
            params = params()
        return {"params": params, "model_state": model_state, "rng": rng}

    def check_test_set(self) -> None:
        """Checks the test set before training, since a run ends with a score of it.

        Raises:
            RunError: it has no examples.
            BatchError: its arrays have different numbers of rows.
        """
        test = self.data.test
        if is_iterator(test):  # how many rows it has is not known
            return
        if not any(np.shape(leaf)[0] for leaf in jax.tree.leaves(test) if np.ndim(leaf)):
            raise RunError(
                f"the test set of {self.recipe.name} has no examples, and a run ends with a score "
                "of it. Put examples into DataSets(train, test).test, if need be some of train."
            )
        take_apart(test, 0, name="data.test")

    def check_scores(self) -> None:
        """Checks the names of scores in `keep_best` and `early_stopping`, before training.

        Raises:
            RunError: the recipe has no such score.
        """
        rule = self.options.stopping_rule()
        named = {
            "keep_best": self.options.keep_best,
            "early_stopping": None if rule is None else rule.score,
        }
        if not any(named.values()) or is_iterator(self.data.test):  # its rows are not known yet
            return
        recipe = self.recipe
        row = jax.tree.map(lambda leaf: leaf[:1] if np.ndim(leaf) else leaf, self.data.test)
        extras: dict[str, Any] = {}
        if takes(recipe.metrics, "model_state") and recipe.model_state is not None:
            extras["model_state"] = recipe.model_state()
        score = functools.partial(recipe.metrics, **extras)
        try:
            params = jax.eval_shape(recipe.init, jax.random.key(0))
        except Exception:  # it uses values of arrays: the first test phase checks the names
            return
        trace = jax.make_jaxpr(score, axis_env=axis_of(1), return_shape=True)
        _, scores = trace(params, row)
        for option, name in named.items():
            if name is not None:
                check_score(name, scores, option)

    def test(self, state: TrainState) -> dict[str, float]:
        """Scores a state on the test set."""
        return self.trainer.evaluate(
            self.recipe.metrics,
            state,
            self.data.test,
            global_batch=_TEST_BATCHES * self.global_batch,
        )

    def feeding(self) -> dict[str, Any]:
        """Arguments of `prefetch` for batches; with stages they go to the first stage's devices."""
        return self._feeding().arguments()

    def _feeding(self) -> Feeding:
        options = self.options
        where = {"devices": options.devices, "towers": options.towers}
        most, meets = options.steps_per_call, options.sync_every or 0
        return Feeding(self.trainer.step, where, self.global_batch, most, (meets,))

    def placement(self) -> dict[str, list[int]]:
        """The towers of each device, by its name; with stages, those of its replica."""
        layout, placement = self.trainer.step.layout, self.trainer.step.placement
        replicas = layout.all_replicas if layout else [(device,) for device in placement.devices]
        return {
            device_name(device): list(towers)
            for devices, towers in zip(replicas, placement.towers_on, strict=True)
            for device in devices
        }

    def facts(self) -> dict[str, Any]:
        """The part of a result that is known before the run: recipe, options, versions, host."""
        step, about = self.trainer.step, self.recipe.about_data
        found = self.placement()
        facts: dict[str, Any] = {
            "recipe": self.recipe.name,
            "options": plain({**self.recipe.options, **(about() if about else {})}),
            "seed": self.options.seed,
            "batch_size": self.global_batch,
            "towers": step.placement.num_towers,
            "devices": len(found),
            "placement": found,
            "same_bits": self.options.towers is not None,
            "versions": provenance.versions(),
            "host": provenance.host(step.placement.devices[0]),
        }
        clip_norm = clip_norm_of(self.recipe, self.options)
        if clip_norm is not None:
            facts["clip_norm"] = plain(clip_norm)
        for name in ("ema_decay", "epochs"):
            if (value := getattr(self.options, name)) is not None:
                facts[name] = value
        if names := self.options.metric_names():
            facts["extra_metrics"] = names
        if self.options.on_nonfinite != "stop":
            facts["on_nonfinite"] = self.options.on_nonfinite
        if self.options.early_stopping is not None:
            facts["early_stopping"] = self.options.early_stopping
            facts["stopped"] = self.trainer.stopped
        if (layout := step.layout) is not None:
            remat = self.options.remat
            facts["pipeline"] = describe_pipeline(layout, step.segments, remat=remat)
        if are_several():
            facts["processes"] = jax.process_count()
        if (best := self.trainer.best) is not None:
            at, scores = best
            facts["best"] = {"step": at, **{name: for_json(x) for name, x in scores.items()}}
        return facts


def for_json(value: Any) -> Any:
    """A finite number, or None, since JSON has no NaN and no infinity; an array as lists."""
    if np.ndim(value):
        return [for_json(one) for one in value]
    return float(value) if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """A value as JSON: NumPy's numbers as Python's; infinity, NaN and all else in words."""
    if isinstance(value, Mapping):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    value = as_python(value)
    is_json = isinstance(value, bool | int | str | None)
    is_json |= isinstance(value, float) and math.isfinite(value)
    return value if is_json else str(value)


def _can_be_traced(make: Callable[[], Any]) -> bool:
    """Whether a function can be traced, which means that it does not use values of arrays.

    An error in it is raised later, when it is called.
    """
    try:
        jax.eval_shape(make)
    except Exception:  # many types of errors
        return False
    return True


def steps_per_epoch_of(data: DataSets, global_batch: int) -> float:
    """The number of steps in which every example is seen once; it need not be whole."""
    return take_apart(data.train, 0, name="data").num_rows / global_batch


def steps_of(recipe: Recipe, options: RunOptions, data: DataSets | None = None) -> int:
    """The updates that a run makes; with `epochs` it loads the data, whose size it needs."""
    if options.epochs is None:
        return options.steps or recipe.steps
    global_batch = options.global_batch or recipe.global_batch
    return steps_in(options.epochs, steps_per_epoch_of(data or recipe.load(), global_batch))


def steps_of_round(options: RunOptions, towers: int) -> int:
    """The steps of one round: up to a meeting, or all turns of a rotation; else 1.

    Raises:
        ArgumentError: the towers do not divide into the groups of a rotation.
    """
    if not options.asynchronous:
        return options.sync_every or 1
    order = options.rotation_order()
    groups = RotationOptions(options.max_staleness, order, None).num_groups(towers)
    return len(order or range(groups))


def make_optimizer(
    recipe: Recipe, options: RunOptions, steps: int, data: DataSets
) -> "optax.GradientTransformation":
    """The optimizer of a run; its state holds the learning rate and momentum if needed."""
    global_batch = options.global_batch or recipe.global_batch
    return recipe.make_optimizer(
        steps,
        steps_per_epoch=steps_per_epoch_of(data, global_batch),
        keeps_rate=RATE in options.metric_names(),
        keeps_momentum=options.momentum_correction,
    )


def planned_options(recipe: Recipe, options: RunOptions) -> dict[str, Any]:
    """The options of a step that count for its plan, too, by the names of their arguments."""
    return {
        "devices": options.devices,
        "towers": options.towers,
        "ema_decay": recipe.ema_decay if options.ema_decay is None else options.ema_decay,
        "clip_norm": clip_norm_of(recipe, options),
        "compute_dtype": options.compute_dtype,
        "sync_every": options.sync_every,
        "outer_optimizer": options.outer_optimizer(),
        "local_state": "average" if options.local_state == "average" else "keep",
        "updates": "asynchronous" if options.asynchronous else "synchronous",
        "max_staleness": options.max_staleness,
        "rotation": options.rotation_order(),
    }


def clip_norm_of(recipe: Recipe, options: RunOptions) -> float | None:
    """The norm to which a run clips gradients: that of its options, or else the recipe's."""
    return recipe.clip_norm if options.clip_norm is None else options.clip_norm

"""The options of a run, besides its recipe: devices, steps, seed and so on."""

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from multitower.errors import RunError
from multitower.steps.arguments import check_numbers
from multitower.steps.local.options import OUTER_LR, OUTER_MOMENTUM
from multitower.steps.optimizing.extra_metrics import check_extra_metrics
from multitower.steps.rotation.options import StaleScale
from multitower.towers.placement import check_towers
from multitower.training.fitting.early_stopping import EarlyStopping
from multitower.training.fitting.epochs import check_steps
from multitower.training.profile import check_profile
from multitower.training.tracking.log import check_services

if TYPE_CHECKING:
    import optax

# As many bits as both NumPy's and JAX's generators take.
LARGEST_SEED = 2**32 - 1
# Options that affect what an update computes, besides how the model and the batch are divided.
OF_UPDATES = (
    "sync_every",
    "outer_lr",
    "outer_momentum",
    "local_state",
    "asynchronous",
    "max_staleness",
    "rotation",
    "stale_scale",
    "momentum_correction",
    "clip_norm",
    "ema_decay",
    "compute_dtype",
)
# An option, what it is for, and the options that have an effect only with it.
_FOR = (
    ("stages", "stages of a model", ("layout", "interleave", "remat")),
    ("sync_every", "local updates", ("outer_lr", "outer_momentum", "local_state")),
    (
        "asynchronous",
        "asynchronous updates",
        ("max_staleness", "rotation", "stale_scale", "momentum_correction"),
    ),
    ("early_stopping", "early stopping", ("min_delta",)),
)
_FLAGS = {"global_batch": "batch-size", "remat": "no-remat", "simulated_devices": "simulate"}


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The options of a run.

    Attributes:
        devices: the number of devices to use; all by default.
        towers: the number of towers, for the same bits on any number of devices; by default one per
            device, which is faster.
        steps: updates to make; by default the recipe's number.
        epochs: passes over the training data to make instead of `steps`, above 0; steps are rounded
            up.
        global_batch: rows of one step, over all towers that take part in it; by default the
            recipe's number.
        shard_update: split the optimizer's state, as for `multitower.train_step`.
        shard_params: split the parameters, too, as for `multitower.train_step`.
        stages: the number of parts to cut the model into, as for `multitower.train_step`.
        layout: the layout of stages, such as "2x4": 2 replicas of 4 devices.
        interleave: whether neighbouring stages are on different devices, as for
            `multitower.train_step`; the bits are the same.
        remat: whether stages compute their forward part again in the backward pass.
        steps_per_call: updates to make in one call, as for `multitower.train_step`; None for one;
            or, with `sync_every` over several processes, for up to 16, until the next meeting.
        sync_every: steps from one meeting of the towers to the next, for local updates, as for
            `multitower.train_step`; None for towers that meet in every step.
        outer_lr: learning rate of SGD for the update at a meeting of the towers, 0 or more; None
            for 0.7, as for `multitower.train_step`.
        outer_momentum: Nesterov momentum of that update, 0 to less than 1; None for 0.9.
        local_state: `"keep"` or `"average"`, as for `multitower.train_step`.
        clip_norm: the global norm to clip gradients to, above 0; by default the recipe's.
        ema_decay: keep a moving average of the parameters, 0 to 1; by default the recipe's.
        on_nonfinite: `"stop"` or `"skip"`, as for `multitower.Trainer`.
        compute_dtype: `"bfloat16"` or `"float16"` for mixed precision, as for
            `multitower.train_step`; None or `"float32"`, which becomes None, for no casts.
        asynchronous: make updates in a fixed rotation, as for `multitower.train_step`.
        max_staleness: as for `multitower.train_step`; one less than the number of groups.
        rotation: the groups in the order of their turns, such as "0,1,0,2".
        stale_scale: divide every update by (1 + its staleness) to the power of this number, 0 or
            more; None for 0.
        momentum_correction: as for `multitower.train_step`.
        log: services to log to, separated by commas, as for `multitower.ExperimentLog`.
        profile: steps to profile, such as "10:13" for steps 10 to 13.
        early_stopping: end the run when a score of its test phases no longer improves, as for
            `multitower.EarlyStopping`: NAME, NAME:PATIENCE or NAME:PATIENCE:min, such as
            "accuracy:5" or "loss:5:min".
        min_delta: with `early_stopping`, an improvement must be larger than this, 0 or more.
        extra_metrics: metrics of the update, separated by commas, as for `multitower.train_step`.
        seed: the seed of the first parameters and of the order of the data, 0 to 2**32 - 1.
        checkpoint_every: steps from one checkpoint to the next; the last step is always saved.
        keep_last: how many checkpoints to keep, 1 or more.
        evaluate_every: steps from one test phase to the next; 0 for only one at the end.
        keep_best: name of the score whose best state is kept in the directory `best`; None to keep
            none.
        best: whether the highest (`"max"`) or the lowest (`"min"`) score is the best.

    Raises:
        RunError: a value is out of range or cannot be read, or an option is given without the one
            that it is for.
        ArgumentError: an unknown service.
        DeviceError: `towers` is not a whole number above 0.
    """

    devices: int | None = None
    towers: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    seed: int = 0
    checkpoint_every: int = 1000
    keep_last: int = 3
    evaluate_every: int = 0
    keep_best: str | None = None
    best: str = "max"
    shard_update: bool = False
    shard_params: bool = False
    clip_norm: float | None = None
    compute_dtype: str | None = None
    stages: int | None = None
    layout: str | None = None
    interleave: bool = False
    remat: bool = True
    steps_per_call: int | None = None
    sync_every: int | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    local_state: str = "keep"
    asynchronous: bool = False
    max_staleness: int | None = None
    rotation: str | None = None
    stale_scale: float | None = None
    momentum_correction: bool = False
    log: str | None = None
    profile: str | None = None
    epochs: float | None = None
    ema_decay: float | None = None
    on_nonfinite: str = "stop"
    early_stopping: str | None = None
    min_delta: float = 0.0
    extra_metrics: str | None = None

    def __post_init__(self) -> None:
        check_towers(self.towers)
        if self.steps is not None:
            check_steps(self.steps)
        if self.epochs is not None:
            _check_epochs(self.epochs, self.steps)
        _check_at_least(1, checkpoint_every=self.checkpoint_every, sync_every=self.sync_every)
        _check_at_least(0, evaluate_every=self.evaluate_every, max_staleness=self.max_staleness)
        if self.global_batch is not None and self.global_batch < 1:
            raise RunError(f"a batch of {self.global_batch} examples: a step needs at least one.")
        if self.best not in ("max", "min"):
            raise RunError(f"best={self.best}: say max or min.")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise RunError(f"clip_norm={self.clip_norm}: it must be a number above 0.")
        if self.on_nonfinite not in ("stop", "skip"):
            raise RunError(f"on_nonfinite={self.on_nonfinite}: say stop or skip.")
        check_numbers(self.ema_decay, None, None)
        if self.compute_dtype not in (None, "float32", "bfloat16", "float16"):
            raise RunError(f"compute_dtype={self.compute_dtype}: say float32, bfloat16 or float16.")
        if self.compute_dtype == "float32":  # no casts: the same program as without it
            object.__setattr__(self, "compute_dtype", None)
        _check_at_least(1, keep_last=self.keep_last)
        self._check_together()
        self._check_updates()
        self.rotation_order()
        self.layout_pair()
        self.stopping_rule()
        check_extra_metrics(self.metric_names(), None)  # with sync_every, train_step refuses them
        check_services(self.services())
        self.profile_pair()
        if not 0 <= self.seed <= LARGEST_SEED:
            raise RunError(f"seed={self.seed} is out of range: use 0 to {LARGEST_SEED}.")

    def as_flags(self, names: Iterable[str]) -> dict[str, Any]:
        """The flags that set these options, by flag; options with their default value are left out.

        Example:
            >>> from multitower.runs.options import RunOptions
            >>> RunOptions(towers=8, stages=2, remat=False).as_flags(["stages", "remat", "seed"])
            {'--stages': 2, '--no-remat': True}
        """
        given = {name: getattr(self, name) for name in names}
        return {
            flag_of(name): True if name == "remat" else value
            for name, value in given.items()
            if value != getattr(RunOptions, name)
        }

    def layout_pair(self) -> tuple[int, int] | None:
        """The layout as a pair (replicas, devices of each); None if it is not given."""
        if self.layout is None:
            return None
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", self.layout)
        if found is None:
            raise RunError(
                f"layout={self.layout}: say replicas x devices of each, such as 2x4 for 2 replicas "
                "of 4 devices."
            )
        return int(found[1]), int(found[2])

    def rotation_order(self) -> tuple[int, ...] | None:
        """The rotation as numbers of groups; None if it is not given."""
        if self.rotation is None:
            return None
        if re.fullmatch(r"\d+(,\d+)*", words := self.rotation.replace(" ", "")) is None:
            raise RunError(
                f"rotation={self.rotation}: say the numbers of groups, from 0, in the order of "
                "their turns, such as 0,1,0,2."
            )
        return tuple(map(int, words.split(",")))

    def outer_optimizer(self) -> "optax.GradientTransformation | None":
        """The optimizer of the update at a meeting; None for the default."""
        if self.outer_lr is None and self.outer_momentum is None:
            return None
        import optax  # noqa: PLC0415 (slow, and not needed by a command that is refused)

        rate = OUTER_LR if self.outer_lr is None else self.outer_lr
        momentum = OUTER_MOMENTUM if self.outer_momentum is None else self.outer_momentum
        return optax.sgd(rate, momentum or None, nesterov=momentum > 0)

    def scale_of_stale(self) -> StaleScale | None:
        """The factor of an update as a function of its staleness; None for no factor."""
        power = self.stale_scale
        return None if power is None else lambda staleness: (1.0 + staleness) ** -power

    def _check_together(self) -> None:
        """Refuses options that have an effect only with another one, if that is missing."""
        for leader, what, names in _FOR:
            if getattr(self, leader):
                continue
            for name in names:
                value = getattr(self, name)
                if value != getattr(RunOptions, name):  # the default
                    raise RunError(
                        f"{name}={value} is for {what}: add {leader} ({flag_of(leader)}), or leave "
                        "it out."
                    )

    def _check_updates(self) -> None:
        if self.local_state not in ("keep", "average"):
            raise RunError(f"local_state={self.local_state}: say keep or average.")
        for name, most in (("outer_lr", math.inf), ("outer_momentum", 1), ("stale_scale", math.inf),
                           ("min_delta", math.inf)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not 0 <= value < most:
                below = "" if most == math.inf else f", and below {most}"
                raise RunError(f"{name}={value}: it must be a number, 0 or more{below}.")

    def services(self) -> list[str]:
        """The services to log to."""
        return _listed(self.log)

    def metric_names(self) -> list[str]:
        """The names of the extra metrics."""
        return _listed(self.extra_metrics)

    def stopping_rule(self) -> EarlyStopping | None:
        """The rule to end the run early; None for no rule."""
        if self.early_stopping is None:
            return None
        found = re.fullmatch(r"([^:]+)(?::([1-9]\d*))?(?::(min|max))?", self.early_stopping)
        if found is None:
            raise RunError(
                f"early_stopping={self.early_stopping}: say the name of a score, NAME:PATIENCE or "
                "NAME:PATIENCE:min, such as loss:5:min to stop after 5 test phases in a row "
                "without a lower loss. Without min or max, --best decides."
            )
        score, patience, best = found.groups()
        if not self.evaluate_every:
            raise RunError(
                f"early_stopping={self.early_stopping} is decided by test phases, and this run has "
                "one at its end alone: add evaluate_every (--evaluate-every N)."
            )
        best = "min" if (best or self.best) == "min" else "max"
        rule = EarlyStopping(score, min_delta=self.min_delta, best=best)
        return replace(rule, patience=int(patience)) if patience else rule

    def profile_pair(self) -> tuple[int, int] | None:
        """The first and the last step to profile, counted from 1; None for no profile."""
        if self.profile is None:
            return None
        found = re.fullmatch(r"(\d+):(\d+)", self.profile)
        if found is None:
            raise RunError(
                f"profile={self.profile}: say the numbers of the first and the last step, such as "
                "10:13."
            )
        pair = int(found[1]), int(found[2])
        check_profile(pair, self.steps)
        return pair


def flag_of(option: str) -> str:
    """The flag of the command line that sets an option.

    Example:
        >>> from multitower.runs.options import flag_of
        >>> flag_of("sync_every"), flag_of("global_batch")
        ('--sync-every', '--batch-size')
    """
    return "--" + _FLAGS.get(option, option).replace("_", "-")


def _check_at_least(least: int, **options: int | None) -> None:
    for name, value in options.items():
        if value is not None and value < least:
            raise RunError(f"{name}={value}: it must be {least} or more.")


def _check_epochs(epochs: float, steps: int | None) -> None:
    if steps is not None:
        raise RunError(
            f"both steps={steps} and epochs={epochs:g}: a run has one of them. Leave one out."
        )
    if not 0 < epochs < math.inf:
        raise RunError(f"epochs={epochs}: it must be a number above 0.")


def _listed(words: str | None) -> list[str]:
    return [word.strip() for word in (words or "").split(",") if word.strip()]

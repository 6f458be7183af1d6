"""What a run may choose, apart from its recipe: where, how long, from which seed."""

import math
import re
from dataclasses import dataclass, replace

from multitower.errors import RunError
from multitower.steps.arguments import check_numbers
from multitower.steps.optimizing.extra_metrics import check_extra_metrics
from multitower.towers.placement import check_towers
from multitower.training.fitting.early_stopping import EarlyStopping
from multitower.training.profile import check_profile
from multitower.training.tracking.log import check_services

# As many bits as both NumPy's and JAX's generators take.
LARGEST_SEED = 2**32 - 1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """What a run may choose.

    Attributes:
        devices: how many to use; all by default.
        towers: how many towers, for the same bits on any number of devices; by default one per
            device, which is faster.
        steps: updates to make; by default the recipe's number.
        epochs: passes over the training data to make instead, above 0; the last one is made whole.
        global_batch: rows of one step, over all towers that take part in it; by default the
            recipe's number.
        shard_update: split the optimizer's state, as for `multitower.train_step`.
        shard_params: split the parameters too, as for `multitower.train_step`.
        stages: into how many parts the model is cut, as for `multitower.train_step`.
        layout: where they run, such as "2x4": 2 replicas of 4 devices.
        remat: whether stages compute their forward part again in the backward pass.
        steps_per_call: updates to make in one call, as for `multitower.train_step`; None for one,
            or with `sync_every` over several processes for up to 16, to the next meeting.
        sync_every: steps from one meeting of the towers to the next, for local updates, as for
            `multitower.train_step`; None for towers that meet in every step.
        clip_norm: the global norm to clip gradients to, above 0; by default the recipe's.
        ema_decay: keep a moving average of the parameters, 0 to 1; by default the recipe's.
        on_nonfinite: `"stop"` or `"skip"`, as for `multitower.Trainer`.
        compute_dtype: `"bfloat16"` or `"float16"` for mixed precision, as for
            `multitower.train_step`; None or `"float32"` for none.
        asynchronous: make updates in a fixed rotation, as for `multitower.train_step`.
        max_staleness: likewise; one less than the number of groups.
        log: services to log to, separated by commas, as for `multitower.ExperimentLog`.
        profile: steps to profile, such as "10:13" for steps 10 to 13.
        early_stopping: end the run when a score of its test phases no longer improves: its name,
            perhaps the patience, and whether low is better, such as "accuracy:5" or "loss:5:min",
            as for `multitower.EarlyStopping`.
        extra_metrics: metrics of the update, separated by commas, as for `multitower.train_step`.
        seed: of the first parameters and of the order of the data, 0 to 2**32 - 1.
        checkpoint_every: steps from one checkpoint to the next; the last step is always saved.
        evaluate_every: steps from one test phase to the next; 0 for one at the end alone.
        keep_best: name of the score whose best state is kept in `best`; None for none.
        best: whether the highest (`"max"`) or the lowest (`"min"`) score is the best.

    Raises:
        RunError: a number of steps, rows or a seed that is none.
        ArgumentError: a service that there is not.
        DeviceError: a number of towers that is none.
    """

    devices: int | None = None
    towers: int | None = None
    steps: int | None = None
    global_batch: int | None = None
    seed: int = 0
    checkpoint_every: int = 1000
    evaluate_every: int = 0
    keep_best: str | None = None
    best: str = "max"
    shard_update: bool = False
    shard_params: bool = False
    clip_norm: float | None = None
    compute_dtype: str | None = None
    stages: int | None = None
    layout: str | None = None
    remat: bool = True
    steps_per_call: int | None = None
    sync_every: int | None = None
    asynchronous: bool = False
    max_staleness: int | None = None
    log: str | None = None
    profile: str | None = None
    epochs: float | None = None
    ema_decay: float | None = None
    on_nonfinite: str = "stop"
    early_stopping: str | None = None
    extra_metrics: str | None = None

    def __post_init__(self) -> None:
        check_towers(self.towers)
        if self.steps is not None and self.steps < 1:
            raise RunError(f"steps={self.steps}: a run makes at least one step.")
        if self.epochs is not None:
            _check_epochs(self.epochs, self.steps)
        if self.global_batch is not None and self.global_batch < 1:
            raise RunError(f"a batch of {self.global_batch} examples: a step needs at least one.")
        if self.checkpoint_every < 1:
            raise RunError(f"checkpoint_every={self.checkpoint_every}: it must be 1 or more.")
        if self.evaluate_every < 0:
            raise RunError(f"evaluate_every={self.evaluate_every}: it must be 0 or more.")
        if self.best not in ("max", "min"):
            raise RunError(f"best={self.best}: say max or min.")
        if self.clip_norm is not None and not 0 < self.clip_norm < math.inf:
            raise RunError(f"clip_norm={self.clip_norm}: it must be a number above 0.")
        if self.on_nonfinite not in ("stop", "skip"):
            raise RunError(f"on_nonfinite={self.on_nonfinite}: say stop or skip.")
        check_numbers(self.ema_decay, None, None)
        if self.compute_dtype not in (None, "float32", "bfloat16", "float16"):
            raise RunError(f"compute_dtype={self.compute_dtype}: say float32, bfloat16 or float16.")
        if self.max_staleness is not None and not self.asynchronous:
            raise RunError(
                f"max_staleness={self.max_staleness} is for asynchronous updates: add asynchronous "
                "(--asynchronous), or leave it out."
            )
        self.layout_pair()
        self.stopping_rule()
        check_extra_metrics(self.metric_names(), None)  # with sync_every, train_step refuses them
        check_services(self.services())
        self.profile_pair()
        if not 0 <= self.seed <= LARGEST_SEED:
            raise RunError(f"seed={self.seed} is out of range: use 0 to {LARGEST_SEED}.")

    def layout_pair(self) -> tuple[int, int] | None:
        """The layout as two numbers."""
        if self.layout is None:
            return None
        found = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)", self.layout)
        if found is None:
            raise RunError(
                f"layout={self.layout}: say replicas x devices of each, such as 2x4 for 2 replicas "
                "of 4 devices."
            )
        return int(found[1]), int(found[2])

    def services(self) -> list[str]:
        """The services to log to."""
        return _listed(self.log)

    def metric_names(self) -> list[str]:
        """The extra metrics."""
        return _listed(self.extra_metrics)

    def stopping_rule(self) -> EarlyStopping | None:
        """When to end the run early."""
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
        rule = EarlyStopping(score, best="min" if (best or self.best) == "min" else "max")
        return replace(rule, patience=int(patience)) if patience else rule

    def profile_pair(self) -> tuple[int, int] | None:
        """The first and the last step to profile."""
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


def _check_epochs(epochs: float, steps: int | None) -> None:
    if steps is not None:
        raise RunError(
            f"both steps={steps} and epochs={epochs:g}: a run has one of them. Leave one out."
        )
    if not 0 < epochs < math.inf:
        raise RunError(f"epochs={epochs}: it must be a number above 0.")


def _listed(words: str | None) -> list[str]:
    return [word.strip() for word in (words or "").split(",") if word.strip()]

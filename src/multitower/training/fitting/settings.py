"""The settings of a trainer: checks them, and selects those that determine its results."""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax

from multitower.errors import ArgumentError, warn, whole_number
from multitower.processes.together import are_several
from multitower.steps.local.options import default_outer_optimizer
from multitower.steps.precision import check_compute_dtype
from multitower.towers.leaves import as_python
from multitower.training.checkpoints.best import warn_of_worst
from multitower.training.fitting.early_stopping import RULE, EarlyStopping
from multitower.training.profile import check_profile
from multitower.training.progress import Hook

_ALWAYS = (
    "towers",
    "global_batch",
    "ema_decay",
    "model_state_from",
    "clip_norm",
    "reduction",
    "stages",
)
# The defaults of what is of no use without a run_dir.
_USUAL = {"checkpoint_every": 1000, "keep_last": 3}
# For local updates over several processes, if the user does not give `steps_per_call`.
MOST_STEPS_PER_CALL = 16
_ASYNCHRONOUS = ("updates", "max_staleness", "stale_scale", "momentum_correction")


class Kept(NamedTuple):
    """The arguments of `Trainer` about what a run keeps on disk."""

    run_dir: str | Path | None
    checkpoint_every: int
    keep_last: int
    keep_best: str | None
    best: str
    profile: tuple[int, int] | None


def check_settings(
    kept: Kept, on_nonfinite: str, check_replicas_every: int, early_stopping: Any
) -> None:
    """Checks the arguments of a `Trainer` that a step does not check.

    Raises:
        ArgumentError: one has a wrong value.

    Warns:
        MultitowerWarning: one has no effect.
    """
    _check_one_of("on_nonfinite", on_nonfinite, ("stop", "skip"))
    _check_one_of("best", kept.best, ("max", "min"))
    is_path = isinstance(kept.run_dir, str | os.PathLike)  # pyright: ignore[reportUnnecessaryIsInstance]
    if kept.run_dir is not None and not (is_path and os.fspath(kept.run_dir)):
        raise ArgumentError(f"run_dir={kept.run_dir!r}: say a directory, such as 'runs/1'.")
    if kept.keep_best is not None:
        if not isinstance(kept.keep_best, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ArgumentError(
                f"keep_best={kept.keep_best!r}: say the name of a score of your test phase, such "
                "as 'accuracy'. keep_last= is how many checkpoints to keep."
            )
        if kept.run_dir is None:
            raise ArgumentError(f"keep_best={kept.keep_best!r} needs a run_dir to keep it in.")
        warn_of_worst("keep_best", kept.keep_best, kept.best)
    if early_stopping is not None:
        if not isinstance(early_stopping, EarlyStopping):
            raise ArgumentError(
                f"early_stopping={early_stopping!r}: pass mt.EarlyStopping('accuracy', patience=3)."
            )
        warn_of_worst(RULE, early_stopping.score, early_stopping.best)
    # Of every 2.5 steps, only every fifth step would be one.
    whole_number("checkpoint_every", kept.checkpoint_every, 1)
    whole_number("keep_last", kept.keep_last, 1)
    for name, usual in _USUAL.items():
        if kept.run_dir is None and (given := getattr(kept, name)) != usual:
            warn(f"{name}={given} has no effect: checkpoints need a run_dir, and there is none.")
    whole_number("check_replicas_every", check_replicas_every, 0)
    if kept.profile is not None:
        check_profile(kept.profile)
        if kept.run_dir is None:
            raise ArgumentError(f"profile={kept.profile} needs a run_dir to write to.")


def _check_one_of(name: str, value: str, words: tuple[str, ...]) -> None:
    if value not in words:
        raise ArgumentError(f"{name}={value!r}: say {' or '.join(map(repr, words))}.")


def as_hooks(hooks: Any) -> list[Hook]:
    """The list of hooks, from a list, one hook, or None.

    Raises:
        ArgumentError: one of them cannot be called.
    """
    if hooks is None:
        return []
    is_list = isinstance(hooks, Iterable) and not callable(hooks)
    found: list[Any] = list(hooks) if is_list else [hooks]
    for hook in found:
        if isinstance(hook, EarlyStopping):
            raise ArgumentError(f"hooks has an EarlyStopping: pass it as early_stopping={hook!r}.")
        if not callable(hook):
            raise ArgumentError(f"hooks has {hook!r}: a hook is a function of an mt.Progress.")
    return found


def settings_that_decide(options: Mapping[str, Any], on_nonfinite: str) -> dict[str, Any]:
    """The settings that are saved with checkpoints, and compared at a resume.

    Args:
        options: the options of the step, by the names of `train_step`'s arguments.
        on_nonfinite: as for `Trainer`.
    """
    narrow = check_compute_dtype(options["compute_dtype"])
    settings: dict[str, Any] = {
        **{name: options[name] for name in _ALWAYS},
        "on_nonfinite": on_nonfinite,
        "compute_dtype": None if narrow is None else str(narrow),
    }
    if options["stages"] is not None:
        settings["remat"] = options["remat"]
    if options["sync_every"] is not None:
        settings |= {name: options[name] for name in ("sync_every", "local_state")}
        settings["outer_optimizer"] = options["outer_optimizer"] or default_outer_optimizer()
    if options["updates"] != "synchronous":
        order = options["rotation"]
        settings |= {name: options[name] for name in _ASYNCHRONOUS}
        # As JSON returns it.
        settings["rotation"] = None if order is None else [as_python(group) for group in order]
    return settings


def steps_per_call_of(said: int | None, sync_every: int | None) -> int | None:
    """The most updates per call.

    With local updates over several processes the default is the steps from one meeting to the next,
    since metrics are exchanged after a call. It is limited, because the batches of a call are on
    the devices together, and a signal stops a run only after a call.
    """
    if said is not None or sync_every is None:
        return said
    # Asked first: it does not start JAX, so that `configure` may still be called.
    is_joined = jax.distributed.is_initialized()
    return min(sync_every, MOST_STEPS_PER_CALL) if is_joined and are_several() else None

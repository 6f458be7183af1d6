"""Where a run begins: at its newest checkpoint, if there is one and it belongs to this run."""

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from multitower.errors import ArgumentError, RunError, warn
from multitower.steps.state.train_state import TrainState
from multitower.towers.feeding import is_stream
from multitower.towers.refusals import shown
from multitower.training.checkpoints.best import BestCheckpoint
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.fitting.early_stopping import EarlyStopping
from multitower.training.hyperparameters import use_edited


class FitArguments(NamedTuple):
    """The arguments of one call of `Trainer.fit`; `steps` is also what `epochs` come to."""

    batches: Callable[[int], Iterator[Any]]
    steps: int
    steps_per_epoch: float | None
    resume: bool
    allow_previous: bool
    allow_changes: bool
    about: Mapping[str, Any]
    evaluate: Callable[[TrainState], Any] | None
    evaluate_every: int


def check_batches(batches: Any) -> None:
    """Refuses `batches` that are not a function of the number of a step.

    Raises:
        ArgumentError: it cannot be called with one argument.
    """
    what = type(batches).__name__
    if callable(batches):
        try:
            # The arguments of the wrapper, for a decorated function.
            signature = inspect.signature(batches, follow_wrapped=False)
        except (TypeError, ValueError):  # some builtins and C functions have no signature
            return
        try:
            signature.bind(0)
        except TypeError:
            what = f"{getattr(batches, '__name__', what)}{signature}"
        else:
            return
    raise ArgumentError(
        f"batches is {what}: give a function, batches(first), that returns an iterator of the "
        "batches of step first, first + 1, ...: a resumed run does not begin at 0. For arrays: "
        "lambda first: mt.make_batches(arrays, global_batch=64, seed=0, first=first)."
    )


def read_from(batches: Any, first: int) -> Iterator[Any]:
    """The batches of a run from step `first` on.

    Raises:
        ArgumentError: `batches` does not return an iterator.
    """
    found = batches(first)
    if not is_stream(found):
        raise ArgumentError(
            f"batches({first}) returned {shown(found)}: it must return an iterator of batches. "
            "Return mt.make_batches(arrays, global_batch=64, seed=0, first=first), or yield the "
            "batches."
        )
    return iter(found)  # once: a list read anew for every call would give its first batches again


def refuse_best_of_before(best: BestCheckpoint | None, given: FitArguments) -> None:
    """Refuses to begin a new run in a directory with the best state of an earlier run.

    Args:
        best: the best checkpoint; None if none is kept.
        given: the arguments of `Trainer.fit`.

    Raises:
        RunError: there is a best state of a step above 0, and `resume` is false.
    """
    kept = None if best is None or given.resume else best.scores()
    if best is not None and kept is not None and kept[0] > 0:  # at 0: scored before `fit`
        raise RunError(
            f"{best.directory} holds the best state of an earlier run, of step {kept[0]}: pass "
            "resume=True if this is that run, or choose another run_dir."
        )


def begin_at(
    checkpoints: Checkpoints, like: TrainState, run: Mapping[str, Any], given: FitArguments
) -> tuple[int, TrainState, Mapping[str, Any]]:
    """Reads the checkpoint to continue from.

    Args:
        checkpoints: a directory with at least one checkpoint.
        like: a state of this run.
        run: the settings of this run, from `describe_run`.
        given: the arguments of `Trainer.fit`.

    Returns:
        The number of updates made, the state after them, and the settings that were saved with it:
        empty with `allow_changes`.

    Raises:
        RunError: `resume` is false; the checkpoint was saved with other settings; or it is of a
            later step than the last one of this run.
        CheckpointError: the checkpoint cannot be read.
    """
    # Importing stays quick.
    from multitower.training.same_run import check_same_run  # noqa: PLC0415

    where = checkpoints.directory
    if not given.resume:
        raise RunError(
            f"{where} holds checkpoints of steps {checkpoints.steps()}: pass resume=True to go on "
            "from them, or choose another run_dir."
        )
    first, state, _ = checkpoints.restore(like=like, allow_previous=given.allow_previous)
    saved = checkpoints.run_of(first)
    if given.allow_changes:
        use_edited(state, like, saved, run)
        saved = {}
    check_same_run(saved, run, where)
    if first > given.steps:
        raise RunError(
            f"steps={given.steps}, and the run in {where} has made {first}: say at least as many, "
            "or choose another run_dir."
        )
    return first, state, saved


def check_no_test_phase(
    best: BestCheckpoint | None, early_stopping: EarlyStopping | None, *, is_forgotten: bool
) -> None:
    """Checks options that need scores, for a run without a test phase: warns of `keep_best`.

    Args:
        best: the best checkpoint; None if none is kept.
        early_stopping: as for `Trainer`.
        is_forgotten: whether `evaluate` is given and `evaluate_every` is not.

    Raises:
        ArgumentError: `early_stopping` is given.
    """
    if best is not None:
        warn(
            f"keep_best={best.metric!r}: this fit makes no test phase, and no state is kept unless "
            "you call trainer.evaluate yourself. Pass fit(evaluate=..., evaluate_every=...), with "
            "a function that calls trainer.evaluate."
        )
    elif is_forgotten and early_stopping is None:
        warn(
            "fit(evaluate=...) without evaluate_every=: this fit makes no test phase. Pass the "
            "number of steps from one test phase to the next, such as evaluate_every=100, or "
            "evaluate_every=0 if you want none."
        )
    if early_stopping is not None:
        raise ArgumentError(
            f"early_stopping={early_stopping.score!r} needs a test phase: pass fit(evaluate=..., "
            "evaluate_every=...), with a function that calls trainer.evaluate."
        )


def warn_of_a_last_meeting(steps: int, sync_every: int | None) -> None:
    """Warns of a run with local updates that ends between two meetings."""
    if sync_every is not None and (left := steps % sync_every):
        warn(
            f"steps={steps} is not a multiple of sync_every={sync_every}: the last {left} steps of "
            "every tower are not in the parameters of the state, which are those of the last "
            f"meeting. Make {steps - left + sync_every} steps."
        )

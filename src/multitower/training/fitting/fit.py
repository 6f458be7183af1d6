"""What `Trainer.fit` does after checking its arguments: begin or resume, then the loop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

from multitower.steps.state.train_state import TrainState
from multitower.towers.same_call import check_alike
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.checkpoints.saving import Saver
from multitower.training.checkpoints.tested import read_tested
from multitower.training.fitting.agreement import StopVote
from multitower.training.fitting.around import Around
from multitower.training.fitting.beginning import Resume, begin_at, read_from
from multitower.training.fitting.early_stopping import Patience
from multitower.training.fitting.epochs import steps_of_epoch
from multitower.training.fitting.interruption import noted_signals
from multitower.training.fitting.loop import Loop
from multitower.training.fitting.test_phase import TestPhase
from multitower.training.progress import flush_hooks, num_rows_of
from multitower.training.same_run import BatchRows

_ON_ONE_DISK = "run_dir must be one directory that all of them can see."


class FitCall(NamedTuple):
    """The arguments of one call of `Trainer.fit`.

    Attributes:
        batches: as for `fit`.
        steps_per_epoch: as for `fit`.
        how: where to begin, and how many steps to make.
        about: as for `fit`.
        evaluate: as for `fit`.
        evaluate_every: as for `fit`.
    """

    batches: Callable[[int], Iterator[Any]]
    steps_per_epoch: float | None
    how: Resume
    about: Mapping[str, Any]
    evaluate: Callable[[TrainState], Any] | None
    evaluate_every: int


def train(
    around: Around,
    state: TrainState,
    run: dict[str, Any],
    checkpoints: Checkpoints | None,
    call: FitCall,
) -> TrainState:
    """Trains, from a first state or from a checkpoint.

    Args:
        around: what the trainer adds to its step.
        state: the first state.
        run: the settings of the run, which are saved with every checkpoint.
        checkpoints: where to save; None to save nothing.
        call: the arguments of `fit`.

    Raises:
        MultitowerError: as `Trainer.fit`.
    """
    steps = call.how.steps
    with noted_signals() as caught:
        first, saved, counted, tested = 0, {}, {}, None
        if checkpoints is not None:
            newest = {"the newest checkpoint": max(checkpoints.steps(), default=None)}
            check_alike("fit", newest, around.step.placement, _ON_ONE_DISK)
        if checkpoints is not None and checkpoints.steps():
            first, state, saved = begin_at(checkpoints, state, run, call.how)
            tested = read_tested(checkpoints.directory / str(first))
            counted = checkpoints.run_of(first) if tested is None else tested
        patience = None
        if around.early_stopping is not None:
            patience = Patience(around.early_stopping, run, counted)
        every, is_made = call.evaluate_every, tested is not None
        test = TestPhase(call.evaluate, every, patience, is_made=is_made)
        saver = Saver(checkpoints, around.checkpoint_every, steps, call.about, run)
        vote = StopVote(caught, around.step.placement)
        epoch = steps_of_epoch(call.batches, call.steps_per_epoch)
        if first == steps:
            if test.is_due(first):
                with around.while_it_runs(patience, epoch, (first, steps)):
                    reason = test.again(first, state)
                if reason is not None:
                    around.end(reason)
            return _ended(around, state, test, saver, vote)
        test.warn_if_never_due(first, steps)
        batches, global_batch = read_from(call.batches, first), around.options["global_batch"]
        epoch = steps_of_epoch(batches, None) if epoch is None else epoch
        if global_batch is None:
            # A resumed run may begin with a smaller batch than its first one was.
            rows = BatchRows(run, saved)
            global_batch, batches = rows.wanted, _counted(batches, rows)
            around.step.expect(global_batch)
        loop = Loop(
            around,
            around.feeding(checkpoints is not None, call.evaluate_every, global_batch),
            around.reader(steps, state, epoch),
            saver,
            test,
            vote,
        )
        with around.while_it_runs(patience, epoch, (first, steps)):
            state = loop.run(state, batches, first=first, last=steps)
        return _ended(around, state, test, saver, vote)


def _ended(
    around: Around, state: TrainState, test: TestPhase, saver: Saver, vote: StopVote
) -> TrainState:
    """The state of a finished run; raises if a signal came after the last step."""
    number = int(state.step)  # host-device sync
    # A phase that has written into the state, which was saved before, is made again.
    if test.is_due(number) and not state.kept.changes():
        flush_hooks(around.hooks)  # a resume does not report the noted phase again
        saver.note_tested(number, test.counted())
    stop = vote.at_end()
    if stop:
        raise saver.interrupted(stop, number)
    return state


def _counted(batches: Iterator[Any], rows: BatchRows) -> Iterator[Any]:
    for batch in batches:
        rows.see(num_rows_of(batch))
        yield batch

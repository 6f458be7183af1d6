"""What `Trainer.fit` does after checking its arguments: begin or resume, then the loop."""

from collections.abc import Iterator
from typing import Any

from multitower.steps.state.train_state import TrainState
from multitower.towers.same_call import check_alike
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.checkpoints.saving import Saver
from multitower.training.checkpoints.tested import read_tested
from multitower.training.fitting.agreement import StopVote
from multitower.training.fitting.beginning import FitArguments, begin_at, read_from
from multitower.training.fitting.early_stopping import Patience
from multitower.training.fitting.epochs import steps_of_epoch
from multitower.training.fitting.interruption import noted_signals
from multitower.training.fitting.loop import Loop
from multitower.training.fitting.test_phase import TestPhase
from multitower.training.fitting.trainer_parts import TrainerParts
from multitower.training.progress import flush_hooks, num_rows_of
from multitower.training.same_run import BatchRows

_ON_ONE_DISK = "run_dir must be one directory that all of them can see."


def train(
    trainer: TrainerParts,
    state: TrainState,
    run: dict[str, Any],
    checkpoints: Checkpoints | None,
    given: FitArguments,
) -> TrainState:
    """Trains, from a first state or from a checkpoint.

    Args:
        trainer: what is needed of the trainer.
        state: the first state.
        run: the settings of the run, which are saved with every checkpoint.
        checkpoints: where to save; None to save nothing.
        given: the arguments of `fit`.

    Raises:
        MultitowerError: as `Trainer.fit`.
    """
    steps = given.steps
    with noted_signals() as caught:
        first, saved, counted, tested = 0, {}, {}, None
        if checkpoints is not None:
            newest = {"the newest checkpoint": max(checkpoints.steps(), default=None)}
            check_alike("fit", newest, trainer.step.placement, _ON_ONE_DISK)
        if checkpoints is not None and checkpoints.steps():
            first, state, saved = begin_at(checkpoints, state, run, given)
            tested = read_tested(checkpoints.directory / str(first))
            counted = checkpoints.run_of(first) if tested is None else tested
        patience = None
        if trainer.early_stopping is not None:
            patience = Patience(trainer.early_stopping, run, counted)
        every, is_made = given.evaluate_every, tested is not None
        test = TestPhase(given.evaluate, every, patience, is_made=is_made)
        saver = Saver(checkpoints, trainer.checkpoint_every, steps, given.about, run)
        vote = StopVote(caught, trainer.step.placement)
        epoch = steps_of_epoch(given.batches, given.steps_per_epoch)
        if first == steps:
            if test.is_due(first):
                with trainer.while_it_runs(patience, epoch, (first, steps)):
                    reason = test.again(first, state)
                if reason is not None:
                    trainer.end(reason)
            return _ended(trainer, state, test, saver, vote)
        test.warn_if_never_due(first, steps)
        batches, global_batch = read_from(given.batches, first), trainer.options["global_batch"]
        epoch = steps_of_epoch(batches, None) if epoch is None else epoch
        if global_batch is None:
            # A resumed run may begin with a smaller batch than its first one was.
            rows = BatchRows(run, saved)
            global_batch, batches = rows.wanted, _counted(batches, rows)
            trainer.step.expect(global_batch)
        loop = Loop(
            trainer,
            trainer.feeding(checkpoints is not None, given.evaluate_every, global_batch),
            trainer.reader(steps, state, epoch),
            saver,
            test,
            vote,
        )
        with trainer.while_it_runs(patience, epoch, (first, steps)):
            state = loop.run(state, batches, first=first, last=steps)
        return _ended(trainer, state, test, saver, vote)


def _ended(
    trainer: TrainerParts, state: TrainState, test: TestPhase, saver: Saver, vote: StopVote
) -> TrainState:
    """The state of a finished run; raises if a signal came after the last step."""
    number = int(state.step)  # host-device sync
    # A phase that has written into the state, which was saved before, is made again.
    if test.is_due(number) and not state.kept.changes():
        flush_hooks(trainer.hooks)  # a resume does not report the noted phase again
        saver.note_tested(number, test.counted())
    stop = vote.at_end()
    if stop:
        raise saver.interrupted(stop, number)
    return state


def _counted(batches: Iterator[Any], rows: BatchRows) -> Iterator[Any]:
    for batch in batches:
        rows.see(num_rows_of(batch))
        yield batch

"""What `Trainer.fit` does after checking its arguments: begin or resume, then the loop."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from multitower.steps.state.train_state import TrainState
from multitower.steps.step import TrainStep
from multitower.towers.same_call import check_alike
from multitower.training.checkpoints.checkpoint import Checkpoints
from multitower.training.checkpoints.saving import Saver
from multitower.training.checkpoints.tested import read_tested
from multitower.training.fitting.agreement import StopVote
from multitower.training.fitting.beginning import Resume, begin_at, read_from
from multitower.training.fitting.calls import Feeding
from multitower.training.fitting.early_stopping import EarlyStopping, Patience
from multitower.training.fitting.epochs import steps_of_epoch
from multitower.training.fitting.interruption import noted_signals
from multitower.training.fitting.loop import Loop
from multitower.training.fitting.test_phase import TestPhase
from multitower.training.profile import Profile
from multitower.training.progress import Hook, MetricsReader, flush_hooks, num_rows_of
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


class Around(NamedTuple):
    """What a trainer adds to its step.

    Attributes:
        step: the training step.
        options: the options of the step, by the names of `train_step`'s arguments.
        checkpoint_every: as for `Trainer`.
        on_nonfinite: as for `Trainer`.
        check_replicas_every: as for `Trainer`.
        early_stopping: as for `Trainer`.
        hooks: the hooks, which are flushed before a save.
        tell: calls all hooks with a `Progress`.
        end: called with the reason if a run ends early.
        profile: traces some steps.
        while_it_runs: makes a context manager for the time of the loop, from the counts of test
            phases, the steps of an epoch, and the pair (steps made, steps in all).
    """

    step: TrainStep
    options: Mapping[str, Any]
    checkpoint_every: int
    on_nonfinite: str
    check_replicas_every: int
    early_stopping: EarlyStopping | None
    hooks: list[Hook]
    tell: Hook
    end: Callable[[str], None]
    profile: Profile
    while_it_runs: Callable[[Patience | None, Any, tuple[int, int]], AbstractContextManager[None]]

    def run(
        self,
        state: TrainState,
        run: dict[str, Any],
        checkpoints: Checkpoints | None,
        call: FitCall,
    ) -> TrainState:
        """Trains, from a first state or from a checkpoint.

        Args:
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
                check_alike("fit", newest, self.step.placement, _ON_ONE_DISK)
            if checkpoints is not None and checkpoints.steps():
                first, state, saved = begin_at(checkpoints, state, run, call.how)
                tested = read_tested(checkpoints.directory / str(first))
                counted = checkpoints.run_of(first) if tested is None else tested
            patience = None
            if self.early_stopping is not None:
                patience = Patience(self.early_stopping, run, counted)
            every, is_made = call.evaluate_every, tested is not None
            test = TestPhase(call.evaluate, every, patience, is_made=is_made)
            saver = Saver(checkpoints, self.checkpoint_every, steps, call.about, run)
            vote = StopVote(caught, self.step.placement)
            epoch = steps_of_epoch(call.batches, call.steps_per_epoch)
            if first == steps:
                if test.is_due(first):
                    with self.while_it_runs(patience, epoch, (first, steps)):
                        reason = test.again(first, state)
                    if reason is not None:
                        self.end(reason)
                return self._ended(state, test, saver, vote)
            test.warn_if_never_due(first, steps)
            batches, global_batch = read_from(call.batches, first), self.options["global_batch"]
            epoch = steps_of_epoch(batches, None) if epoch is None else epoch
            if global_batch is None:
                # A resumed run may begin with a smaller batch than its first one was.
                rows = BatchRows(run, saved)
                global_batch, batches = rows.wanted, _counted(batches, rows)
                self.step.expect(global_batch)
            loop = Loop(
                self.step,
                self._feeding(checkpoints is not None, call, global_batch),
                self._reader(steps, state, epoch),
                saver,
                test,
                vote,
                self.check_replicas_every,
                self.hooks,
                self.end,
                self.profile,
            )
            with self.while_it_runs(patience, epoch, (first, steps)):
                state = loop.run(state, batches, first=first, last=steps)
            return self._ended(state, test, saver, vote)

    def _ended(
        self, state: TrainState, test: TestPhase, saver: Saver, vote: StopVote
    ) -> TrainState:
        """The state of a finished run; raises if a signal came after the last step."""
        number = int(state.step)  # host-device sync
        # A phase that has written into the state, which was saved before, is made again.
        if test.is_due(number) and not state.changes():
            flush_hooks(self.hooks)  # a resume does not report the noted phase again
            saver.note_tested(number, test.counted())
        stop = vote.at_end()
        if stop:
            raise saver.interrupted(stop, number)
        return state

    def _feeding(self, saves: bool, call: FitCall, global_batch: int | None) -> Feeding:
        """The `Feeding` of this run."""
        # With several processes, calls end at meetings, so that metrics are exchanged there.
        meets = self.step.placement.spans_processes and self.options["sync_every"]
        return Feeding(
            self.step,
            {name: self.options[name] for name in ("devices", "towers")},
            global_batch,
            self.options["stages"],
            self.options["steps_per_call"],
            (
                self.checkpoint_every if saves else 0,
                call.evaluate_every,
                self.check_replicas_every,
                meets or 0,
            ),
        )

    def _reader(self, steps: int, state: TrainState, steps_per_epoch: Any) -> MetricsReader:
        return MetricsReader(
            steps,
            self.on_nonfinite,
            state.params_shapes(),
            self.tell,
            # In a rotation, metrics of a step are ready only after the other groups' turns.
            calls_late=1 if self.step.turns is None else len(self.step.turns.rotation),
            steps_per_epoch=steps_per_epoch,
        )


def _counted(batches: Iterator[Any], rows: BatchRows) -> Iterator[Any]:
    for batch in batches:
        rows.see(num_rows_of(batch))
        yield batch

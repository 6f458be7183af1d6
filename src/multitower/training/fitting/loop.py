"""The loop of a run, top to bottom: steps, reports, checkpoints, test phases, checks."""

from collections.abc import Iterator
from contextlib import closing
from typing import Any, NamedTuple

from multitower.errors import RunError
from multitower.steps.state.replicas import check_replicas
from multitower.steps.state.train_state import TrainState
from multitower.training.checkpoints.saving import Saver
from multitower.training.fitting.agreement import StopVote
from multitower.training.fitting.calls import Call, Feeding
from multitower.training.fitting.test_phase import TestPhase
from multitower.training.fitting.trainer_parts import TrainerParts
from multitower.training.progress import MetricsReader, flush_hooks


class Loop(NamedTuple):
    """The work around a step: feeding, reports, checkpoints, test phases and votes.

    Attributes:
        trainer: what is needed of the trainer.
        feeding: groups batches into calls of the step.
        reader: reads metrics of earlier steps, and calls the hooks.
        saver: saves when it is due.
        test: the test phase.
        vote: whether to stop, decided by all processes together.
    """

    trainer: TrainerParts
    feeding: Feeding
    reader: MetricsReader
    saver: Saver
    test: TestPhase
    vote: StopVote

    def run(
        self, state: TrainState, batches: Iterator[Any], *, first: int, last: int
    ) -> TrainState:
        """Makes the steps after `first`, up to `last`.

        Raises:
            MultitowerError: as `Trainer.fit`.
        """
        reader, every = self.reader, self.trainer.check_replicas_every
        reason = self.test.again(first, state)
        if reason is not None:
            self.trainer.end(reason)
            return state
        number = first
        calls = self.feeding.calls(batches, first, last)
        with closing(calls) as ahead, self.trainer.profile as profile:
            while number < last:
                call = self._next_call(ahead, number, (first, last), state)
                num_rows = call.num_rows
                profile.before(number, len(num_rows), state)
                state, metrics = self.trainer.step(state, call.batch)
                del call  # frees its batches on the devices, for the next ones
                profile.after(number + len(num_rows), state, metrics)
                is_first, number = number == first, number + len(num_rows)
                # Metrics are read one call late, or a whole rotation late. Reading those of this
                # call would leave the devices idle, and reading none would let the host run ahead
                # without bound.
                reader.wait(number, metrics, num_rows)
                reader.read_late()  # host-device sync
                stop = self.vote.after_step()
                is_saved = self.saver.is_due(number) or stop
                # Also after the first call, so that the check compiles now, not later in the run.
                if every and (number % every == 0 or is_first or is_saved):
                    check_replicas(state)  # host-device sync
                if is_saved:
                    self._save(number, state)
                if self.test.is_due(number) and not stop:
                    reader.read_waiting()  # host-device sync: hooks get steps in order
                    reason = self._test(number, first, state)
                    if reason is not None:
                        if every and not is_saved:
                            check_replicas(state)  # host-device sync
                        self._save(number, state)  # does nothing if this step has just been saved
                        self.trainer.end(reason)
                        break
                if stop:
                    raise self.saver.interrupted(stop, number)
        reader.read_waiting()
        return state

    def _next_call(
        self, ahead: Iterator[Call], number: int, run: tuple[int, int], state: TrainState
    ) -> Call:
        """The batches of the next call; if there are none, the steps so far are saved."""
        first, last = run
        try:
            call = next(ahead, None)
        except Exception as error:  # of the user's loader, or of a wrong batch
            if saved := self._save_before_error(number, first, state):
                error.add_note(saved)
            raise
        if call is not None:
            return call
        saved = self._save_before_error(number, first, state)
        raise RunError(
            f"the batches ran out after step {number} of {last}: batches(first) "
            "must return an iterator that does not end before the run. For a loader "
            "that ends after an epoch, yield its batches again: while True: yield from "
            f"loader. {saved}".strip()
        )

    def _test(self, number: int, first: int, state: TrainState) -> str | None:
        """A test phase; if it fails, the steps so far are saved."""
        try:
            with self.reader.uncounted():
                return self.test.run(state)
        except Exception as error:  # of the user's function, or a signal in a run inside it
            if saved := self._save_before_error(number, first, state):
                error.add_note(saved)
            raise

    def _save_before_error(self, number: int, first: int, state: TrainState) -> str:
        """Saves the steps so far, before an error of the user's ends the run; says so."""
        self.reader.read_waiting()  # host-device sync: hooks get all steps
        # Other processes may be in the middle of a step, and a save takes all of them.
        if number == first or self.trainer.step.placement.spans_processes:
            return ""
        if self.trainer.check_replicas_every:
            check_replicas(state)  # host-device sync
        self._save(number, state)
        return self.saver.kept_in_words(number)

    def _save(self, number: int, state: TrainState) -> None:
        self.reader.read_waiting()  # host-device sync: only a good state is saved
        flush_hooks(self.trainer.hooks)
        self.saver.save(number, state)

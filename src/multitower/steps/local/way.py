"""A way to keep a training state: every tower has its own between two meetings."""

import jax
import numpy as np

from multitower.errors import StateError
from multitower.functions.outputs import wide
from multitower.steps.local.meeting import Meeting
from multitower.steps.local.options import LocalOptions, refuse_meeting
from multitower.steps.local.runner import LocalRunner
from multitower.steps.local.state import Own, as_state, begin, take_apart, take_changes
from multitower.steps.parts import StepParts
from multitower.steps.state.changes import Changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.train_state import TrainState
from multitower.steps.way import Batches, Runner, Whole
from multitower.towers.placement import Placement
from multitower.towers.surroundings import refuse_disabled_jit


class InLocal(Whole):
    """Every tower has parameters and an optimizer's state of its own."""

    def __init__(self, options: LocalOptions, placement: Placement) -> None:
        super().__init__(placement, same_bits=True)
        self._options = options
        self._meeting: Meeting | None = None

    def first(self, step: StepParts, fields: Fields, maker: object) -> TrainState:
        """As in `Whole`; `opt_state` is the outer optimizer's."""
        ema = jax.tree.map(wide, fields.params) if step.ema_decay is not None else None
        opt_state = step.optimizer.init(fields.params)
        return self._begin(fields._replace(opt_state=opt_state, ema_params=ema), maker)

    def accepted(self, fields: Fields) -> Fields:
        """As in `Whole`; what towers have of their own is taken."""
        if fields.local is not None and not isinstance(fields.local, Own):
            raise StateError(
                "the state holds what towers keep of their own in another way than with "
                "sync_every=. Start from its parameters: step.init(state.params)."
            )
        return fields

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> TrainState:
        """As in `Whole`; in a state of synchronous steps all towers have the same."""
        if fields.local is not None:
            return as_state(take_apart(fields, self.placement), self.placement, maker)
        wanted = jax.tree.structure(jax.eval_shape(step.optimizer.init, fields.params))
        if jax.tree.structure(fields.opt_state) != wanted:
            raise StateError(
                "the state is one of synchronous steps, and its opt_state is not of the optimizer "
                "that every tower now has. Start from its parameters: step.init(state.params).\n"
                f"given: {jax.tree.structure(fields.opt_state)}\nwanted: {wanted}"
            )
        return self._begin(fields, maker)

    def with_changes(self, state: TrainState, changes: Changes, maker: object) -> TrainState:
        """As in `Whole`."""
        parts = take_changes(state.parts(), changes, self.placement)
        return as_state(parts, self.placement, maker)

    def check(self, meets: str | None) -> None:
        """Refuses every such loss."""
        if meets:
            raise refuse_meeting(meets)

    def make_runner(self, step: StepParts, state: TrainState, batches: Batches) -> Runner:
        """As in `Whole`."""
        refuse_disabled_jit()
        if self._meeting is None:
            self._meeting = Meeting(step, self._options, self.placement)
        meetings = (self._meeting, self._options.sync_every)
        given = (step, batches.first.split, batches.tower_rows, self.placement, meetings)
        return LocalRunner(*given)

    def _begin(self, fields: Fields, maker: object) -> TrainState:
        """The state of towers that have the same, from one with the inner optimizer's state."""
        own = Own(fields.params, fields.opt_state, fields.model_state, np.int32(0))
        outer = self._options.outer_optimizer.init(fields.params)
        parts = begin(fields._replace(opt_state=outer), own, self.placement)
        return as_state(parts, self.placement, maker)

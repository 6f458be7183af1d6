"""A way to keep a training state: every tower has its own, and they meet now and then."""

import jax
import numpy as np

from multitower.errors import StateError
from multitower.processes.together import whole_on_host
from multitower.steps.local.calls import LocalCallRunner
from multitower.steps.local.looped import LocalLoopRunner, LoopParts
from multitower.steps.local.meeting import Meeting
from multitower.steps.local.options import LocalOptions, refuse_meeting_in_local
from multitower.steps.local.runner import LocalRunner
from multitower.steps.local.state import (
    Own,
    all_alike,
    as_state,
    parts_of,
    refuse_other_towers,
    take_changes,
)
from multitower.steps.parts import Batches, StepParts
from multitower.steps.runner import fresh_on_all_devices, own_copy
from multitower.steps.state.changes import Changes, repeated
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.steps.way import Runner, Way
from multitower.towers.global_arrays import host_leaf
from multitower.towers.placement import Placement
from multitower.towers.split import copy_to
from multitower.towers.surroundings import refuse_disabled_jit, refuse_traced


class InLocal(Way):
    """Every tower has parameters and an optimizer's state of its own."""

    exchange = False

    def __init__(self, options: LocalOptions, placement: Placement) -> None:
        super().__init__(placement)
        self._options = options
        self._meeting: Meeting | None = None

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; `opt_state` is the outer optimizer's."""
        refuse_traced("step.init", fields)
        return super().first(step, fields, maker)

    def accepted(self, fields: Fields) -> Fields:
        """As in `Way`, but takes states with `local`, too."""
        if fields.local is not None and not isinstance(fields.local, Own):
            raise StateError(
                "the state holds what towers keep of their own in another way than with "
                "sync_every=. Start from its parameters: step.init(state.params)."
            )
        return fields

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; from a state of synchronous steps, all towers begin with the same."""
        if fields.local is not None:
            return self._go_on(fields, maker)
        wanted = jax.tree.structure(jax.eval_shape(step.optimizer.init, fields.params))
        if jax.tree.structure(fields.opt_state) != wanted:
            raise StateError(
                "the state is one of synchronous steps, and its opt_state is not of the optimizer "
                "that every tower now has. Start from its parameters: step.init(state.params).\n"
                f"given: {jax.tree.structure(fields.opt_state)}\nwanted: {wanted}"
            )
        own = Own(fields.params, fields.opt_state, fields.model_state, np.int32(0))
        outer = self._options.outer_optimizer.init(fields.params)
        return self._begin(fields._replace(opt_state=outer), own, maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`."""
        parts = take_changes(state.parts(), changes, self.placement)
        return as_state(parts, self.placement, state.maker)

    def check(self, meets: str | None) -> None:
        """Refuses every loss in which towers exchange values."""
        if meets:
            raise refuse_meeting_in_local(meets)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        refuse_disabled_jit()
        if self._meeting is None:
            self._meeting = Meeting(step, self._options, self.placement)
        one = LocalRunner(step, batches, self.placement, self._meeting)
        if self._options.most is None:
            return one
        least = batches.tower_rows * self.placement.num_towers if batches.must_be_full else 0
        return LocalCallRunner(one, self._options.most, least)

    def _go_on(self, fields: Fields, maker: object) -> KeptState:
        """The state of towers that go on with what `fields.local` holds for each."""
        return as_state(parts_of(fields, self.placement), self.placement, maker)

    def _begin(self, fields: Fields, own: Own, maker: object) -> KeptState:
        """A state in which each tower begins with `own`; `fields` holds the rest."""
        return as_state(all_alike(fields, own, self.placement), self.placement, maker)


class InLocalLoops(InLocal):
    """As in `InLocal`; one tower on every device, and many steps in one program."""

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`; every tower gets new parameters and a new model state, too."""
        return self._go_on(state.contents(), state.maker)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        return LocalLoopRunner(step, batches, self._options, self.placement)

    def _go_on(self, fields: Fields, maker: object) -> KeptState:
        refuse_other_towers(fields, self.placement)
        whole = fresh_on_all_devices(fields._replace(local=None), self.placement)
        leaves, treedef = jax.tree.flatten(fields.local)
        own = [
            own_copy(leaf) if isinstance(leaf, jax.Array) else host_leaf(leaf) for leaf in leaves
        ]
        placed = copy_to(own, [self.placement.split] * len(own))
        whole = whole._replace(local=jax.tree.unflatten(treedef, placed))
        return LoopParts(whole, int(whole_on_host(whole.step))).state(maker)  # host-device sync

    def _begin(self, fields: Fields, own: Own, maker: object) -> KeptState:
        local = jax.tree.map(lambda leaf: repeated(leaf, self.placement.num_towers), own)
        return self._go_on(fields._replace(local=local), maker)

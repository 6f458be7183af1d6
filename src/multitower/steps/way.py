"""A way to keep a training state on devices: it makes states, and runners of batches."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from multitower.errors import StateError
from multitower.stages.layout import Layout
from multitower.steps.optimizing.update import begin
from multitower.steps.parts import Batches, Looked, StepParts
from multitower.steps.runner import (
    FastRunner,
    Metrics,
    SameBitsRunner,
    fresh_on_all_devices,
    take_changes,
)
from multitower.steps.state.changes import Changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.placement import Placement

if TYPE_CHECKING:
    from multitower.stages.order import Segments
    from multitower.steps.rotation.turns import Turns


class Runner(Protocol):
    """Makes steps with batches of one kind."""

    def run(self, state: KeptState, parts: Any, /) -> tuple[KeptState, Metrics]:
        """Makes an update, or one for each batch of a `Stack`; the state is overwritten."""
        ...


class Way:
    """Every device has the whole state, and the bits are the same; the base of all other ways.

    Attributes:
        placement: which device runs which towers; with stages, the device of the first stage.
        layout: with stages, which device runs which of them; else None.
    """

    def __init__(self, placement: Placement, layout: Layout | None = None) -> None:
        self.placement = placement
        self.layout = layout

    # Whether a function's parameters are made in parts, each on its device.
    makes_in_parts = False
    # Whether towers may exchange values in a loss.
    exchange = True
    # Whether a runner is for batches of the same shapes and dtypes only.
    one_kind_a_runner = False
    # Which towers make which update, in asynchronous updates.
    turns: "Turns | None" = None
    # The stages as the newest runner has cut them.
    segments: "Segments | None" = None
    # What runs batches.
    _runner: type[SameBitsRunner | FastRunner] = SameBitsRunner

    @property
    def num_towers(self) -> int:
        """How many towers share the rows of one step."""
        return self.placement.num_towers

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """A first state, from fields without optimizer state and average, which are made here."""
        opt_state, ema = begin(step, fields.params)
        return self.adopt(step, fields._replace(opt_state=opt_state, ema_params=ema), maker)

    def accepted(self, fields: Fields) -> Fields:
        """The fields of a state of another step, if this way can go on with them.

        Raises:
            StateError: `fields.local` is set, and this way keeps nothing per tower.
        """
        if fields.local is not None:
            raise StateError(
                "the state holds what towers keep of their own (state.local), as a step with "
                "sync_every= or updates='asynchronous' leaves it, and this step has no place for "
                "it. Go on with that step, or from the parameters: step.init(state.params), or "
                "after asynchronous updates state.replace(local=None)."
            )
        return fields

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """A state with the values of one of another step, which is never overwritten."""
        return KeptState(fresh_on_all_devices(fields, self.placement), maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """The state with what a user has written into it; other leaves are not copied."""
        return take_changes(state, changes, self.placement)

    def look(self, state: KeptState, look: Callable[[Fields], Looked]) -> Looked:
        """Calls `look` with fields of this state, to trace a loss before it is compiled."""
        return look(state.shared())

    def check(self, meets: str | None) -> None:
        """Refuses a loss in which towers exchange values, at `meets`, if this way cannot run it."""

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """Makes the runner of batches like these."""
        return self._runner(step, batches, self.placement)


class InOneProgram(Way):
    """As in `Way`, with one program over all devices; equal to one device up to rounding."""

    _runner = FastRunner

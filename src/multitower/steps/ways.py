"""Ways to keep a training state on devices, other than a whole copy on each."""

import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING

import jax

from multitower.engines.tracing import look_by_shapes
from multitower.hardware.devices import DeviceSpec
from multitower.stages.options import StageOptions
from multitower.steps.local.options import LocalOptions
from multitower.steps.looped import LoopOptions, LoopRunner, is_one_program
from multitower.steps.optimizing.optimizer import check_opt_state
from multitower.steps.parts import Batches, Looked, ShardOptions, StepParts
from multitower.steps.rotation.options import RotationOptions, refuse_meeting_in_rotation
from multitower.steps.runner import fresh_on_all_devices
from multitower.steps.state.changes import Changes, with_changes
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.steps.way import InOneProgram, Runner, Way
from multitower.towers.placement import Placement, place
from multitower.towers.surroundings import refuse_traced

if TYPE_CHECKING:
    from multitower.steps.blocks.state import BlockState


class InBlocks(Way):
    """Every tower keeps a block of the optimizer's state and of the average; same bits."""

    def __init__(self, placement: Placement) -> None:
        super().__init__(placement)
        # By the maker of states: all of its models have the same shapes, and so the same blocks.
        self._sharded: weakref.WeakKeyDictionary[object, BlockState] = weakref.WeakKeyDictionary()

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`."""
        refuse_traced("step.init", fields)
        whole, sharded = self._fitted(step, fields, maker)
        parts = sharded.first(step, whole)
        return sharded.state(parts, maker)

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`."""
        whole, sharded = self._fitted(step, fields, maker)
        kept = whole._replace(opt_state=fields.opt_state, ema_params=fields.ema_params)
        return sharded.state(sharded.parts_of(kept), maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`."""
        sharded = self._sharded[state.maker]
        return sharded.state(sharded.take_changes(state.parts(), changes), state.maker)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        from multitower.steps.blocks.update import BlockRunner  # noqa: PLC0415 (importing stays quick)

        return BlockRunner(step, batches, self.placement, self._sharded[state.maker])

    def _fitted(
        self, step: StepParts, fields: Fields, maker: object
    ) -> "tuple[Fields, BlockState]":
        """The fields that are whole on every device, and the `BlockState` for the others."""
        rest = fields._replace(opt_state=None, ema_params=None)
        whole = fresh_on_all_devices(rest, self.placement)
        sharded = self._sharded.get(maker)
        if sharded is None:
            from multitower.steps.blocks.state import BlockState  # noqa: PLC0415 (importing stays quick)

            sharded = BlockState(step.optimizer, whole.params, self.placement)
            self._sharded[maker] = sharded
        return whole, sharded


class InStages(Way):
    """Every stage's devices keep what belongs to it."""

    makes_in_parts = True
    one_kind_a_runner = True

    def __init__(self, options: StageOptions, devices: DeviceSpec | None, towers: int) -> None:
        self._layout = options.on(devices, towers)
        self._remat = options.remat
        super().__init__(self._layout.towers, self._layout)

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; arrays are put on devices at the first step, which cuts the model."""
        refuse_traced("step.init", fields)
        from multitower.steps.staged.first import First  # noqa: PLC0415 (importing stays quick)

        return First.state(step, fields, maker)

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; the first step puts the arrays on devices."""
        check_opt_state(step.optimizer, fields.params, fields.opt_state)
        return KeptState(fields, maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`."""
        return KeptState(with_changes(state.fields(), changes), state.maker)

    def look(self, state: KeptState, look: Callable[[Fields], Looked]) -> Looked:
        """As in `Way`: without the values of parameters, since no device has all of them."""
        from multitower.steps.staged.state import on_cpu  # noqa: PLC0415 (importing stays quick)

        rest = on_cpu(state.shared()._replace(params=None, opt_state=None, ema_params=None))
        shapes = state.params_shapes()
        return look_by_shapes(lambda params: look(rest._replace(params=params)), shapes)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        from multitower.steps.staged.runner import StagedRunner  # noqa: PLC0415 (importing stays quick)

        given = (step, batches, self._layout, state.shapes())
        runner = StagedRunner(*given, remat=self._remat)
        self.segments = runner.segments
        return runner


class InShards(Way):
    """Every device keeps a part of each large array; equal to one device up to rounding."""

    makes_in_parts = True

    def __init__(self, options: ShardOptions, placement: Placement) -> None:
        super().__init__(placement)
        from multitower.steps.shards.state import StateShards  # noqa: PLC0415 (importing stays quick)

        self._shards = StateShards(options, placement)

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`."""
        return KeptState(self._shards.first(step, fields), maker)

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`."""
        return KeptState(self._shards.place(fields), maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`."""
        return KeptState(self._shards.take_changes(state.fields(), changes), state.maker)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        from multitower.steps.shards.runner import ShardsRunner  # noqa: PLC0415 (importing stays quick)

        return ShardsRunner(step, batches, self._shards)


class InLoops(Way):
    """As in `Way`, with several steps in one call; equal to one device up to rounding."""

    def __init__(self, options: LoopOptions, placement: Placement) -> None:
        super().__init__(placement)
        self._options = options

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        return LoopRunner(step, batches, self.placement, self._options.most)


class InRotation(Way):
    """One device has the newest state, and every group of towers a version of the parameters."""

    exchange = False

    def __init__(self, options: RotationOptions, placement: Placement) -> None:
        super().__init__(placement)
        from multitower.steps.rotation.turns import Turns  # noqa: PLC0415 (importing stays quick)

        self._options = options
        self.turns = Turns.of(options, placement)
        self._turns = self.turns

    @property
    def num_towers(self) -> int:
        """As in `Way`: the towers of one group."""
        return self._turns.num_towers

    def first(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; refuses an optimizer whose momentum must be lowered and cannot be read."""
        refuse_traced("step.init", fields)
        if self._options.momentum_correction:
            from multitower.steps.rotation.stale import momenta_in  # noqa: PLC0415 (importing stays quick)

            momenta_in(jax.eval_shape(step.optimizer.init, fields.params))
        return super().first(step, fields, maker)

    def accepted(self, fields: Fields) -> Fields:
        """As in `Way`, but takes `local`; `adopt` checks the versions in it."""
        return fields

    def adopt(self, step: StepParts, fields: Fields, maker: object) -> KeptState:
        """As in `Way`; without versions, all groups begin with these parameters."""
        return self._apart(fields, maker)

    def with_changes(self, state: KeptState, changes: Changes) -> KeptState:
        """As in `Way`."""
        return self._apart(with_changes(state.fields(), changes), state.maker)

    def check(self, meets: str | None) -> None:
        """Refuses every loss in which towers exchange values."""
        if meets:
            raise refuse_meeting_in_rotation(meets)

    def make_runner(self, step: StepParts, state: KeptState, batches: Batches) -> Runner:
        """As in `Way`."""
        from multitower.steps.rotation.runner import RotationRunner  # noqa: PLC0415 (importing stays quick)

        return RotationRunner(step, batches, self._turns, self._options)

    def _apart(self, fields: Fields, maker: object) -> KeptState:
        from multitower.steps.rotation.state import parts_of  # noqa: PLC0415 (importing stays quick)

        return parts_of(fields, self._turns).state(maker)


Division = bool | StageOptions | ShardOptions | LoopOptions | LocalOptions | RotationOptions


def most_a_call(division: Division) -> int | None:
    """How many steps a call makes at most; None if a call is one step."""
    return division.most if isinstance(division, LoopOptions | LocalOptions) else None


def find_way(division: Division, devices: DeviceSpec | None, towers: int | None) -> Way:
    """The way that the options of `train_step` choose.

    Args:
        division: the options of the way; True for blocks of towers; False for the whole state on
            every device.
        devices: as for `train_step`.
        towers: as for `train_step`.

    Raises:
        ArgumentError: the towers do not divide into the groups of a rotation.
        DeviceError: the devices do not exist, or there are too few.
    """
    if isinstance(division, StageOptions):
        assert towers is not None
        return InStages(division, devices, towers)
    placement = place(devices, towers)
    if isinstance(division, LocalOptions):
        from multitower.steps.local.way import InLocal, InLocalLoops  # noqa: PLC0415 (importing stays quick)

        in_loops = division.most is not None and is_one_program(towers, placement)
        kind = InLocalLoops if in_loops else InLocal
        return kind(division, placement)
    if isinstance(division, LoopOptions):
        return InLoops(division, placement)
    if isinstance(division, ShardOptions):
        return InShards(division, placement)
    if isinstance(division, RotationOptions):
        return InRotation(division, placement)
    kind = InBlocks if division else InOneProgram if towers is None else Way
    return kind(placement)

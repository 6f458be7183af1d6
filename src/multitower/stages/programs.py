"""The programs of a chain's stages, compiled for the devices of a layout."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from multitower.engines.equal_programs import EqualPrograms, Executable
from multitower.engines.executable import WholeNumbers
from multitower.engines.packing import Packed, pack, unpack
from multitower.engines.totals import with_one_nan
from multitower.stages.chain import Chain, shapes_of
from multitower.stages.layout import Layout
from multitower.stages.meeting.totals import compile_add
from multitower.stages.passes.residuals import Residuals, keep_residuals


class StageSums(NamedTuple):
    """What a stage returns for one tower, to be summed over towers; or a sum of several.

    Attributes:
        own: gradients of the parameters that this stage keeps, by number.
        away: gradients of those that an earlier stage keeps, by that stage, then by number.
        results: results of the tower, by their place among all results.
    """

    own: Packed
    away: dict[int, Packed]
    results: Packed

    def unpacked(self) -> dict[str, Any]:
        """The same values as unpacked trees."""
        away = {home: unpack(one) for home, one in self.away.items()}
        return {"gradients": unpack(self.own), "away": away, "results": unpack(self.results)}


class StagePrograms:
    """Executables, by segment and then by replica.

    Args:
        chain: a tower's program in stages.
        layout: its segments on devices.
        remat: whether backward programs compute the forward ones again.

    Attributes:
        residuals: for each segment what its forward program keeps; None if it keeps nothing.
        forward: the forward programs; empty for a segment that sends nothing.
        backward: the backward programs, which return `StageSums`, and cotangents by number.
        add: the sums of two `StageSums`; empty for one tower.
        meet: the sums of two lists of values that towers send at a meeting; empty for one tower.
        meet_back: the same for the cotangents of the totals.
        numbers: whole numbers on devices: the numbers and row counts of towers.
    """

    def __init__(self, chain: Chain, layout: Layout, *, remat: bool = True) -> None:
        self._chain = chain
        self._layout = layout
        self._equal = EqualPrograms()
        self.numbers = WholeNumbers()
        stages = range(layout.num_stages)
        self.residuals: list[Residuals | None] = [
            keep_residuals(stage, self._shapes(stage.inputs), chain.params)
            if stage.sent and not remat
            else None
            for stage in chain.stages
        ]
        self.forward = [self._compile_forward(s) for s in stages]
        self.backward = [self._compile_backward(s) for s in stages]
        self.add = [self._compile_add(s, self.backward[s][0].out_info[0]) for s in stages]
        self.meet = {
            one.after: self._compile_add(one.after, self._shapes(one.sent))
            for one in chain.meetings
        }
        self.meet_back = {
            one.after: self._compile_add(one.after, self._shapes(answered))
            for one in chain.meetings
            if (answered := chain.answered_at(one))
        }

    def _shapes(self, numbers: Sequence[int]) -> list[Any]:
        return shapes_of(self._chain.avals, numbers)

    def _compile_forward(self, s: int) -> list[Executable]:
        stage = self._chain.stages[s]
        if not stage.sent:
            return []
        kept = self.residuals[s]
        run = stage.forward if kept is None else kept.forward

        def forward(values: Any) -> list[jax.Array]:  # profiles show this name
            return run(values)

        devices = self._layout.devices_of(s)
        return self._equal.compile_for_each(forward, (self._shapes(stage.inputs),), devices)

    def _compile_backward(self, s: int) -> list[Executable]:
        stage, chain, kept = self._chain.stages[s], self._chain, self.residuals[s]
        homes = chain.home_of

        def backward(values: Any, cotangents: Any) -> tuple[StageSums, dict[int, Any]]:
            cotangents = [
                [with_one_nan(each[0])] if number in chain.meeting_after else each
                for number, each in zip(stage.answered, cotangents, strict=True)
            ]
            found = (kept or stage).backward(values, cotangents, chain.params)
            by_home: dict[int, dict[int, Any]] = {s: {}}
            for number, one in found.gradients.items():
                by_home.setdefault(homes[number], {})[number] = one
            own = pack(by_home.pop(s))
            away = {home: pack(those) for home, those in by_home.items()}
            return StageSums(own, away, pack(found.results)), found.cotangents

        cotangents = [
            [shape] * chain.num_answers(number)
            for number, shape in zip(stage.answered, self._shapes(stage.answered), strict=True)
        ]
        arguments = (kept.shapes if kept else self._shapes(stage.inputs), cotangents)
        return self._equal.compile_for_each(backward, arguments, self._layout.devices_of(s))

    def _compile_add(self, s: int, sums: Any) -> list[Executable]:
        num_towers = self._layout.towers.num_towers
        return compile_add(self._equal, sums, self._layout.devices_of(s), num_towers)

"""Several steps in one call: what their metrics are made of is added up over towers at its end.

A call that ends where towers meet exchanges nothing before it does. The programs of a step are
those of a call with one, so that the bits are the same; around them is only what moves data.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.engines.executable import compile_for_each, signature
from multitower.engines.packing import Packed
from multitower.engines.totals import TowerSums
from multitower.steps.local.runner import LocalRunner, Made
from multitower.steps.looped import Stack
from multitower.steps.runner import Metrics
from multitower.steps.state.train_state import TrainState


class _Programs(NamedTuple):
    """Executables: `lay` is one per local device, `take` and `join` are for the first one."""

    lay: list[jax.stages.Compiled]
    add: list[jax.stages.Compiled]
    take: jax.stages.Compiled
    join: jax.stages.Compiled


class LocalCallRunner:
    """Calls of up to `most` steps, compiled for `most`; batches have `least` rows or more."""

    def __init__(self, one: LocalRunner, most: int, least: int) -> None:
        self._one = one
        self._most = most
        self._least = least
        self._compiled: dict[Any, _Programs] = {}

    def run(self, state: TrainState, stack: Stack, maker: object) -> tuple[TrainState, Metrics]:
        """Makes an update of every tower with each batch; the state is overwritten."""
        stack.refuse_short(self._least)
        parts = state.parts()
        made: list[Made] = []
        for batch in stack.each():
            parts, step = self._one.make(state, parts, batch)
            made.append(step)
        return self._one.state_of(parts, maker), self._metrics(made)

    def _metrics(self, made: Sequence[Made]) -> Metrics:
        """The metrics of all steps, with a first axis for them, after one exchange."""
        full = [*made, *[made[-1]] * (self._most - len(made))]
        programs = self._programs(made[0])
        laid = {
            turn.tower: programs.lay[turn.i](*[step.sums[turn.tower] for step in full])
            for turn in self._one.turns
        }
        totals = programs.take(self._one.total(laid, programs.add))
        found = [self._one.metrics(*pair) for pair in zip(made, totals, strict=False)]
        joined = programs.join(*found, *[found[-1]] * (self._most - len(found)))
        if len(made) < self._most:
            joined = {name: leaf[: len(made)] for name, leaf in joined.items()}
        return joined

    def _programs(self, made: Made) -> _Programs:
        sums = next(iter(made.sums.values()))
        key = signature((sums, made.met))
        if key not in self._compiled:
            self._compiled[key] = self._compile(sums, made)
        return self._compiled[key]

    def _compile(self, sums: TowerSums, made: Made) -> _Programs:
        one, most = self._one, self._most
        lay = compile_for_each(_laid, [sums] * most, one.devices)
        laid: TowerSums = lay[0].out_info
        (take,) = compile_for_each(
            lambda total: _taken(total, most), [laid.packed], one.devices[:1]
        )
        metrics = made.programs.finish.out_info
        (join,) = compile_for_each(_joined, [metrics] * most, one.devices[:1])
        return _Programs(lay, one.totals.compile(laid), take, join)


def _laid(*sums: TowerSums) -> TowerSums:
    """The sums of all steps in the buffers of one, one step after the other."""
    buffers = zip(*(one.packed.buffers for one in sums), strict=True)
    laid = tuple(jnp.concatenate(pieces) for pieces in buffers)
    return TowerSums(Packed(laid, sums[0].packed.layout), [])


def _taken(total: Packed, count: int) -> list[Packed]:
    """The totals of each step again."""
    pieces = [jnp.split(buffer, count) for buffer in total.buffers]
    return [Packed(tuple(one), total.layout) for one in zip(*pieces, strict=True)]


def _joined(*metrics: Metrics) -> Metrics:
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *metrics)

"""Several steps in one call: the sums that metrics are made of are added over towers at its end.

A call that ends where towers meet exchanges nothing before its end. Each step runs the programs of
a call with one step, so that the bits are the same; the programs around them only move data.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from multitower.engines.executable import Compiled, compile_for_each, signature
from multitower.engines.packing import Packed
from multitower.engines.totals import TowerSums
from multitower.steps.local.runner import LocalRunner, Made
from multitower.steps.looped import Stack
from multitower.steps.runner import Metrics
from multitower.steps.state.kept import KeptState


class _Laid(NamedTuple):
    """Trees of several steps in one.

    Attributes:
        stack: the tree, with a first axis for the steps.
        place: the index of the next step, int32, shape (), kept on the device so that the host need
            not send it.
    """

    stack: Any
    place: Any


class _Programs(NamedTuple):
    """Executables: those for sums are one per local device, the others for the first one."""

    begin: list[Compiled]
    put: list[Compiled]
    add: list[Compiled]
    take: Compiled
    begin_told: Compiled
    put_told: Compiled


class LocalCallRunner:
    """Calls of up to `most` steps, compiled once; batches have `least` rows or more."""

    def __init__(self, one: LocalRunner, most: int, least: int) -> None:
        self._one = one
        self._most = most
        self._least = least
        self._compiled: dict[Any, _Programs] = {}
        self._first_place = jax.device_put(np.int32(0), one.devices[0])

    def run(self, state: KeptState, stack: Stack) -> tuple[KeptState, Metrics]:
        """Makes an update of every tower with each batch; the state is overwritten."""
        stack.refuse_short(self._least)
        parts, programs = state.parts(), None
        steps: list[Made] = []
        laid: dict[int, _Laid] = {}
        for batch in stack.each():
            parts, made = self._one.make(state, parts, batch)
            programs = programs or self._programs(made)
            for turn in self._one.turns:
                i, tower = turn.i, turn.tower
                sums = made.sums[tower].packed
                before = laid.get(tower)
                laid[tower] = programs.put[i](before, sums) if before else programs.begin[i](sums)
            steps.append(made._replace(sums={}))
        assert programs is not None  # a call has a batch or more
        return self._one.state_of(parts, state.maker), self._metrics(programs, steps, laid)

    def _metrics(self, programs: _Programs, steps: list[Made], laid: dict[int, _Laid]) -> Metrics:
        """The metrics of all steps, with a first axis for them, after one exchange."""
        sums = {tower: TowerSums(one.stack, []) for tower, one in laid.items()}
        total, place = self._one.total(sums, programs.add), self._first_place
        told: _Laid | None = None
        for made in steps:
            own, place = programs.take(total, place)
            metrics = self._one.metrics(made, own)
            told = programs.put_told(told, metrics) if told else programs.begin_told(metrics)
        assert told is not None
        if len(steps) == self._most:
            return told.stack
        return jax.tree.map(lambda leaf: lax.slice_in_dim(leaf, 0, len(steps)), told.stack)

    def _programs(self, made: Made) -> _Programs:
        sums = next(iter(made.sums.values())).packed
        key = signature((sums, made.met))
        if key not in self._compiled:
            self._compiled[key] = self._compile(sums, made)
        return self._compiled[key]

    def _compile(self, sums: Packed, made: Made) -> _Programs:
        one, first = self._one, self._one.devices[:1]
        begin = compile_for_each(self._begun, [sums], one.devices)
        laid: _Laid = begin[0].out_info
        put = compile_for_each(_put, [laid, sums], one.devices, donate=(0,))
        (take,) = compile_for_each(_taken, [laid.stack, laid.place], first)
        metrics = made.programs.finish.out_info
        (begin_told,) = compile_for_each(self._begun, [metrics], first)
        (put_told,) = compile_for_each(_put, [begin_told.out_info, metrics], first, donate=(0,))
        add = one.totals.compile(TowerSums(laid.stack, []))
        return _Programs(begin, put, add, take, begin_told, put_told)

    def _begun(self, tree: Any) -> _Laid:
        """A stack with the first step in it, and zeros for the others."""
        room = lambda leaf: jnp.zeros((self._most, *leaf.shape), leaf.dtype).at[0].set(leaf)
        return _Laid(jax.tree.map(room, tree), jnp.int32(1))


def _put(laid: _Laid, tree: Any) -> _Laid:
    """The stack with one step more."""
    put = lambda all_of, leaf: lax.dynamic_update_index_in_dim(all_of, leaf, laid.place, 0)
    return _Laid(jax.tree.map(put, laid.stack, tree), laid.place + 1)


def _taken(total: Packed, place: Any) -> tuple[Packed, Any]:
    """The totals of the step at `place`, and the place of the next one."""
    take = lambda leaf: lax.dynamic_index_in_dim(leaf, place, 0, keepdims=False)
    return jax.tree.map(take, total), place + 1

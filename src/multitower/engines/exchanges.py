"""Towers that meet, with the same bits: their rounds on every device, and exchanges in between.

A round is one executable per device, run once per tower like any tower program. An exchange adds
along the fixed tree, or puts values side by side. Neither depends on the number of devices.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.engines import reduction
from multitower.engines.executable import Compiled, compile_for_each
from multitower.engines.packing import pack
from multitower.engines.rounds import Rounds, Sent
from multitower.engines.totals import Totals, TowerSums, TowerTurn
from multitower.towers.placement import Placement

# Is called with (round, tower, what the tower sends).
See = Callable[[int, int, Sent], None]


class _Programs(NamedTuple):
    """Executables of one round, one per local device each."""

    run: list[Compiled]
    add: list[Compiled]


class Exchanges:
    """A tower's program in rounds, compiled for one placement."""

    def __init__(
        self, rounds: Rounds, arguments: Sequence[Any], placement: Placement, totals: Totals
    ) -> None:
        """Compiles every round.

        Args:
            rounds: the program.
            arguments: its arguments, flat: arrays, or their shapes and dtypes.
            placement: which device runs which tower.
            totals: adds up what the towers send.
        """
        self._rounds = rounds
        self._placement = placement
        self._totals = totals
        self._gather = reduction.make_gather(placement, lambda blocks: blocks)
        self._programs: list[_Programs] = []
        shapes = dict(zip(rounds.inputs, arguments, strict=True))
        arrived: Any = _nothing()
        for one in rounds.rounds:
            is_last = one is rounds.rounds[-1]
            number = jax.ShapeDtypeStruct((), np.int32)
            given = ([shapes[x] for x in one.inputs], arrived, number)
            fn = self._last if is_last else one.__call__
            run = compile_for_each(fn, given, totals.devices)
            if is_last:
                self.out_info = run[0].out_info
                self._programs.append(_Programs(run, []))
                return
            found, left = run[0].out_info
            shapes.update(zip(one.outputs, found, strict=True))
            add = totals.compile(TowerSums(left.sums, [])) if left.sums.buffers else []
            self._programs.append(_Programs(run, add))
            arrived = Sent(left.sums, [self._of_all(leaf) for leaf in left.every])

    def run(
        self, arguments_of: Callable[[TowerTurn], Any], see: See | None
    ) -> Callable[[TowerTurn], tuple[TowerSums, Any]]:
        """Runs all rounds but the last one, in every local tower.

        Args:
            arguments_of: the arguments of the tower whose turn it is.
            see: called with what each tower sends in each round, if it is given.

        Returns:
            A function that runs a tower's last round; call it once for each tower.
        """
        turns = self._totals.turns
        values = {
            turn: dict(zip(self._rounds.inputs, jax.tree.leaves(arguments_of(turn)), strict=True))
            for turn in turns
        }
        numbers = {turn: values[turn][self._rounds.inputs[self._rounds.number]] for turn in turns}
        arrived = [_nothing()] * len(self._totals.devices)
        for n in range(len(self._rounds.rounds) - 1):
            arrived = self._round(n, values, arrived, numbers, see)

        def last(turn: TowerTurn) -> tuple[TowerSums, Any]:
            own = values.pop(turn)
            given = [own[x] for x in self._rounds.rounds[-1].inputs]
            return self._programs[-1].run[turn.i](given, arrived[turn.i], numbers[turn])

        return last

    def _round(
        self,
        n: int,
        values: dict[TowerTurn, dict[int, Any]],
        arrived: list[Sent],
        numbers: dict[TowerTurn, jax.Array],
        see: See | None,
    ) -> list[Sent]:
        """Runs a round in every local tower, and the exchange after it."""
        one, programs = self._rounds.rounds[n], self._programs[n]
        needed = {x for later in self._rounds.rounds[n + 1 :] for x in later.inputs}
        every: dict[int, list[jax.Array]] = {}

        def tower(turn: TowerTurn) -> TowerSums:
            own = values[turn]
            given = [own[x] for x in one.inputs]
            found, left = programs.run[turn.i](given, arrived[turn.i], numbers[turn])
            own.update(zip(one.outputs, found, strict=True))
            # Values that no later round needs are freed as soon as the tower has used them.
            values[turn] = {x: value for x, value in own.items() if x in needed}
            if see is not None:
                see(n, turn.tower, left)
            every[turn.tower] = left.every
            return TowerSums(left.sums, [])

        totals = self._totals.run(tower, programs.add)
        num_devices = len(self._totals.devices)
        sums = [total.packed for total in totals] or [_nothing().sums] * num_devices
        whole: list[list[jax.Array]] = [[]] * num_devices
        if any(every.values()):  # of shape (towers, 1, ...) then, whole on every device
            whole = reduction.gather_values(self._gather, every, self._placement)
        return [Sent(*pair) for pair in zip(sums, whole, strict=True)]

    def _of_all(self, leaf: Any) -> jax.ShapeDtypeStruct:
        shape = (self._placement.num_towers, *leaf.shape)
        return jax.ShapeDtypeStruct(shape, leaf.dtype)

    def _last(self, values: Any, arrived: Sent, number: jax.Array) -> Any:
        found = self._rounds.rounds[-1].last(values, arrived, number)
        return jax.tree.unflatten(self._rounds.treedef, found)


def _nothing() -> Sent:
    return Sent(pack([]), [])

"""Runs the towers of one replica through the segments of a program, in one step."""

import itertools
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from multitower.engines.equal_programs import Executable
from multitower.engines.executable import WholeNumbers
from multitower.engines.reduction import put
from multitower.stages.chain import Segmented
from multitower.stages.layout import Layout, moved
from multitower.stages.meeting.rounds import Meeting
from multitower.stages.meeting.totals import StageTotals
from multitower.stages.order import Turn
from multitower.towers.split import TowerRows


class Walk(ABC):
    """What one replica holds while its towers pass; a subclass knows the programs.

    Args:
        program: the tower's program; its last three arguments are the tower's numbers.
        layout: its segments on devices.
        replica: the number of the replica.
        additions: for each of its towers how many additions follow it.
        rows: the arguments before the tower's numbers.
        numbers: whole numbers on devices.

    Attributes:
        towers: the numbers of its towers.
        sent: for each segment after which towers meet, the sums of the values that they send.
    """

    def __init__(
        self,
        program: Segmented,
        layout: Layout,
        replica: int,
        additions: Mapping[int, int],
        *,
        rows: Sequence[TowerRows],
        numbers: WholeNumbers,
    ) -> None:
        self.towers = layout.towers_on[replica]
        self._program = program
        self._replica = replica
        self._additions = additions
        self._first = layout.replicas[replica][0]
        self._devices = [layout.device(replica, s) for s in range(layout.num_stages)]
        self._rows = dict(zip(program.inputs[-3 - len(rows) : -3], rows, strict=True))
        self._counts = {tower: rows[0].counts(tower) for tower in self.towers}
        self._numbers = numbers
        self._arrived: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self.sent: dict[int, list[list[jax.Array]]] = defaultdict(list)

    @abstractmethod
    def take(self, kind: str, tower: int, s: int) -> None:
        """Starts one program, and sends its results to the devices that need them."""

    @abstractmethod
    def _whole(self, number: int, s: int) -> jax.Array:
        """An argument that all towers get whole, on the device of a segment."""

    def arrive(self, meeting: Meeting, totals: Sequence[jax.Array]) -> None:
        """Takes totals over towers: all towers get the same."""
        for number, total in zip(meeting.totals, totals, strict=True):
            for user in self._program.users(number):
                there = jax.device_put(total, self._devices[user])
                for tower in self._additions:
                    self._arrived[tower, user][number] = there

    def _values(self, tower: int, s: int) -> list[jax.Array]:
        """The inputs of a segment, on its device."""
        arrived = self._arrived.pop((tower, s), {})
        return [
            arrived[number] if number in arrived else self._own(number, tower, s)
            for number in self._program.needs[s]
        ]

    def _own(self, number: int, tower: int, s: int) -> jax.Array:
        """An argument of the program, on the device of a segment."""
        if number in self._rows:
            # Rows are on the first device of the replica.
            return moved(self._rows[number].pieces[tower], self._first, self._devices[s])
        last = self._program.inputs[-3:]
        if number in last:
            return self._numbers.on(self._devices[s], self._counts[tower][last.index(number)])
        return self._whole(number, s)

    def _send(
        self, made: Mapping[int, jax.Array], tower: int, s: int, add: Mapping[int, Any]
    ) -> None:
        """Sends values by number to the segments that need them; `add` sums those that meet."""
        for number, value in made.items():
            there = {self._devices[s]: value}
            for user in self._program.users(number):
                device = self._devices[user]
                if device not in there:
                    there[device] = jax.device_put(value, device)
                self._arrived[tower, user][number] = there[device]
        for meeting in self._program.meetings:
            if meeting.after == s:
                self._put(self.sent[s], [made[x] for x in meeting.sent], tower, add[s])

    def _put(self, stack: list[Any], own: Any, tower: int, add: Sequence[Executable]) -> None:
        """Adds the values of a tower to a stack of sums."""
        put(stack, own, self._additions[tower], add[self._replica] if add else None)


def take_turns(walks: Sequence[Walk], orders: Sequence[Sequence[Turn]]) -> None:
    """Runs a round, in the order for each walk, in which its towers are counted from 0."""
    # Replicas take turns, so that all of them have work from the start.
    for turns in itertools.zip_longest(*orders):
        for walk, turn in zip(walks, turns, strict=True):
            if turn is not None:
                walk.take(turn.kind, walk.towers[turn.tower], turn.stage)


def meet(
    walks: Sequence[Walk],
    number: int,
    program: Segmented,
    totals: StageTotals,
    add: Mapping[int, Any],
) -> None:
    """After a round: sums the values that all towers have sent, and sends the totals to all."""
    for meeting in program.meetings_after(number):
        stacks = [walk.sent.pop(meeting.after) for walk in walks]
        found = totals.total(program.stage_of[meeting.after], stacks, add[meeting.after])
        for walk, total in zip(walks, found, strict=True):
            walk.arrive(meeting, total)

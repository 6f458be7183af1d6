"""Runs the towers of one replica through the stages, in one step."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from multitower.engines.equal_programs import Executable
from multitower.engines.reduction import put
from multitower.engines.same_bits import Tap
from multitower.stages.chain import Chain
from multitower.stages.layout import Layout, moved
from multitower.stages.meeting.rounds import Meeting
from multitower.stages.order import Turn
from multitower.stages.programs import Programs, StageSums
from multitower.towers.split import TowerRows


class Walk:
    """What one replica holds while its towers pass.

    Args:
        chain: the tower's program in stages.
        programs: the compiled programs of the chain.
        layout: its segments on devices.
        replica: the number of the replica.
        additions: for each of its towers how many additions follow it.
        tap: a function that is called with the results of each program; or None.

    Attributes:
        stacks: for each segment the sums of its towers that are not added yet.
        sent: for each segment after which towers meet, the sums of the values that they send.
        sent_back: for each of these segments, the sums of the cotangents of the totals.
    """

    def __init__(
        self,
        chain: Chain,
        programs: Programs,
        layout: Layout,
        replica: int,
        additions: Mapping[int, int],
        *,
        tap: Tap | None = None,
    ) -> None:
        self._chain = chain
        self._programs = programs
        self._replica = replica
        self._additions = additions
        self._tap = tap
        self._devices = [layout.device(replica, s) for s in range(layout.num_stages)]
        self._whole: dict[int, Any] = {}
        self._tower_numbers: tuple[int, ...] = ()
        self._rows: dict[int, TowerRows] = {}
        self._copies: dict[tuple[int, jax.Device], jax.Array] = {}
        self._arrived: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self._held: dict[tuple[int, int], list[jax.Array]] = {}
        self._answers: dict[tuple[int, int], dict[int, list[jax.Array]]] = defaultdict(dict)
        self._first = layout.replicas[replica][0]
        self._back: dict[tuple[int, int], dict[int, jax.Array]] = defaultdict(dict)
        self.stacks: list[list[StageSums]] = [[] for _ in chain.stages]
        self.sent: dict[int, list[list[jax.Array]]] = defaultdict(list)
        self.sent_back: dict[int, list[list[jax.Array]]] = defaultdict(list)

    def begin(
        self, params: Mapping[int, Any], rest: Sequence[Any], rows: Sequence[TowerRows]
    ) -> None:
        """Takes the arguments of the program, as `Pipeline.run` does."""
        *others, number, num_rows, all_rows = self._chain.inputs[self._chain.num_params :]
        self._whole = {**params, **dict(zip(others[: len(rest)], rest, strict=True))}
        self._rows = dict(zip(others[len(rest) :], rows, strict=True))
        self._tower_numbers = (number, num_rows, all_rows)

    def arrive(self, meeting: Meeting, totals: Sequence[jax.Array]) -> None:
        """Takes totals over towers: all towers get the same."""
        for number, total in zip(meeting.totals, totals, strict=True):
            for user in self._chain.users(number):
                there = jax.device_put(total, self._devices[user])
                for tower in self._additions:
                    self._arrived[tower, user][number] = there

    def arrive_back(self, meeting: Meeting, totals: Sequence[jax.Array]) -> None:
        """Takes the totals of the cotangents: all towers get the same."""
        there = jax.device_put(list(totals), self._devices[meeting.after])
        for number, total in zip(self._chain.answered_at(meeting), there, strict=True):
            for tower in self._additions:
                self._answers[tower, meeting.after][number] = [total]

    def take(self, turn: Turn) -> None:
        """Starts one program, and sends its results to the devices that need them."""
        if turn.kind == "forward":
            self._forward(turn.tower, turn.stage)
        else:
            self._backward(turn.tower, turn.stage)

    def _forward(self, tower: int, s: int) -> None:
        values = self._held[tower, s] = self._values(tower, s)
        sent, kept = self._chain.stages[s].sent, self._programs.residuals[s]
        if not sent:
            return
        made = self._programs.forward[s][self._replica](values)
        if kept is not None:
            self._held[tower, s] = kept.take(values, made)
        if self._tap is not None:
            self._tap("forward program", tower, {self._chain.segments.name(s): made})
        for number, value in zip(sent, made[: len(sent)], strict=True):
            there = {self._devices[s]: value}
            for user in self._chain.users(number):
                device = self._devices[user]
                if device not in there:
                    there[device] = jax.device_put(value, device)
                self._arrived[tower, user][number] = there[device]
        for meeting in self._chain.meetings:
            if meeting.after == s:
                values = dict(zip(sent, made, strict=False))
                own = [values[number] for number in meeting.sent]
                self._put(self.sent[s], own, tower, self._programs.meet.get(s, []))

    def _backward(self, tower: int, s: int) -> None:
        values = self._held.pop((tower, s), None)
        if values is None:
            values = self._values(tower, s)
        answers = self._answers.pop((tower, s), {})
        cotangents = [answers[number] for number in self._chain.stages[s].answered]
        sums, found = self._programs.backward[s][self._replica](values, cotangents)
        if self._tap is not None:
            self._tap("backward program", tower, {self._chain.segments.name(s): (sums, found)})
        for number, one in found.items():
            if number in self._chain.meeting_after:
                self._meet_back(number, one, tower, s)
                continue
            maker = self._chain.made_by(number)
            waiting = self._answers[tower, maker].setdefault(number, [])
            waiting.append(moved(one, self._devices[s], self._devices[maker]))
        self._put(self.stacks[s], sums, tower, self._programs.add[s])

    def _meet_back(self, number: int, one: jax.Array, tower: int, s: int) -> None:
        """Takes a cotangent of a total; once a tower has all of a meeting, they are summed."""
        meeting = self._chain.meeting_after[number]
        waiting = self._back[tower, meeting.after]
        sent_as = meeting.sent[meeting.totals.index(number)]
        waiting[sent_as] = moved(one, self._devices[s], self._devices[meeting.after])
        answered = self._chain.answered_at(meeting)
        if len(waiting) == len(answered):
            own = [waiting[x] for x in answered]
            del self._back[tower, meeting.after]
            add = self._programs.meet_back[meeting.after]
            self._put(self.sent_back[meeting.after], own, tower, add)

    def _put(self, stack: list[Any], own: Any, tower: int, add: Sequence[Executable]) -> None:
        """Adds the values of a tower to a stack of sums."""
        put(stack, own, self._additions[tower], add[self._replica] if add else None)

    def _values(self, tower: int, s: int) -> list[jax.Array]:
        """The inputs of a stage, on its device."""
        arrived = self._arrived.pop((tower, s), {})
        return [
            arrived[number] if number in arrived else self._copy(number, tower, s)
            for number in self._chain.stages[s].inputs
        ]

    def _copy(self, number: int, tower: int, s: int) -> jax.Array:
        """An argument of the program on a stage's device, copied there once in a step."""
        device = self._devices[s]
        if number in self._rows:
            # Rows are on the first device of the replica.
            return moved(self._rows[number].pieces[tower], self._first, device)
        if number in self._tower_numbers:
            return self._programs.numbers.on(device, self._number(number, tower))
        if (number, device) not in self._copies:
            self._copies[number, device] = jax.device_put(self._whole[number], device)
        return self._copies[number, device]

    def _number(self, number: int, tower: int) -> int:
        """The tower's number, or one of its row counts."""
        counts = next(iter(self._rows.values())).counts(tower)
        return counts[self._tower_numbers.index(number)]

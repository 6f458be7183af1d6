"""Order: the schedule of a pipeline, one forward, one backward (1F1B)."""

from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple


class Turn(NamedTuple):
    """One program of one tower: its forward or backward pass in a stage, or in a segment."""

    kind: Literal["forward", "backward"]
    tower: int
    stage: int


class Segments(NamedTuple):
    """The stages of a step, cut where towers meet.

    Attributes:
        stage_of: the stage of each segment.
        round_of: the number of meetings before each segment, in ascending order.
        work: the share of each segment in the work of its stage, 0 to 1.
        has_forward: whether each segment has a forward program; segments that send nothing do not.
    """

    stage_of: tuple[int, ...]
    round_of: tuple[int, ...]
    work: tuple[float, ...]
    has_forward: tuple[bool, ...]

    @property
    def num_rounds(self) -> int:
        """The number of rounds: one more than the number of meetings."""
        return 1 + self.round_of[-1]

    def name(self, segment: int) -> str:
        """The name of a segment, such as "stage 1" or "stage 1, round 2"."""
        name = f"stage {self.stage_of[segment]}"
        return name if self.num_rounds == 1 else f"{name}, round {self.round_of[segment]}"

    def equal_times(self, *, recomputed: bool = True) -> dict[tuple[str, int], float]:
        """How long programs take if all stages have equal work, by (kind, segment).

        The forward programs of a stage together take 1. A backward program takes twice the time of
        the forward one, and three times if it computes the forward part again.

        Args:
            recomputed: whether backward programs compute the forward part again. Those of segments
                without a forward program always do.
        """
        times: dict[tuple[str, int], float] = {}
        for s, (work, has_forward) in enumerate(zip(self.work, self.has_forward, strict=True)):
            if has_forward:
                times["forward", s] = work
            times["backward", s] = work * (3 if recomputed or not has_forward else 2)
        return times


def one_forward_one_backward(num_towers: int, place_of: Sequence[int]) -> list[list[Turn]]:
    """The turns of one replica, in ticks: turns in one list can run at the same time.

    A stage works on its towers in ascending order. It holds the inputs of at most as many towers as
    there are devices from its own to the last; with interleaved stages, as there are stages from it
    to the last. The last stage has no forward turn, since its backward program includes the forward
    part.

    Args:
        num_towers: towers of the replica.
        place_of: the number of the device within the replica, for each stage.

    Source: PipeDream-Flush (Narayanan et al. 2021), "1F1B".
    """
    num_stages = len(place_of)
    forwards, backwards = [0] * num_stages, [0] * num_stages
    room = [num_stages - stage for stage in range(num_stages)]
    if list(place_of) == sorted(place_of):
        room = [place_of[-1] + 1 - place for place in place_of]
    ticks: list[list[Turn]] = []
    while backwards[0] < num_towers:
        ready = _ready(num_towers, forwards, backwards, room)
        tick = [
            min((turn for turn in ready if place_of[turn.stage] == place), key=_rank)
            for place in sorted({place_of[turn.stage] for turn in ready})
        ]
        for kind, _, stage in tick:
            counts = forwards if kind == "forward" else backwards
            counts[stage] += 1
        ticks.append(tick)
    return ticks


def in_rounds(
    num_towers: int, place_of: Sequence[int], round_of: Sequence[int]
) -> list[list[Turn]]:
    """The turns of one replica whose towers exchange values: they meet between two lists.

    All towers go forward, round by round. In the last round they go one forward, one backward; then
    all go backward through the other rounds. So a device holds what all of its
    towers need for that.

    Args:
        num_towers: towers of the replica.
        place_of: the number of the device within the replica, for each segment.
        round_of: the round of each segment, in ascending order.
    """
    before = forward_in_rounds(num_towers, round_of)[:-1]
    after: list[list[Turn]] = []
    for turns in before:
        # Backward, towers pass in the same order, through the last segment first.
        first, last = turns[0].stage, turns[-1].stage
        back = [turn._replace(kind="backward", stage=first + last - turn.stage) for turn in turns]
        after.append(back)
    own = [s for s, r in enumerate(round_of) if r == max(round_of)]
    ticks = one_forward_one_backward(num_towers, [place_of[s] for s in own])
    middle = [turn._replace(stage=turn.stage + own[0]) for tick in ticks for turn in tick]
    return [*before, middle, *after[::-1]]


def forward_in_rounds(num_towers: int, round_of: Sequence[int]) -> list[list[Turn]]:
    """The turns of one replica without backward programs, a list for each round.

    Args:
        num_towers: towers of the replica.
        round_of: the round of each segment, in ascending order.
    """
    found: list[list[Turn]] = []
    for number in range(max(round_of) + 1):
        own = [s for s, r in enumerate(round_of) if r == number]
        found.append(
            [
                Turn("forward", tick - place, s)
                for tick in range(num_towers + len(own) - 1)
                for place, s in enumerate(own)
                if 0 <= tick - place < num_towers
            ]
        )
    return found


class TimedTurn(NamedTuple):
    """When a turn runs: from `start` to `end`, in units of a forward program, or in seconds.

    Attributes:
        turn: the program; its `stage` is a segment.
        place: the number of the device within the replica.
        start: when it begins.
        end: when it ends.
    """

    turn: Turn
    place: int
    start: float
    end: float


def timeline(
    phases: Sequence[Sequence[Turn]],
    place_of: Sequence[int],
    times: Mapping[tuple[str, int], float],
) -> list[TimedTurn]:
    """Computes when each turn runs, if moves and sums take no time.

    Args:
        phases: the turns in the order in which they are started, as `in_rounds` returns them. Where
            towers meet, a phase begins when the one before has ended.
        place_of: the number of the device within the replica, for each segment.
        times: the duration of programs, by (kind, segment); a forward program may be missing.
    """
    last = len(place_of) - 1
    free = [0.0] * (max(place_of) + 1)
    ends: dict[Turn, float] = {}
    timed: list[TimedTurn] = []
    for phase in phases:
        all_met = max(free)
        for turn in phase:
            kind, tower, s = turn
            needs = Turn("forward", tower, s - 1)
            if kind == "backward" and s < last:
                needs = Turn("backward", tower, s + 1)
            start = max(all_met, ends.get(needs, 0.0), free[place_of[s]])
            ends[turn] = free[place_of[s]] = start + times.get((kind, s), 0.0)
            if (kind, s) in times:
                timed.append(TimedTurn(turn, place_of[s], start, ends[turn]))
    return timed


def bubble(turns: Sequence[TimedTurn]) -> float:
    """The share of the time in which the devices of a timeline wait, 0 to 1."""
    num_devices = 1 + max(turn.place for turn in turns)
    busy = sum(turn.end - turn.start for turn in turns)
    return 1 - busy / (num_devices * max(turn.end for turn in turns))


def least_bubble(num_devices: int, num_towers: int) -> float:
    """The bubble by the formula for equal stages without recomputation: (P - 1) / (M + P - 1).

    Args:
        num_devices: P, the devices of the replica.
        num_towers: M, the towers of the replica.
    """
    return (num_devices - 1) / (num_towers + num_devices - 1)


def _ready(
    num_towers: int, forwards: list[int], backwards: list[int], room: list[int]
) -> list[Turn]:
    last = len(forwards) - 1
    turns: list[Turn] = []
    for stage in range(last + 1):
        arrived = forwards[stage - 1] if stage else num_towers
        if stage < last:
            has_room = forwards[stage] - backwards[stage] < room[stage]
            if has_room and forwards[stage] < arrived:
                turns.append(Turn("forward", forwards[stage], stage))
            arrived = backwards[stage + 1]
        if backwards[stage] < arrived:
            turns.append(Turn("backward", backwards[stage], stage))
    return turns


def _rank(turn: Turn) -> tuple[int, int]:
    """Ranks forward turns first, as long as there is room, so that later stages do not wait.

    Backward first would lead to forward, forward, backward, backward. With 4 stages and 32 towers,
    devices would then wait for 40 % of the time instead of 13 %, if backward programs take three
    times as long as forward ones.
    """
    return (0, -turn.stage) if turn.kind == "forward" else (1, turn.stage)

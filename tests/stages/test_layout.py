"""Where stages run and in which order: pure functions."""

import itertools
from types import SimpleNamespace
from typing import NamedTuple

import jax
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from multitower.errors import ArgumentError, DeviceError
from multitower.stages.balance import equal_groups, equal_positions
from multitower.stages.layout import check_layout, lay_out
from multitower.stages.options import StageOptions, stage_options
from multitower.stages.order import (
    Segments,
    bubble,
    forward_in_rounds,
    in_rounds,
    least_bubble,
    one_forward_one_backward,
    timeline,
)
from multitower.stages.walk import take_turns


@pytest.mark.filterwarnings("ignore:stages=")
@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_every_stage_and_tower_has_one_device_and_no_device_is_in_two_replicas(
    devices, towers, stages, interleave
):
    layout = lay_out(jax.devices()[:devices], towers, stages, None, interleave=interleave)
    used = [one for replica in layout.replicas for one in replica]
    assert len(used) == len(set(used)) <= devices
    assert len(layout.towers.owners) == towers
    assert list(layout.towers.devices) == layout.devices_of(0)
    for replica in range(len(layout.replicas)):
        assert {layout.device(replica, s) for s in range(stages)} == set(layout.replicas[replica])
    if not interleave:
        assert list(layout.place_of) == sorted(layout.place_of)
    elif len(layout.replicas[0]) > 1:
        assert all(a != b for a, b in itertools.pairwise(layout.place_of))


def test_metrics_and_the_step_are_where_the_last_stage_is():
    layout = lay_out(jax.devices()[:4], 2, 2, None)
    assert layout.head == layout.replicas[0][1]


@pytest.mark.parametrize(
    ("num_stages", "layout", "message"),
    [
        (0, None, "stages=0"),
        (True, None, "stages=True"),
        (2.0, None, "stages=2.0"),
        (2, 4, "layout=4: it must be a pair"),
        (2, (1, 1, 1), "must be a pair"),
        (2, (0, 2), "must be a pair"),
        (2, (5, 3), r"each replica 3 devices, and stages=2 .* Use layout=\(5, 2\)"),
    ],
)
def test_a_layout_of_other_than_counts_is_refused(num_stages, layout, message):
    with pytest.raises(ArgumentError, match=message):
        check_layout(num_stages, layout)
    check_layout(2, (5, 2))  # more replicas than stages are none of its business
    check_layout(2, (5, 1))


def test_a_layout_that_is_larger_than_what_there_is_is_refused():
    with pytest.raises(DeviceError, match=r"layout=\(2, 2\) needs 4 devices, and there are 3"):
        lay_out(jax.devices()[:3], 2, 2, (2, 2))
    with pytest.raises(DeviceError, match=r"has 2 replicas, .* Use layout=\(1, 2\)"):
        lay_out(jax.devices()[:4], 1, 2, (2, 2))


class OfProcess(NamedTuple):
    process_index: int
    id: int


def of_processes(processes, each):
    return [OfProcess(p, n) for p in range(processes) for n in range(each)]


@pytest.mark.filterwarnings("ignore:stages=")
@given(st.integers(1, 4), st.integers(1, 4), st.integers(0, 6), st.integers(1, 5))
def test_a_replica_is_in_one_process_and_all_have_as_many(processes, each, more, stages):
    # The lies: a replica over two processes, a process that has nothing to do and waits.
    layout = lay_out(of_processes(processes, each), processes + more, stages, None)
    homes = [{one.process_index for one in replica} for replica in layout.all_replicas]
    assert all(len(home) == 1 for home in homes)
    assert homes == sorted(homes, key=min)
    assert {sum(p in home for home in homes) for p in range(processes)} == {len(homes) // processes}
    of_last = layout.placement_of(stages - 1)
    assert of_last.owners == layout.towers.owners
    assert [one.process_index for one in of_last.devices] == [min(home) for home in homes]
    assert len(layout.replicas) == len(homes) // processes  # this is process 0


@pytest.mark.parametrize(
    ("layout", "towers", "message"),
    [
        ((1, 4), 8, r"2 processes with 2 devices each: .*Use layout=\(2, 2\)"),
        ((3, 1), 8, r"Use layout=\(4, 1\)"),
        ((4, 2), 8, r"Use layout=\(2, 2\)"),
        ((2, 4), 8, r"Use layout=\(2, 2\)"),
        ((2, 2), 1, "Use towers=2 or more, or fewer processes"),
        (None, 1, "Use towers=2 or more, or fewer processes"),
    ],
)
def test_a_layout_that_does_not_fit_into_processes_is_refused(layout, towers, message):
    with pytest.raises(DeviceError, match=message):
        lay_out(of_processes(2, 2), towers, 4, layout)


def test_a_process_without_a_replica_is_told(monkeypatch):
    # The lie: it waits for the others for ever.
    there = [SimpleNamespace(process_index=1, platform="gpu")] * 2
    monkeypatch.setattr("multitower.stages.options.find_all", lambda _: there)
    with pytest.raises(DeviceError, match="process 0 has none of them"):
        StageOptions(2, (1, 2)).on(None, 4)


def test_options_of_stages_are_kept():
    # The lies: remat=False that is True after all, interleave=True of no stages.
    assert stage_options(2, (1, 2), interleave=True) == StageOptions(2, (1, 2), True, True)
    assert stage_options(2, None, remat=False) == StageOptions(2, None, False, False)
    with pytest.raises(ArgumentError, match="stages= is missing"):
        stage_options(None, None, interleave=True)


def test_devices_that_stay_idle_are_told():
    with pytest.warns(UserWarning, match=r"keep 6 of 7 devices busy, with layout=\(2, 3\)"):
        lay_out(jax.devices()[:7], 4, 3, None)


PLACES = st.integers(1, 5).flatmap(
    lambda stages: st.integers(1, stages).flatmap(
        lambda each: st.sampled_from([
            [s * each // stages for s in range(stages)],
            [s % each for s in range(stages)],
        ])
    )
)  # fmt: skip


@given(st.integers(1, 9), PLACES)
def test_one_forward_one_backward(towers, place_of):
    # The lies: a tower that overtakes another, a stage that holds the inputs of all towers.
    stages = len(place_of)
    done = set()
    held = [0] * stages
    for tick in one_forward_one_backward(towers, place_of):
        places = [place_of[turn.stage] for turn in tick]
        assert len(places) == len(set(places))  # one program at a time on a device
        for kind, tower, stage in tick:
            if kind == "forward":
                assert stage == 0 or ("forward", tower, stage - 1) in done
                held[stage] += 1
                assert held[stage] <= stages - stage
                if place_of == sorted(place_of):
                    assert held[stage] <= max(place_of) + 1 - place_of[stage]
            elif stage == stages - 1:
                assert stage == 0 or ("forward", tower, stage - 1) in done
            else:
                assert ("backward", tower, stage + 1) in done
                held[stage] -= 1
            assert tower == 0 or (kind, tower - 1, stage) in done
        done.update(tick)
    assert len(done) == towers * (2 * stages - 1)
    assert held == [0] * stages


@given(st.integers(1, 9), st.integers(1, 5))
def test_forward_in_rounds_takes_every_tower_through_every_stage(towers, stages):
    # The lie: a tower in a stage before it was in the one before.
    done = []
    for number, turns in enumerate(forward_in_rounds(towers, [s // 2 for s in range(stages)])):
        for kind, tower, stage in turns:
            assert kind == "forward"
            assert stage // 2 == number
            assert stage == 0 or (tower, stage - 1) in done
            done.append((tower, stage))
    assert sorted(done) == [(t, s) for t in range(towers) for s in range(stages)]


def test_replicas_with_fewer_towers_end_before_the_others():
    # The lie: towers of the others that nobody starts, where 2 replicas have 3 towers.
    taken = []
    walks = [
        SimpleNamespace(towers=towers, take=lambda kind, tower, s: taken.append((tower, s)))
        for towers in ((0, 1), (2,))
    ]
    orders = [forward_in_rounds(len(walk.towers), [0, 0])[0] for walk in walks]
    take_turns(walks, orders)
    assert taken == [(0, 0), (2, 0), (1, 0), (2, 1), (0, 1), (1, 1)]


def neighbours(stages, devices):
    return [s * devices // stages for s in range(stages)]


def pass_through(towers, place_of, **options):
    """The timeline of a step in which no towers meet."""
    stages = range(len(place_of))
    sends = tuple(s < stages[-1] for s in stages)
    segments = Segments(tuple(stages), (0,) * len(stages), (1,) * len(stages), sends)
    phases = in_rounds(towers, place_of, segments.round_of)
    return timeline(phases, place_of, segments.equal_times(**options))


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 2))
def test_the_bubble_of_the_timeline_is_that_of_the_formula(towers, devices, each):
    # The lies: a formula that the order of dispatch does not keep, a program before its input.
    place_of = neighbours(devices * each, devices)
    plain, slots = pass_through(towers, place_of, recomputed=False), pass_through(towers, place_of)
    if towers >= devices:
        assert bubble(plain) == pytest.approx(least_bubble(devices, towers))
    assert sum(slot.end - slot.start for slot in plain) == 3 * towers * len(place_of)
    assert len(slots) == towers * (2 * len(place_of) - 1)
    for found in (plain, slots):
        ends = {slot.turn: slot.end for slot in found}
        for turn, place, start, _ in found:
            before = turn._replace(kind="forward", stage=turn.stage - 1)
            after = turn._replace(stage=turn.stage + 1)
            assert ends.get(before, 0) <= start
            assert turn.kind == "forward" or ends.get(after, 0) <= start
            same = [one for one in found if one.place == place and one.start < start]
            assert all(one.end <= start for one in same)


def test_the_timeline_of_measured_times():
    # The lie: a slow stage that makes nobody wait.
    phases = in_rounds(4, [0, 1], [0, 0])
    times = {("forward", 0): 1.0, ("backward", 0): 3.0, ("backward", 1): 3.0}
    assert timeline(phases, [0, 1], times) == pass_through(4, [0, 1])
    slots = timeline(phases, [0, 1], {**times, ("backward", 1): 8.0})
    # Device 1 is busy but for the first forward program and the last backward one.
    assert slots[-1].end == 1 + 4 * 8 + 3
    assert bubble(slots) == pytest.approx(1 - (4 * 8 + 4 * 4) / (2 * 36))


def test_more_towers_make_a_smaller_bubble():
    found = [bubble(pass_through(n, range(4))) for n in (4, 8, 32)]
    assert found == sorted(found, reverse=True)
    assert found[-1] == pytest.approx(1 / 8, abs=0.01)  # docs/guides/stages.md says so
    assert bubble(pass_through(3, [0])) == 0  # one device is always busy


def test_towers_that_meet_wait_for_each_other():
    # The lie: the bubble of towers that pass through without a meeting, which is 1/4 here.
    phases = in_rounds(3, [0, 1, 1], [0, 0, 1])
    times = {("forward", 0): 1, ("forward", 1): 1, ("backward", 2): 2}
    slots = timeline(phases, [0, 1, 1], {**times, ("backward", 1): 2, ("backward", 0): 2})
    # All forward until 4; the last segment until 10, with the meeting before; and back until 18.
    ends = {slot.turn: slot.end for slot in slots}
    assert [ends["backward", t, 2] for t in range(3)] == [6, 8, 10]
    assert [ends["backward", t, 1] for t in range(3)] == [12, 14, 16]
    assert [ends["backward", t, 0] for t in range(3)] == [14, 16, 18]
    assert bubble(slots) == pytest.approx(1 - (3 * 3 + 3 * 5) / (2 * 18))
    # The first device is free at 3, and the last tower of the second one is there at 4.
    phases = in_rounds(3, [0, 1, 0], [0, 0, 1])
    slots = timeline(phases, [0, 1, 0], {**times, ("backward", 1): 2, ("backward", 0): 2})
    assert [slot.start for slot in slots if slot.turn.stage == 2] == [4, 6, 8]


@given(st.lists(st.integers(0, 9), min_size=1, max_size=7), st.integers(1, 4))
def test_groups_are_as_equal_as_can_be(work, groups):
    groups = min(groups, len(work))
    found = equal_groups(work, groups)
    assert sorted(set(found)) == list(range(groups))
    assert found == sorted(found)

    def largest(starts):
        ends = (*starts[1:], len(work))
        return max(sum(work[a:b]) for a, b in zip(starts, ends, strict=True))

    every = itertools.combinations(range(1, len(work)), groups - 1)
    starts = (0, *(found.index(g) for g in range(1, groups)))
    assert largest(starts) == min(largest((0, *one)) for one in every)


@example([1, 1, 1, 9], 3)
@given(st.lists(st.integers(1, 9), min_size=2, max_size=12), st.integers(1, 4))
def test_positions_leave_no_part_empty(work, parts):
    parts = min(parts, len(work))
    found = equal_positions(work, [0] * (len(work) + 1), parts)
    bounds = [0, *found, len(work)]
    assert all(a < b for a, b in itertools.pairwise(bounds))


def test_a_cut_is_where_few_bytes_cross():
    assert equal_positions([1] * 8, [9, 9, 9, 9, 9, 1, 9, 9, 9], 2) == [5]
    assert equal_positions([1] * 8, [9, 9, 9, 9, 9, 9, 1, 9, 9], 2) == [4]  # too far
    assert equal_positions([4, 4, 4], [9, 9, 1, 9], 2) == [2]  # both are as near, and too far

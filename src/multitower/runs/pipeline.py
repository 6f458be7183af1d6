"""The pipeline of a run with stages: where and when programs run, and how long devices wait.

It is computed from the order in which programs are started, with equal work in all stages or with
measured times.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitower.runs.options import RunOptions
from multitower.stages.layout import Layout
from multitower.stages.options import stage_options
from multitower.stages.order import Segments, bubble, in_rounds, least_bubble, timeline


def describe_pipeline(
    layout: Layout,
    segments: Segments | None,
    *,
    remat: bool = True,
    times: Mapping[tuple[str, int], float] | None = None,
) -> dict[str, Any]:
    """The description of the stages of a run in `result.json`.

    Args:
        layout: stages and towers on devices.
        segments: the stages, cut where towers meet; None if no step was made.
        remat: whether backward programs compute the forward part again.
        times: the seconds that each program takes, by (kind, segment); None for equal work in all
            stages, divided among the segments of a stage by their operations.

    Returns:
        The values of `planned_pipeline`. If a step was made also `rounds`, one more than the number
        of meetings in a step; `bubble`, the share of a step in which devices wait; `least_bubble`,
        the same by the formula (P - 1) / (M + P - 1), without recomputation, or None if towers
        meet, for which it does not hold; and `timeline`, for each program of the last replica its
        device, stage, round, tower and kind, and its start and end in units of a stage's forward
        program, or in seconds with `times`.
    """
    planned = _described(layout)
    if segments is None:
        return planned
    towers = layout.towers.towers_on[-1]
    place_of = layout.of_segments(segments.stage_of).place_of
    phases = in_rounds(len(towers), place_of, segments.round_of)
    slots = timeline(phases, place_of, times or segments.equal_times(recomputed=remat))
    _, devices = planned["layout"]
    least = None if segments.num_rounds > 1 else round(least_bubble(devices, len(towers)), 4)
    return {
        **planned,
        "rounds": segments.num_rounds,
        "bubble": round(bubble(slots), 4),
        "least_bubble": least,
        "timeline": [
            [slot.place, segments.stage_of[s], segments.round_of[s], towers[tower], kind,
             slot.start, slot.end]
            for slot in slots
            for kind, tower, s in [slot.turn]
        ],
    }  # fmt: skip


def traced_pipeline(
    pipeline: Mapping[str, Any], layout: Layout, directory: Path
) -> dict[str, Any] | None:
    """The pipeline of the last step in a trace of JAX's profiler, as it ran on the devices.

    Args:
        pipeline: as `describe_pipeline` returns it.
        layout: stages and towers on devices.
        directory: the directory of the trace.

    Returns:
        `bubble` and `timeline`, in seconds from the start of the first program. With several
        processes they are those of the last replica of this process, if it has as many towers as
        the last of all. None if the trace lacks programs of a whole step.
    """
    from multitower.training.trace import read_executions  # noqa: PLC0415 (importing stays quick)

    if "timeline" not in pipeline:
        return None
    described, own = layout.towers.towers_on[-1], layout.towers_on[-1]
    if len(own) != len(described):
        return None
    tower = dict(zip(described, own, strict=True))
    executions = read_executions(directory)
    slots: list[list[Any]] = []
    counts: set[tuple[int, int]] = set()
    for place, device in enumerate(layout.replicas[-1]):
        for kind in ("forward", "backward"):
            wanted = [one for one in pipeline["timeline"] if (one[0], one[4]) == (place, kind)]
            # A device begins its programs in the order in which they are started.
            found = [
                one
                for one in executions.get(device.local_hardware_id or 0, [])
                if one.module == f"jit_{kind}"
            ]
            if wanted:
                counts.add(divmod(len(found), len(wanted)))
                last = found[-len(wanted) :]
                slots += [
                    [*one[:3], tower[one[3]], one[4], ran.start, ran.end]
                    for one, ran in zip(wanted, last, strict=False)
                ]
    if len(counts) != 1:
        return None
    ((steps, rest),) = counts
    if rest or not steps:
        return None
    slots.sort(key=lambda slot: slot[-2])
    began = slots[0][-2]
    slots = [[*what, start - began, end - began] for *what, start, end in slots]
    return {"bubble": round(_waiting(slots), 4), "timeline": slots}


def _waiting(slots: Sequence[Sequence[Any]]) -> float:
    """The share of the time in which devices run none of these programs, in order of start."""
    busy, until = 0.0, dict[int, float]()
    for place, *_, start, end in slots:
        # If a device runs two programs at the same time, the time counts once.
        busy += max(0.0, end - max(start, until.get(place, 0.0)))
        until[place] = max(end, until.get(place, 0.0))
    return 1 - busy / (len(until) * max(until.values()))


def pipeline_in_words(pipeline: Mapping[str, Any]) -> str:
    """How long devices wait, in one line of text.

    Args:
        pipeline: as `describe_pipeline` or `planned_pipeline` returns it.

    Example:
        >>> from multitower.runs.pipeline import pipeline_in_words
        >>> found = {"stages": 4, "layout": [2, 4], "towers": 8}
        >>> pipeline_in_words(found)
        '4 stages, 2 replicas of 4 devices (8 towers pass)'
        >>> found |= {"rounds": 1, "bubble": 0.286, "least_bubble": 0.2727}
        >>> pipeline_in_words(found)
        '4 stages, 2 replicas of 4 devices wait for 29 % of a step (8 towers pass; at least 27 %)'
        >>> found |= {"rounds": 3, "bubble": 0.412, "least_bubble": None}
        >>> pipeline_in_words(found)
        '4 stages, 2 replicas of 4 devices wait for 41 % of a step (8 towers pass and meet twice)'
    """
    replicas, devices = pipeline["layout"]
    place = f"{pipeline['stages']} stages, {replicas} replica{'' if replicas == 1 else 's'}"
    if devices == 1:
        return f"{place} of 1 device: none waits for another"
    place = f"{place} of {devices} devices"
    towers = f"{pipeline['towers']} towers pass"
    if "bubble" not in pipeline:
        return f"{place} ({towers})"
    place = f"{place} wait for {100 * pipeline['bubble']:.0f} % of a step"
    if pipeline["rounds"] > 1:
        return f"{place} ({towers} and meet {_times(pipeline['rounds'] - 1)})"
    return f"{place} ({towers}; at least {100 * pipeline['least_bubble']:.0f} %)"


def planned_pipeline(options: RunOptions) -> dict[str, Any] | None:
    """The pipeline that a run will have; None without stages. Starts JAX.

    It does not say how long devices wait: this depends on where towers meet, which is known only
    after the first step has been traced.

    Returns:
        `stages`; `layout`, the number of replicas and of devices of each; `towers`, the towers of
        the last replica, which has the most.

    Raises:
        MultitowerError: the layout does not fit.
    """
    stages = stage_options(options.stages, options.layout_pair(), options.interleave, options.remat)
    if stages is None or options.towers is None:
        return None
    return _described(stages.on(options.devices, options.towers))


def _described(layout: Layout) -> dict[str, Any]:
    return {
        "stages": layout.num_stages,
        "layout": [len(layout.all_replicas), len(layout.all_replicas[0])],
        "towers": len(layout.towers.towers_on[-1]),
    }


def _times(number: int) -> str:
    return {1: "once", 2: "twice"}.get(number, f"{number} times")

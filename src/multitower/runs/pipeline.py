"""The pipeline of a run with stages: which program runs where and when, and how long devices wait.

It is the order in which programs are started, with equal work in all stages or with measured times.
"""

from collections.abc import Mapping
from typing import Any

from multitower.runs.options import RunOptions
from multitower.stages.layout import Layout
from multitower.stages.options import stage_options
from multitower.stages.order import bubble, least_bubble, one_forward_one_backward, timeline


def describe_pipeline(
    layout: Layout, *, remat: bool = True, times: Mapping[tuple[str, int], float] | None = None
) -> dict[str, Any]:
    """What `result.json` says of the stages of a run.

    Args:
        layout: stages and towers on devices.
        remat: whether backward programs repeat the forward ones.
        times: how many seconds each program takes, by (kind, stage); None for equal work.

    Returns:
        `stages`; `layout`, the replicas and the devices of each; `towers`, of the last replica,
        which has the most; `bubble`, the share of a step in which its devices wait, and
        `least_bubble`, the same by (P - 1) / (M + P - 1), without the forward programs that
        backward ones repeat; `timeline`, for each program of that replica its device, stage, tower
        and kind, its start and its end in units of a forward program, or in seconds.
    """
    towers = layout.towers.towers_on[-1]
    num_devices = len(layout.all_replicas[0])
    ticks = one_forward_one_backward(len(towers), layout.place_of)
    slots = timeline(ticks, layout.place_of, recomputed=remat, times=times)
    return {
        "stages": layout.num_stages,
        "layout": [len(layout.all_replicas), num_devices],
        "towers": len(towers),
        "bubble": round(bubble(slots), 4),
        "least_bubble": round(least_bubble(num_devices, len(towers)), 4),
        "timeline": [
            [slot.place, slot.turn.stage, towers[slot.turn.tower], slot.turn.kind, slot.start,
             slot.end]
            for slot in slots
        ],
    }  # fmt: skip


def pipeline_in_words(pipeline: Mapping[str, Any]) -> str:
    """How long devices wait, in a line.

    Args:
        pipeline: as `describe_pipeline` returns it.

    Example:
        >>> from multitower.runs.pipeline import pipeline_in_words
        >>> found = {"stages": 4, "layout": [2, 4], "towers": 8, "bubble": 0.286}
        >>> pipeline_in_words({**found, "least_bubble": 0.2727})
        '4 stages, 2 replicas of 4 devices wait for 29 % of a step (8 towers pass; at least 27 %)'
    """
    replicas, devices = pipeline["layout"]
    place = f"{pipeline['stages']} stages, {replicas} replica{'' if replicas == 1 else 's'}"
    if devices == 1:
        return f"{place} of 1 device: none waits for another"
    return (
        f"{place} of {devices} devices wait for {100 * pipeline['bubble']:.0f} % of a step "
        f"({pipeline['towers']} towers pass; at least {100 * pipeline['least_bubble']:.0f} %)"
    )


def planned_pipeline(options: RunOptions) -> dict[str, Any] | None:
    """The pipeline that a run will have; None without stages. Starts JAX.

    Raises:
        MultitowerError: the layout does not fit.
    """
    stages = stage_options(options.stages, options.layout_pair(), options.interleave, options.remat)
    if stages is None or options.towers is None:
        return None
    return describe_pipeline(stages.on(options.devices, options.towers), remat=options.remat)

"""Measures the programs of a model in stages, and how long devices would wait with these times.

The host waits for each program before it starts the next, so that each runs by itself. A time
includes the host's call and the moves before it, and simulated devices get all cores.
"""

import statistics
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jax

from multitower.engines.same_bits import tapped
from multitower.hardware.devices import devices_in_words
from multitower.proof.record import BACKWARD, FORWARD
from multitower.runs.pipeline import describe_pipeline
from multitower.runs.report_page.wording import ABSENT
from multitower.scaling.words import Table
from multitower.steps.state.train_state import TrainState
from multitower.steps.step import TrainStep
from multitower.towers.feeding import shard

_KINDS = {FORWARD: "forward", BACKWARD: "backward"}


def measure_stages(
    step: TrainStep,
    state: TrainState,
    batches: Iterator[Any],
    *,
    where: Mapping[str, Any],
    num_steps: int,
) -> tuple[TrainState, dict[str, Any] | None]:
    """Measures the programs of all stages.

    Args:
        step: the training step.
        state: the training state; it is overwritten.
        batches: host batches, at least `num_steps + 1` of them.
        where: `devices`, `towers` and `global_batch`, as for `multitower.shard`.
        num_steps: the number of steps of which medians are taken; one more is made before them.

    Returns:
        The state after these steps; and the pipeline, as `describe_pipeline` returns it for these
        times, with `programs`, for each stage, round and kind the median time over towers and steps
        in seconds. None for a step without stages.
    """
    if step.layout is None:
        return state, None
    taken: dict[tuple[str, str], list[float]] = {}
    for batch in islice(batches, num_steps + 1):
        watch = _Watch()
        with tapped(watch.tap):
            state, _ = step(state, shard(batch, **where))
        for program, times_s in watch.times_s.items():
            taken[program] = [*taken.get(program, []), *times_s] if program in taken else []
    segments = step.segments
    assert segments is not None
    medians = {
        (kind, s): statistics.median(taken[kind, name])
        for s, name in enumerate(map(segments.name, range(len(segments.stage_of))))
        for kind in _KINDS.values()
        if (kind, name) in taken
    }
    programs = [
        [segments.stage_of[s], segments.round_of[s], kind, time_s]
        for (kind, s), time_s in medians.items()
    ]
    pipeline = describe_pipeline(step.layout, segments, times=medians)
    return state, {**pipeline, "programs": programs}


class _Watch:
    """The times of the programs of one step; `tap` is called after each."""

    def __init__(self) -> None:
        self.times_s: dict[tuple[str, str], list[float]] = defaultdict(list)
        self._began = time.perf_counter()

    def tap(self, what: str, place: int, found: Any) -> None:
        """Waits for a program."""
        jax.block_until_ready(found)  # host-device sync
        if what in _KINDS:
            (name,) = found
            self.times_s[_KINDS[what], name].append(time.perf_counter() - self._began)
        self._began = time.perf_counter()


def pipeline_tables(result: Mapping[str, Any]) -> list[Table]:
    """Shows the time of every program in milliseconds, on each number of devices."""
    tables: list[Table] = []
    for where, pipeline in pipelines(result):
        times: dict[tuple[int, int], dict[str, str]] = defaultdict(dict)
        for stage, number, kind, time_s in pipeline["programs"]:
            times[stage, number][kind] = f"{1e3 * time_s:.3g}"
        rows = [
            (
                str(stage) if pipeline["rounds"] == 1 else f"{stage}, round {number}",
                *(found.get(kind, ABSENT) for kind in _KINDS.values()),
            )
            for (stage, number), found in sorted(times.items())
        ]
        tables.append(Table(f"Programs on {where}: ms alone", ("stage", *_KINDS.values()), rows))
    return tables


def pipelines(result: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """The measured pipelines, each with its layout: "2 devices", or "2 x 1" with processes."""
    entries = [one for one in result["strong"] or [] if one.get("pipeline")]
    return [
        (one.get("layout") or devices_in_words(one["devices"]), one["pipeline"]) for one in entries
    ]


def waiting_in_words(result: Mapping[str, Any]) -> list[str]:
    """How long devices wait for each other, by the measured times and by the formula, in words.

    If towers exchange values, there is no formula.

    Example:
        >>> from multitower.scaling.stage_times import waiting_in_words
        >>> found = {"layout": [1, 2], "towers": 4, "bubble": 0.25, "least_bubble": 0.2}
        >>> waiting_in_words({"strong": [{"devices": 2, "pipeline": found}]})
        ['2 devices: with these times they wait for 25 % of a step; (P-1)/(M+P-1) gives 20 %.']
    """
    return [
        f"{where}: with these times they wait for {100 * one['bubble']:.0f} % of a step"
        + (
            "."
            if one["least_bubble"] is None
            else f"; (P-1)/(M+P-1) gives {100 * one['least_bubble']:.0f} %."
        )
        for where, one in pipelines(result)
        if one["layout"][1] > 1
    ]

"""The measured programs of stages: where towers meet, in the order in which they were started."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.engines.same_bits import tapped
from multitower.runs.pipeline import describe_pipeline
from multitower.scaling import stage_times
from multitower.scaling.stage_times import measure_stages, pipeline_tables, waiting_in_words

ROWS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)
WEIGHTS = [np.eye(3, dtype=np.float32)] * 2


def contrastive(params, batch):
    """Each row is compared with all rows of all towers, in the last stage."""
    h = mt.cut(jnp.tanh(batch @ params[0])) @ params[1]
    return jax.nn.logsumexp(h @ mt.all_rows(h).T, axis=1)


class Clock:
    """Time goes on by what is waited for: a number of seconds for each program."""

    def __init__(self):
        self.now_s, self.names = 0.0, []

    def perf_counter(self):
        return self.now_s

    def block_until_ready(self, found):
        self.now_s += 1 + self.names.index(next(iter(found)))


@pytest.mark.slow
def test_the_timeline_is_that_of_the_programs_that_were_started(monkeypatch):
    # The lies: the order of towers that do not meet; the time of one round taken for a whole stage.
    step = mt.train_step(contrastive, optax.sgd(0.1), towers=2, stages=2, devices=2)
    assert step.segments is None
    started = []

    def tap(what, tower, found):
        kind = what.removesuffix(" program")
        if kind in ("forward", "backward"):
            started.append((*found, tower, kind))

    with tapped(tap):
        state, _ = step(step.init(WEIGHTS), ROWS)
    assert step.segments.stage_of == (0, 1, 1)

    def in_order(pipeline):
        return [
            (f"stage {stage}, round {number}", tower, kind)
            for _, stage, number, tower, kind, _, _ in pipeline["timeline"]
        ]

    equal = describe_pipeline(step.layout, step.segments)
    assert in_order(equal) == started
    assert (equal["rounds"], equal["least_bubble"]) == (2, None)
    # A unit for each stage, of which the rounds have their shares; and no unit for what waits.
    times_s = sum(end - start for *_, start, end in equal["timeline"])
    last = step.segments.work[2]
    assert 0 < last < 1
    assert times_s == pytest.approx(2 * (4 + 4 - last))

    clock = Clock()
    clock.names = ["stage 0, round 0", "stage 1, round 0", "stage 1, round 1", "stage 0", "stage 1"]
    monkeypatch.setattr(stage_times, "time", clock)
    monkeypatch.setattr(stage_times, "jax", clock)
    where = {"devices": 2, "towers": 2, "global_batch": 4}
    batches = itertools.repeat(ROWS)
    _, found = measure_stages(step, state, batches, where=where, num_steps=1)
    assert in_order(found) == started
    times = {(stage, number, kind): time_s for stage, number, kind, time_s in found["programs"]}
    assert times == {
        (0, 0, "forward"): 1, (1, 0, "forward"): 2,
        (0, 0, "backward"): 1, (1, 0, "backward"): 2, (1, 1, "backward"): 3,
    }  # fmt: skip
    for _, stage, number, _, kind, start, end in found["timeline"]:
        assert end - start == times[stage, number, kind]
    ends = {tuple(slot[1:5]): slot[-1] for slot in found["timeline"]}
    starts = {tuple(slot[1:5]): slot[-2] for slot in found["timeline"]}
    assert starts[1, 1, 0, "backward"] == ends[1, 0, 1, "forward"]
    assert starts[1, 0, 0, "backward"] == ends[1, 1, 1, "backward"]
    result = {"strong": [{"devices": 2, "pipeline": found}]}
    (table,) = pipeline_tables(result)
    assert [row[0] for row in table.rows] == ["0, round 0", "1, round 0", "1, round 1"]
    (words,) = waiting_in_words(result)
    assert words.endswith(" % of a step.")

"""sync_every with towers and steps_per_call: what metrics are made of is added up once in a call.

The lies: metrics of the last step for all, or of one tower; other bits than in calls of one step;
an exchange before towers meet (also `tests/processes/test_layouts.py`); steps that a run forgets.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.local.meeting import Meeting
from multitower.steps.local.runner import LocalRunner
from multitower.steps.step import TrainStep
from multitower.training.fitting.settings import steps_per_call_of

DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=3).astype(np.float32)}
ROWS = [9, 9, 5, 9, 2, 9, 9, 9]


def batch(rows):
    x = DRAW.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1) + DRAW.normal(size=rows).astype(np.float32)}


BATCHES = [batch(rows) for rows in ROWS]


def losses(params, batch, *, rng):
    x = jnp.where(jax.random.bernoulli(rng, 0.8, batch["x"].shape), batch["x"], 0)
    error = (x @ params["w"] - batch["y"]) ** 2
    return error, {"errors": {"absolute": jnp.sqrt(error)}}


INNER = optax.sgd(0.05, momentum=0.9)
# The second meeting, after step 6, is not finite.
OUTER = optax.sgd(lambda meetings: jnp.where(meetings == 1, jnp.inf, 0.7), momentum=0.9)
LOCAL = {
    "towers": 3, "devices": 2, "sync_every": 3, "outer_optimizer": OUTER, "global_batch": 9
}  # fmt: skip


def make(loss=losses, **options):
    given = {**LOCAL, **options}
    given |= {"diagnostics": True, "skip_nonfinite": True}
    return mt.train_step(loss, INNER, **given)


def start(step):
    return step.init(PARAMS, rng=jax.random.key(7))


@pytest.fixture(scope="module")
def in_calls():
    return make(steps_per_call=4)


@pytest.fixture(scope="module")
def one_by_one():
    """The state after every step, in bits, and the metrics."""
    step, told = make(devices=1), []
    state = start(step)
    for rows in BATCHES:
        state, metrics = step(state, rows)
        told.append((mt.fingerprint(state), metrics))
    return told


@pytest.mark.slow
def test_law_l3_calls_have_the_bits_of_single_steps(in_calls, one_by_one, monkeypatch):
    """Meetings after steps 3 and 6, inside of calls and at their ends; ragged batches; short calls.

    In a call that ends with a meeting, nothing is added up over towers before it.
    """
    assert [int(metrics["skipped"]) for _, metrics in one_by_one] == [0] * 5 + [3, 0, 0]
    events = []
    for kind, name in ((Meeting, "run"), (LocalRunner, "total"), (LocalRunner, "make")):
        there = getattr(kind, name)
        seen = lambda *args, there=there, name=name: events.append(name) or there(*args)
        monkeypatch.setattr(kind, name, seen)
    state, done = start(in_calls), 0
    for size in (3, 1, 4):
        state, metrics = in_calls(state, BATCHES[done : done + size])
        for place in range(size):
            one = jax.tree.map(lambda leaf, place=place: leaf[place], metrics)
            assert mt.fingerprint(one) == mt.fingerprint(one_by_one[done + place][1])
        assert metrics["loss"].shape == (size,)
        done += size
        assert mt.fingerprint(state) == one_by_one[done - 1][0]
    first, second, third = ["make"] * 3 + ["run", "total"], ["make", "total"], ["make"] * 2
    assert events == [*first, *second, *third, "run", *third, "total"]


@pytest.mark.slow
def test_batches_that_lie_on_the_devices_or_in_one_array(in_calls, one_by_one):
    state = start(in_calls)
    ahead = mt.prefetch(BATCHES[:3], towers=3, devices=2, global_batch=9)
    state, _ = in_calls(state, list(ahead))
    assert mt.fingerprint(state) == one_by_one[2][0]
    stack = jax.tree.map(lambda *leaves: np.stack(leaves), *[BATCHES[0]] * 2)
    found, _ = in_calls(start(in_calls), stack)
    wanted, _ = in_calls(start(in_calls), [BATCHES[0]] * 2)
    assert mt.fingerprint(found) == mt.fingerprint(wanted)


def test_what_a_call_refuses(in_calls):
    state = start(in_calls)
    with pytest.raises(mt.BatchError, match="5 batches, and steps_per_call=4"):
        in_calls(state, BATCHES[:5])
    other = {**BATCHES[1], "x": BATCHES[1]["x"][:, :2]}
    with pytest.raises(mt.BatchError, match=r"batch 1 .* other rows than batch 0: .*\[2\]"):
        in_calls(state, [BATCHES[0], other])
    mean = lambda params, batch: ((batch["x"] @ params["w"] - batch["y"]) ** 2).mean()
    step = make(mean, steps_per_call=2)
    with pytest.raises(mt.BatchError, match="5 to 9 rows, and this loss is a mean over rows"):
        step(step.init(PARAMS), [BATCHES[0], BATCHES[2]])


@pytest.mark.slow
def test_a_run_in_calls_is_the_same_run(one_by_one, monkeypatch):
    """Hooks hear of every step; calls end where devices are compared, between two meetings."""
    heard, sizes, there = [], [], TrainStep.__call__
    hooks = [lambda progress: heard.append((progress.step, dict(progress.metrics)))]
    seen = lambda step, state, batches: sizes.append(len(batches)) or there(step, state, batches)
    monkeypatch.setattr(TrainStep, "__call__", seen)
    trainer = mt.Trainer(
        losses, INNER, steps_per_call=4, on_nonfinite="skip", check_replicas_every=5,
        hooks=hooks, **LOCAL,
    )  # fmt: skip
    found = trainer.fit(PARAMS, lambda _: iter(BATCHES), steps=6, rng=jax.random.key(7))
    assert mt.fingerprint(found) == one_by_one[5][0]
    assert sizes == [4, 1, 1]
    wanted = [
        {"loss": metrics["loss"], "errors/absolute": metrics["errors"]["absolute"], "skipped": 0}
        for _, metrics in one_by_one[:6]
    ]
    wanted[5]["skipped"] = 3
    assert heard == list(enumerate(wanted, start=1))


def test_over_processes_a_run_makes_calls_from_one_meeting_to_the_next(monkeypatch):
    assert steps_per_call_of(None, 16) is None
    monkeypatch.setattr("multitower.training.fitting.settings.are_several", lambda: True)
    monkeypatch.setattr("jax.distributed.is_initialized", lambda: True)
    assert [steps_per_call_of(None, every) for every in (2, 16, 500)] == [2, 16, 16]
    assert steps_per_call_of(1, 16) == 1
    assert steps_per_call_of(None, None) is None

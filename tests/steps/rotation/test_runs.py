"""Whole runs in a rotation: where their batches come from, when they hear, how they resume."""

import itertools

import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import CheckpointError, NonFiniteError, RunError
from multitower.steps.step import TrainStep
from rotations import W, X, Y, batch_of, losses, make, train

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")


@pytest.mark.parametrize(
    "max_staleness", [None, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 0))]
)
def test_batches_from_the_host_and_from_prefetch_have_the_same_bits(max_staleness):
    # The lie: the 8 rows of an update are 8 from the host and, since they do not fill 6 towers, 12
    # from prefetch; a tower's own statistics then count some rows twice.
    def loss(params, batch, *, model_state):
        return losses(params, batch), {}, 0.9 * model_state + batch["x"].mean(0)

    step = make(loss, towers=6, devices=2, max_staleness=max_staleness)

    def fingerprint(batches):
        step.expect(None)  # as a new step, which would compile anew
        state = step.init({"w": W}, model_state=np.zeros(3, np.float32))
        for batch in batches:
            state, _ = step(state, batch)
        return mt.fingerprint(state)

    numbers = range(7)
    from_host = fingerprint(map(batch_of, numbers))
    assert fingerprint(mt.prefetch(map(batch_of, numbers), towers=6, devices=2)) == from_host
    sharded = (mt.shard(batch_of(number), towers=6, devices=2) for number in numbers)
    assert fingerprint(sharded) == from_host


@pytest.mark.slow
def test_batches_from_prefetch_are_taken():
    step = make(devices=2)
    state, _ = train(step, step.init({"w": W}), range(3))
    expected = mt.fingerprint(state)
    for options in ({}, {"devices": 1}, {"devices": 1, "towers": 1}, {"devices": 2, "towers": 2}):
        state = step.init({"w": W})
        for batch in mt.prefetch(map(batch_of, range(3)), **options):
            state, _ = step(state, batch)
        assert mt.fingerprint(state) == expected, options


def test_without_towers_every_device_is_one():
    step = make(towers=None, devices=2)
    state, seen = train(step, step.init({"w": W}), range(3))
    assert [int(metrics["staleness"]) for metrics in seen] == [0, 1, 1]
    expected, _ = train(same := make(towers=2), same.init({"w": W}), range(3))
    assert mt.fingerprint(state) == mt.fingerprint(expected)


def batches(first):
    for number in itertools.count(first):
        yield batch_of(number % 12)


def trainer(directory=None, devices=1, **options):
    given = {"towers": 3, "global_batch": 8, "updates": "asynchronous", **options}
    return mt.Trainer(
        losses,
        optax.sgd(0.05, momentum=0.9),
        run_dir=directory,
        devices=devices,
        **given,
    )


@pytest.mark.slow
@pytest.mark.parametrize("moment", [1, 2, 3, 4, 5])
def test_a_run_resumes_between_any_two_updates_on_other_devices(tmp_path, moment):
    # The lie (law L4): checkpoints that keep the newest parameters alone.
    state, _ = train(step := make(), step.init({"w": W}), range(6))
    trainer(tmp_path, devices=1 + moment % 2).fit({"w": W}, batches, steps=moment)
    found = trainer(tmp_path, devices=3).fit({"w": W}, batches, steps=6, resume=True)
    assert mt.fingerprint(found) == mt.fingerprint(state)


@pytest.mark.slow
def test_another_rotation_is_another_run(tmp_path):
    trainer(tmp_path, rotation=(0, 1, 2)).fit({"w": W}, batches, steps=1)
    assert trainer(momentum_correction=True)._settings["momentum_correction"]
    other = trainer(tmp_path, rotation=(0, 2, 1))
    with pytest.raises(RunError, match="another rotation"):
        other.fit({"w": W}, batches, steps=2, resume=True)
    plain = trainer(tmp_path, updates="synchronous")
    with pytest.raises(CheckpointError, match=r"\.local.*updates='asynchronous'"):
        plain.fit({"w": W}, batches, steps=2, resume=True)


def test_a_run_hears_of_every_update_and_stops_at_a_nan():
    seen = []
    hooks = [lambda progress: seen.append((progress.step, progress.metrics["staleness"]))]
    trainer(hooks=hooks, rotation=(0, 1, 0, 2)).fit({"w": W}, batches, steps=6)
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 3), (5, 1), (6, 3)]

    def bad(first):
        for number in itertools.count(first):
            yield {"x": X[number] * (np.nan if number == 3 else 1), "y": Y[number]}

    with pytest.raises(NonFiniteError, match="step 4 of 9"):
        trainer().fit({"w": W}, bad, steps=9)
    skipping = trainer(on_nonfinite="skip").fit({"w": W}, bad, steps=9)
    assert np.isfinite(skipping.params["w"]).all()
    assert int(skipping.step) == 9


def test_a_run_reads_what_it_hears_so_late_that_all_groups_compute(monkeypatch):
    # The lie: a loop that waits for every update, so that one tower computes at a time.
    started, heard = [], []
    there = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *args: (started.append(1), there(*args))[1])
    hooks = [lambda progress: heard.append((progress.step, len(started)))]
    trainer(hooks=hooks, rotation=(0, 1, 0, 2)).fit({"w": W}, batches, steps=7)
    assert heard == [(1, 5), (2, 6), (3, 7), (4, 7), (5, 7), (6, 7), (7, 7)]

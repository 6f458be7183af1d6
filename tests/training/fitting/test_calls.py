"""Many steps a call: a run with them reports, saves, tests and stops as one without."""

import itertools
import os
import signal
import weakref

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.data.batches import make_batches
from multitower.steps.step import TrainStep
from multitower.training.fitting import calls
from multitower.training.fitting.calls import sizes_of_calls
from trees import assert_close

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(44, 5)).astype(np.float32),
    "y": RNG.normal(size=44).astype(np.float32),
}


def losses(params, batch):
    error = batch["x"] @ params["w"] - batch["y"]
    return error**2, {"absolute": jnp.abs(error)}


def batches(first):
    return make_batches(DATA, global_batch=16, seed=0, first=first)  # 16, 16, 12 rows, and again


class Run:
    """A trainer, and what its hooks have heard."""

    def __init__(self, **options):
        self.heard = []
        self.trainer = mt.Trainer(
            losses, optax.sgd(0.01, momentum=0.9), devices=2, global_batch=16, ema_decay=0.9,
            hooks=[self.heard.append], **options,
        )  # fmt: skip

    def fit(self, steps=11, batches=batches, **options):
        return self.trainer.fit({"w": jnp.zeros(5)}, batches, steps=steps, **options)

    def steps(self):
        return [now.step for now in self.heard if now.phase == "train"]

    def metrics(self):
        return [dict(now.metrics) for now in self.heard if now.phase == "train"]


@pytest.fixture(scope="module")
def one_by_one():
    run = Run()
    return run.fit(), run.metrics()


@pytest.mark.slow
def test_batches_in_a_list(one_by_one):
    """Lie: every call begins with the first batches again."""
    run = Run(steps_per_call=4)
    some = list(itertools.islice(batches(0), 11))
    assert_close(run.fit(batches=lambda first: some[first:]), one_by_one[0], rtol=1e-5)


def test_a_run_is_the_run_of_single_calls(one_by_one, tmp_path):
    # The lies: metrics of a call's last step alone, a checkpoint or a test phase in the middle of
    # a call, a resume that begins with the wrong batch.
    tested, step = [], lambda state: tested.append(int(state.step))
    options = {"steps_per_call": 4, "checkpoint_every": 5, "run_dir": tmp_path}
    run = Run(**options)
    state = run.fit(evaluate=step, evaluate_every=3)
    wanted, metrics = one_by_one
    assert run.steps() == list(range(1, 12))
    assert tested == [3, 6, 9]
    assert_close(run.metrics(), metrics)
    assert_close(state, wanted)
    assert [now.examples_per_s is None for now in run.heard[:4]] == [True, True, True, False]
    kept = sorted(int(p.name) for p in (tmp_path / "checkpoints").iterdir() if p.name.isdigit())
    assert kept == [5, 10, 11]


@pytest.mark.slow
def test_rows_that_are_read_when_they_are_needed(one_by_one):
    # The lie: an error that asks for mt.prefetch, which is what the trainer does.
    run = Run(steps_per_call=4)
    lazy = lambda first: make_batches(DATA, global_batch=16, seed=0, first=first, lazy=True)
    assert_close((run.fit(batches=lazy), run.metrics()), one_by_one)


@pytest.mark.slow
def test_a_signal_ends_a_call_and_the_run_goes_on_from_there(one_by_one, tmp_path):
    run = Run(steps_per_call=4, run_dir=tmp_path)
    run.trainer.hooks.append(lambda now: now.step == 2 and os.kill(os.getpid(), signal.SIGTERM))
    with pytest.raises(mt.Interrupted, match="stopped after step 8 of 11"):
        run.fit()
    again = Run(steps_per_call=3, run_dir=tmp_path)
    state = again.fit(resume=True)
    assert run.steps() + again.steps() == list(range(1, 12))
    assert_close(state, one_by_one[0])


@pytest.mark.slow
def test_what_is_not_finite_is_named_by_its_step(tmp_path):
    def marked(first):
        for number, batch in enumerate(batches(first), first):
            yield {**batch, "y": batch["y"] + np.float32(np.nan if number == 5 else 0)}

    run = Run(steps_per_call=4, checkpoint_every=4, run_dir=tmp_path)
    with pytest.raises(mt.NonFiniteError, match="step 6 of 11"):
        run.fit(batches=marked)
    assert run.steps() == [1, 2, 3, 4, 5]


@pytest.mark.slow
def test_batches_that_run_out_and_a_loader_that_uses_its_arrays_again():
    # The lies: rows that are copied to the devices when their loader has overwritten them; a call
    # whose batches are all the last one.
    def few(first):
        array = np.empty((16, 5), np.float32)
        for number in range(first, 6):
            array[:] = number
            yield {"x": array, "y": np.ones(16, np.float32)}

    run = Run(steps_per_call=4)
    with pytest.raises(mt.RunError, match="ran out after step 6 of 11"):
        run.fit(batches=few)
    alone = Run()
    alone.fit(steps=6, batches=few)
    assert len(run.metrics()) == 6
    assert_close(run.metrics(), alone.metrics())


def test_a_call_leaves_nothing_on_the_devices(monkeypatch):
    # The lie: room for the batches of two calls, of which the first has been made.
    alive, most, prefetch = weakref.WeakSet(), [], calls.prefetch

    def counted(*given, **options):
        for batch in prefetch(*given, **options):
            alive.add(batch["x"])
            most.append(len(alive))
            yield batch

    def told(step, state, batches):  # nothing to compile
        zeros = np.zeros((len(batches), 2), np.float32)
        return state, {"loss": zeros[:, 0], "tower_losses": zeros, "finite_params": zeros == 0}

    monkeypatch.setattr(calls, "prefetch", counted)
    monkeypatch.setattr(TrainStep, "__call__", told)
    run = Run(towers=2, sync_every=3, steps_per_call=3)
    run.fit(steps=6)
    assert most == [1, 2, 3, 1, 2, 3]


@pytest.mark.parametrize(("borders", "first"), [((0, 0), 0), ((5, 3), 0), ((5, 0), 7), ((1,), 3)])
def test_calls_make_all_steps_and_end_at_borders(borders, first):
    sizes = list(sizes_of_calls(4, borders, first=first, last=21))
    ends = set(itertools.accumulate(sizes, initial=first))
    assert max(ends) == 21
    assert max(sizes) <= 4
    due = {n for n in range(first, 22) for border in borders if border and n % border == 0}
    assert due <= ends

"""Epochs in the place of steps: as many updates as the passes over the data take."""

import itertools

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.training.fitting.epochs import steps_of_run

X = np.arange(10, dtype=np.float32)


def make_trainer(hooks=()):
    return mt.Trainer(lambda w, x: (w - x) ** 2, optax.sgd(0.1), devices=1, hooks=list(hooks))


def batches(first):
    return mt.make_batches(X, global_batch=4, seed=0, first=first)


def by_hand(first):
    return itertools.islice(itertools.cycle([X[:4], X[4:8]]), first, None)


def test_epochs_are_steps():
    # The lie: the last batch of the last epoch left out, or an epoch too many.
    told = []
    trainer = make_trainer([told.append])
    evaluate = lambda state: trainer.evaluate(lambda w, x: {"x": x}, state, X, global_batch=10)
    state = trainer.fit(np.float32(0), batches, epochs=3, evaluate=evaluate, evaluate_every=5)
    assert int(state.step) == 8  # 30 rows, 4 at a time
    assert [p.epoch for p in told if p.phase == "train"] == [n / 2.5 for n in range(1, 9)]
    assert [p.epoch for p in told if p.phase == "test"] == [2.0]
    same = make_trainer().fit(np.float32(0), batches, steps=8)
    assert mt.fingerprint(state) == mt.fingerprint(same)
    assert int(trainer.fit(np.float32(0), batches, epochs=0.3).step) == 1
    assert int(trainer.fit(np.float32(0), batches, epochs=jnp.float32(0.5)).step) == 2

    del told[:]
    assert int(trainer.fit(np.float32(0), by_hand, epochs=3, steps_per_epoch=2).step) == 6
    assert told[-1].epoch == 3.0
    trainer.fit(np.float32(0), by_hand, steps=2)
    assert told[-1].epoch is None


def test_the_size_of_an_epoch_is_asked_for():
    # The lie: a number of steps that somebody has guessed.
    fit = make_trainer().fit
    with pytest.raises(mt.ArgumentError, match=r"epochs=2, and the size of an epoch is not known"):
        fit(np.float32(0), by_hand, epochs=2)
    with pytest.raises(mt.ArgumentError, match=r"fit\(steps=2, epochs=2\): give one of them"):
        fit(np.float32(0), batches, steps=2, epochs=2)
    with pytest.raises(mt.ArgumentError, match="give one of them"):
        fit(np.float32(0), batches)
    most = r": a run makes at most 2147483647 steps, counted in int32\."
    with pytest.raises(mt.RunError, match=r"steps=1e\+20" + most):
        fit(np.float32(0), batches, steps=10**20)
    with pytest.raises(mt.RunError, match="steps=25000000000" + most):
        fit(np.float32(0), batches, epochs=10**10)
    for huge in ({"steps": 10**5000}, {"epochs": 10**400, "steps_per_epoch": 2.5}):
        with pytest.raises(mt.RunError, match="steps above 1e300" + most):
            fit(np.float32(0), batches, **huge)
    with pytest.raises(mt.RunError, match="epochs=0"):
        fit(np.float32(0), batches, epochs=0)
    with pytest.raises(mt.ArgumentError, match="steps_per_epoch=0"):
        fit(np.float32(0), by_hand, epochs=2, steps_per_epoch=0)


def test_batches_that_are_asked_for_the_size_of_an_epoch_are_closed():
    """Lie: the threads of a loader wait for a reader that never comes."""

    class Stream:
        steps_per_epoch = 2.5
        is_closed = False

        def close(self):
            self.is_closed = True

    stream = Stream()
    assert steps_of_run(None, 2, None, lambda first: stream) == 5
    assert stream.is_closed

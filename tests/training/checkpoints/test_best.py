"""The best state: kept by its score alone, whatever comes after it."""

import math
from contextlib import nullcontext

import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import RunError
from multitower.training.checkpoints.best import BestCheckpoint


@pytest.mark.parametrize(("mode", "sign"), [("min", 1), ("max", -1)])
def test_only_a_better_score_replaces_the_best(mode, sign, tmp_path):
    """Lies: the last one, the other end, an equal one; a NaN, than which nothing is better."""
    step = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), devices=1)
    best = BestCheckpoint(tmp_path / "best", "score", mode)
    assert best.scores() is None
    offers = [(math.nan, False), (3.0, True), (4.0, False), (math.nan, False), (3.0, False)]
    offers += [(2.0, True), (2.5, False)]
    warning = pytest.warns(mt.MultitowerWarning, match="keep_best='score': the score is NaN")
    for number, (score, is_kept) in enumerate(offers, start=1):
        scores = {"score": sign * score, "other": float(number)}
        with warning if number == 1 else nullcontext():  # the lie: a NaN that nobody hears of
            assert best.offer(number, step.init(np.float32(number)), scores) == is_kept, number
    assert best.scores() == (6, {"score": sign * 2.0, "other": 6.0})
    with mt.Checkpoints(tmp_path / "best", read_only=True) as checkpoints:
        assert float(checkpoints.restore(like=step.init(np.float32(0))).state.params) == 6


@pytest.mark.parametrize("number", [pytest.param(5, marks=pytest.mark.slow), 3])
def test_a_better_state_of_no_later_step_is_kept(number, tmp_path):
    """Lie: it is said to be kept, and the one before stays: Orbax saves higher numbers alone."""
    step = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), devices=1)
    best = BestCheckpoint(tmp_path / "best", "score", "max")
    assert best.offer(5, step.init(np.float32(5)), {"score": 1.0})
    assert best.offer(number, step.init(np.float32(30)), {"score": 2.0})
    assert best.scores() == (number, {"score": 2.0})
    assert best.offer(6, step.init(np.float32(60)), {"score": 3.0})
    assert best.scores() == (6, {"score": 3.0})
    with mt.Checkpoints(tmp_path / "best", read_only=True) as checkpoints:
        assert float(checkpoints.restore(like=step.init(np.float32(0))).state.params) == 60


def test_a_damaged_best_state_is_answered_with_the_way_out(tmp_path):
    """Lie: a run that can never go on, because of a file that no step needs."""
    state = mt.train_step(lambda w, x: (w - x) ** 2, optax.sgd(0.1)).init(np.float32(3))
    best = BestCheckpoint(tmp_path / "best", "accuracy", "max")
    best.offer(1, state, {"accuracy": 0.5})
    (tmp_path / "best" / "1" / "about" / "metadata").write_text("")
    with pytest.raises(mt.CheckpointError, match=r"best/1 cannot be read.* move that directory"):
        best.offer(2, state, {"accuracy": 0.75})
    (tmp_path / "best" / "1").rename(tmp_path / "away")
    assert best.offer(2, state, {"accuracy": 0.75})


def test_a_best_state_by_another_score_is_named(tmp_path):
    """Lie: a resume with another `keep_best` ends in a KeyError."""
    step = mt.train_step(lambda w, x: w * x, optax.sgd(0.1), devices=1)
    state = step.init(np.float32(5))
    BestCheckpoint(tmp_path / "best", "accuracy", "max").offer(5, state, {"accuracy": 1.0})
    with pytest.raises(RunError, match=r"\(accuracy\), and keep_best='recall' is none of them"):
        BestCheckpoint(tmp_path / "best", "recall", "max").offer(6, state, {"recall": 1.0})

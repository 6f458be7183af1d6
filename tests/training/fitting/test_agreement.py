"""One decision to stop for all processes. The lies: a stop that comes minutes late, a vote at every
step that costs as much as the step."""

import signal

import numpy as np
import optax
import pytest

import multitower as mt
from multitower.towers.placement import Placement, place
from multitower.training.fitting import agreement
from multitower.training.fitting.agreement import VOTE_EVERY_S, StopVote


@pytest.fixture
def several(monkeypatch):
    """This process's devices, as if others drove some of them."""
    monkeypatch.setattr(Placement, "spans_processes", True)
    return place(4, None)


class Clock:
    def __init__(self, step_s):
        self.now = 0.0
        self.step_s = step_s

    def __call__(self):
        return self.now


@pytest.mark.slow
def test_numbers_of_numpy_are_compared_over_processes(several):
    """Lie: a trainer that works in one process, and has no JSON for the other ones."""
    given = {"hooks": [], "devices": 4, "towers": 4, "checkpoint_every": np.int64(1000)}
    trainer = mt.Trainer(lambda w, x: w * x, optax.sgd(0.1), **given)
    how = {"evaluate": print, "evaluate_every": np.int64(1), "steps": np.int64(1)}
    state = trainer.fit(np.float32(0), lambda first: iter([np.ones(4, np.float32)]), **how)
    assert int(state.step) == 1


def steps_until_stop(vote, clock, most):
    for number in range(1, most + 1):
        clock.now += clock.step_s
        if vote.after_step():
            return number
    return None


@pytest.mark.parametrize("step_s", [0.001, 0.02, pytest.param(3.0, marks=pytest.mark.slow)])
def test_a_signal_is_heard_in_time(several, step_s):
    caught = []
    clock = Clock(step_s)
    vote = StopVote(caught, several, clock)
    assert steps_until_stop(vote, clock, 700) is None
    caught.append(signal.SIGTERM)
    waited = steps_until_stop(vote, clock, 2000)
    assert waited is not None
    assert waited * step_s <= max(2 * VOTE_EVERY_S, 2 * step_s) + step_s


@pytest.mark.slow
def test_fast_steps_vote_seldom_and_slow_ones_always(several):
    casts = []
    for step_s in (0.001, 3.0):
        clock = Clock(step_s)
        vote = StopVote([], several, clock)
        counted = []
        largest = vote._largest
        vote._largest = lambda votes, run=largest, note=counted: note.append(1) or run(votes)
        steps_until_stop(vote, clock, 1000)
        casts.append(len(counted))
    assert casts[0] < 10
    assert casts[1] == 1000


def test_the_fewest_steps_that_any_asks_for_count(several):
    """Lie: each process votes when it thinks fit, and they wait for each other for ever."""
    vote = StopVote([], several)
    votes = vote._votes([0, -7]).at[2].set([15, -3])
    assert vote._largest(votes).tolist() == [15, -3]


def test_one_process_needs_no_vote():
    caught = []
    vote = StopVote(caught, place(4, None))
    assert vote.after_step() is vote.at_end() is None
    caught.append(signal.SIGINT)
    assert vote.after_step() == vote.at_end() == signal.SIGINT


def test_a_signal_after_the_last_step_ends_all_processes(several, monkeypatch):
    """Lie: one process stops, and the others write their results and exit with 0."""
    others = [0, int(signal.SIGTERM), 0]
    monkeypatch.setattr(agreement, "gathered", lambda own: np.array([own, *others]))
    assert StopVote([], several).at_end() == signal.SIGTERM
    others.clear()
    assert StopVote([], several).at_end() is None

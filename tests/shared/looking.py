"""Rows, a loss of each of them, and the ways in which tests have a function looked at."""

from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.checks import first_look

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
Y = np.arange(8) % 3
W = jnp.asarray(np.ones(3, np.float32))


def losses(w, x):
    return (x @ w - 1) ** 2


def total(w, x):
    return losses(w, x).sum()


def step_of(loss, **options):
    def run(w, x):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
        state, _ = step(step.init(w), x)
        return step(state, x)

    return run


ENTRIES = {
    "value_and_grad": lambda loss: mt.value_and_grad(loss, devices=2),
    "towers": lambda loss: mt.value_and_grad(loss, devices=2, towers=4),
    "under jit": lambda loss: jax.jit(mt.value_and_grad(loss, devices=4)),  # not looked at yet
    "train_step": step_of,
    "same bits": lambda loss: step_of(loss, towers=4),
}


def look_at(run, *arguments):
    """Traces a call with `W`, and compiles nothing; fails if it does not look.

    That calls look once, and give a result, is shown in checks/test_first_look.py.
    """
    look_at_call(run, W, *arguments)


def look_at_call(run, *arguments):
    """As `look_at`, of all arguments."""
    with mock.patch.object(first_look, "look", wraps=first_look.look) as look:
        jax.eval_shape(run, *arguments)
    assert look.called  # a function that is equal to one that was looked at is not looked at again


def look_at_step(loss, batch=X, *, w=W, model_state=None, devices=1, towers=4, **options):
    """Makes a step and calls it until it has looked at the loss; fails if it does not look.

    It would compile now: that it looks once, and goes on, is shown in checks/test_first_look.py.
    """

    def look(*arguments: Any, **named: Any):
        first_look.look(*arguments, **named)
        raise InterruptedError("it has looked")

    step = mt.train_step(loss, optax.sgd(0.1), devices=devices, towers=towers, **options)
    state = step.init(w, model_state=model_state)
    with mock.patch("multitower.steps.look.look", look), pytest.raises(InterruptedError):
        step(state, batch)

"""What tables of wrong uses claim, and what they call: a loss, a step, a trainer, short ways."""

import numpy as np
import optax
import pytest

import multitower as mt

X = np.ones((10, 3), np.float32)
W = np.ones(3, np.float32)
SGD = optax.sgd(0.1)


def losses(w, x):
    return (x @ w) ** 2


def assert_refused(call, error, message):
    """What each entry of a table claims: the call raises such an error with these words."""
    with pytest.raises(error, match=f"(?s){message}"):
        call()


MADE = mt.train_step(losses, SGD, devices=2)
TRAINER = mt.Trainer(losses, SGD, devices=2, hooks=[])


def add_one(x):
    return x + 1


def grads(fun=losses, w=W, x=X, /, *, argnums=0, **options):
    return mt.value_and_grad(fun, argnums, **options)(w, x)


def parallel(fn, *args, **options):
    return mt.make_parallel(fn, devices=4, **options)(*args)


def step(loss=losses, w=W, batch=X, /, *, extras=None, optimizer=None, **options):
    made = mt.train_step(loss, optimizer or optax.sgd(0.1), devices=4, **options)
    return made(made.init(w, **(extras or {})), batch)


def with_state(w, x, *, model_state):
    return losses(w, x), {}, model_state

"""Rows, a loss of each of them, and the ways in which tests have a function looked at."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

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


def after_a_step(loss, dtype=jnp.float32):
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.zeros(3, dtype)), X)
    return state.model_state


def look_at(run, *arguments):
    """Traces a call, and compiles nothing: checks/test_first_look.py shows that calls look."""
    jax.eval_shape(run, W, *arguments)

"""Asynchronous steps of a linear model, and twelve batches for them."""

import numpy as np
import optax

import multitower as mt

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 8, 3)).astype(np.float32)
Y = RNG.normal(size=(12, 8)).astype(np.float32)
W = RNG.normal(size=3).astype(np.float32)


def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batch_of(number):
    return {"x": X[number], "y": Y[number]}


def make(loss=losses, optimizer=None, towers=3, devices=1, **options):
    return mt.train_step(
        loss,
        optimizer or optax.sgd(0.05, momentum=0.9),
        towers=towers,
        devices=devices,
        updates="asynchronous",
        **options,
    )


def train(step, state, numbers, **more):
    """Trains on these batches; returns the state and the metrics of every update."""
    seen = []
    for number in numbers:
        state, metrics = step(state, {**batch_of(number), **more})
        seen.append(metrics)
    return state, seen

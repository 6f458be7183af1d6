"""Trainers of a small regression: 60 of its steps take a moment, on any number of devices."""

import numpy as np
import optax

import multitower as mt
from multitower.data.batches import make_batches

RNG = np.random.default_rng(0)
DATA = {
    "x": RNG.normal(size=(100, 5)).astype(np.float32),
    "y": RNG.normal(size=100).astype(np.float32),
}
PARAMS = {"w": np.zeros(5, np.float32)}


def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batches(first):
    return make_batches(DATA, global_batch=32, seed=0, first=first)


def make_trainer(num_devices, **options):
    return mt.Trainer(
        losses,
        optax.sgd(lambda count: 0.01, momentum=0.9),  # its state has momenta and a count
        towers=4,
        devices=num_devices,
        global_batch=32,
        ema_decay=0.9,
        **options,
    )


def scores(params, batch):
    return {"loss": losses(params, batch)}

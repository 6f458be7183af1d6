"""Steps of a linear model, whose batches are ragged, and marks for both ways to run them."""

import functools

import numpy as np
import pytest

both_ways = pytest.mark.parametrize("towers", [None, 4], ids=["fast", "same bits"])
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
fast_every_day = pytest.mark.parametrize("towers", [None, slowly(4)], ids=["fast", "same bits"])
same_bits_every_day = pytest.mark.parametrize(
    "towers", [slowly(None), 4], ids=["fast", "same bits"]
)


def where(towers):
    """Two devices for the fast way; towers are the same mathematics on one, for less compiling."""
    return {"towers": towers, "devices": 1 if towers else 2}


def losses(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def params_of():
    return {"w": np.arange(3, dtype=np.float32), "b": np.float32(0.5)}


def batch_of(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def train(step, state, batches):
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(float(metrics["loss"]))
    return state, history


RAGGED = [batch_of(n, seed) for seed, n in enumerate((12, 12, 7, 1, 12))]

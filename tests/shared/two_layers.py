"""A loss of two layers, its parameters and rows, and its gradient worked out by hand in NumPy."""

import functools

import jax.numpy as jnp
import numpy as np

import trees


def losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return (hidden @ params["v"] - batch["y"]) ** 2


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    w, v = rng.normal(size=(3, 4)), rng.normal(size=4)
    return {"w": w.astype(np.float32), "v": v.astype(np.float32)}


def batch_of(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def numpy_value_and_grad(params, batch):
    """The same, worked out by hand in float64."""
    w, v = (np.asarray(params[name], np.float64) for name in "wv")
    x, y = (np.asarray(batch[name], np.float64) for name in "xy")
    hidden = np.tanh(x @ w)
    wrong = 2 * (hidden @ v - y) / len(y)
    grad = {"w": x.T @ (np.outer(wrong, v) * (1 - hidden**2)), "v": hidden.T @ wrong}
    return np.mean((hidden @ v - y) ** 2), grad


assert_close = functools.partial(trees.assert_close, rtol=2e-5)

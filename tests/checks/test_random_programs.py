"""The first look at programs that nobody has thought of: chains of operations, drawn at random.

Whether a chain may be cut into towers is found by cutting it: the mean of the towers' losses and
gradients against those of the whole batch, computed operation by operation.
"""

import random
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt

# Each takes an array of shape (rows, 3) and the parameters, and returns one of this shape.
BY_ROW = {
    "tanh": lambda h, p: jnp.tanh(h),
    "weights": lambda h, p: h @ p["w"],
    "einsum": lambda h, p: jnp.einsum("nd,de->ne", h, p["w"]),
    "scale": lambda h, p: h * p["scale"],
    "centre features": lambda h, p: h - h.mean(axis=1, keepdims=True),
    "softmax": lambda h, p: jax.nn.softmax(h, axis=1),
    "unit": lambda h, p: h / jnp.linalg.norm(h, axis=1, keepdims=True),
    "sort features": lambda h, p: jnp.sort(h, axis=1),
    "sums of features": lambda h, p: jnp.cumsum(h, axis=1),
    "turn features": lambda h, p: jnp.roll(h, 1, axis=1),
    "reverse features": lambda h, p: h[:, ::-1],
    "stack": lambda h, p: jnp.stack([h[:, 2], h[:, 0], h[:, 1]], axis=1),
    "pad features": lambda h, p: jnp.pad(h, ((0, 0), (1, 0)))[:, :3],
    "transpose twice": lambda h, p: (h.T * p["scale"][:, None]).T,
    "flatten": lambda h, p: jnp.tanh(h.reshape(-1)).reshape(h.shape),
    "where": lambda h, p: jnp.where(h > 0, h, 0.1 * h),
    "map": lambda h, p: jax.lax.map(jnp.cos, h),
    "vmap": lambda h, p: jax.vmap(lambda row: row * row.sum())(h),
    "scan": lambda h, p: jax.lax.scan(lambda c, row: (c, jnp.tanh(row) + c), 0.0, h)[1],
    "largest": lambda h, p: jnp.take_along_axis(h, jnp.argmax(h, 1)[:, None], 1) * jnp.ones(3),
    "checkpoint": lambda h, p: jax.checkpoint(jnp.sin)(h),
    "loop": lambda h, p: jax.lax.fori_loop(0, 2, lambda _, c: jnp.tanh(c) + h, h),
    "add to a column": lambda h, p: jnp.tanh(h).at[:, 0].add(h[:, 1]),
    "own outer product": lambda h, p: jnp.diagonal(h[:, :, None] * h[:, None], axis1=1, axis2=2),
}
OVER_ROWS = {
    "centre": lambda h, p: h - h.mean(axis=0),
    "scale by deviation": lambda h, p: h / (h.std(axis=0) + 1),
    "softmax over rows": lambda h, p: jax.nn.softmax(h, axis=0),
    "sums of rows": lambda h, p: jnp.cumsum(h, axis=0),
    "row above": lambda h, p: h * jnp.roll(h, 1, axis=0),
    "reversed rows": lambda h, p: h * h[::-1],
    "gram": lambda h, p: (h @ h.T) @ h / len(h),
    "covariance": lambda h, p: h @ (h.T @ h / len(h)),
    "carry": lambda h, p: jax.lax.scan(lambda c, row: (c + row.sum(), row * c), 0.0, h)[1],
    "place": lambda h, p: h * jnp.arange(len(h))[:, None],
    "half": lambda h, p: h * jnp.concatenate([h[len(h) // 2 :], h[: len(h) // 2]]),
    "largest of all": lambda h, p: h / (1 + jnp.abs(h).max()),
    "all but one": lambda h, p: h * (h.sum(axis=0) - h),
    "neighbours": lambda h, p: h + jnp.pad(h, ((1, 0), (0, 0)))[:-1] ** 2,
}
# Each returns a loss for each row, or the mean of these.
ENDS = {
    "sum": lambda h, p: h.sum(axis=1),
    "squares": lambda h, p: (h**2).mean(axis=-1),
    "dot": lambda h, p: (h @ p["scale"] - 1) ** 2,
    "log sum": lambda h, p: jax.nn.logsumexp(h, axis=1),
    "mean": lambda h, p: (h**2).mean(),
    "mean of rows": lambda h, p: (h @ p["scale"]).sum() / len(h),
    "dot with ones": lambda h, p: jnp.ones(len(h)) @ h.sum(axis=1) / len(h),
}
NUM_ROWS, TOWERS = 16, (2, 4)


def drawn(seed, *, meets):
    """A chain of operations, one over rows among them if rows are to meet; and its names."""
    choose = random.Random(seed)
    names = choose.sample(sorted(BY_ROW), 3)
    if meets:
        names.insert(choose.randrange(4), choose.choice(sorted(OVER_ROWS)))
    end = choose.choice(sorted(ENDS))

    def loss(params, x):
        h = x
        for name in names:
            h = {**BY_ROW, **OVER_ROWS}[name](h, params)
        return ENDS[end](h, params)

    return loss, [*names, end]


def is_right_in_towers(loss):
    draw = np.random.default_rng(1)
    params = {"w": jnp.asarray(draw.normal(size=(3, 3))), "scale": jnp.asarray(draw.normal(size=3))}
    x = jnp.asarray(draw.normal(size=(NUM_ROWS, 3)))
    gradients = jax.value_and_grad(lambda params, x: loss(params, x).mean())  # not compiled
    whole = jax.tree.leaves(gradients(params, x))
    tolerance = 1e-3 * max(np.abs(leaf).max() for leaf in whole)
    for towers in TOWERS:
        parts = [jax.tree.leaves(gradients(params, rows)) for rows in jnp.split(x, towers)]
        means = [np.mean(each, axis=0) for each in zip(*parts, strict=True)]
        for mean, wanted in zip(means, whole, strict=True):
            if not np.allclose(mean, wanted, rtol=1e-3, atol=tolerance):
                return False
    return True


def what_is_said_of(loss):
    params = {"w": np.ones((3, 3), np.float32), "scale": np.ones(3, np.float32)}
    x = np.ones((NUM_ROWS, 3), np.float32)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        jax.eval_shape(mt.value_and_grad(loss, devices=2), params, x)
    return [str(one.message) for one in said]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
def test_nothing_is_said_of_rows_that_do_not_meet(seed):
    # The lie: an alarm that teaches people to ignore alarms.
    loss, names = drawn(seed, meets=False)
    assert is_right_in_towers(loss), names
    assert not what_is_said_of(loss), names


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(120))
def test_what_is_wrong_in_towers_is_told(seed):
    # The lie: silence, and another loss on every number of devices.
    loss, names = drawn(seed, meets=True)
    assert what_is_said_of(loss) or is_right_in_towers(loss), names

"""The first look, operation by operation: what keeps rows apart is quiet, what mixes them is told.

Each loss is one operation on `h`, rows of six numbers, between two that keep rows apart.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import multitower as mt

RNG = np.random.default_rng(0)
W = {name: jnp.asarray(RNG.normal(size=(6, 6)), jnp.float32) for name in ("a", "b")}
X = RNG.normal(size=(12, 6)).astype(np.float32)
K = RNG.integers(0, 6, 12)  # a number for every row


def halves(h):
    return h.reshape(2, -1, 6)


def sorted_and_put_back(h, k):
    order = jnp.argsort(k)
    return jnp.zeros_like(h).at[order].set(jnp.tanh(h[order]))


def smallest_and_largest(h):
    pick = lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))
    return lax.reduce((h, h), (np.float32(9), np.float32(-9)), pick, (0,))


APART = {
    "product": lambda h, k, w: h @ w,
    "product of the transpose": lambda h, k, w: (w.T @ h.T).T,
    "softmax": lambda h, k, w: jax.nn.softmax(h),
    "layer norm": lambda h, k, w: jax.nn.standardize(h),
    "sort": lambda h, k, w: jnp.sort(h),
    "cumsum": lambda h, k, w: jnp.cumsum(h, 1),
    "associative scan": lambda h, k, w: lax.associative_scan(jnp.add, h, axis=1),
    "flip": lambda h, k, w: h[:, ::-1],
    "roll": lambda h, k, w: jnp.roll(h, 1, 1),
    "two parts": lambda h, k, w: jnp.concatenate([h[:, 3:], h[:, :3]], 1),
    "unpacked": lambda h, k, w: sum(jnp.unstack(h, axis=1))[:, None] * h,
    "one hot": lambda h, k, w: h + jax.nn.one_hot(k, 6),
    "embedding": lambda h, k, w: h * w[k],
    "taken along": lambda h, k, w: h + jnp.take_along_axis(h, k[:, None], 1),
    "a column set": lambda h, k, w: h.at[:, 0].set(1.0),
    "a place added to": lambda h, k, w: h.at[jnp.arange(len(h)), k].add(1.0),
    "outer product": lambda h, k, w: jnp.einsum("ni,nj->nij", h, h).sum(1),
    "attention in a row": lambda h, k, w: jax.nn.softmax(h[:, :, None] * h[:, None]).sum(1),
    "two halves of a row": lambda h, k, w: h.reshape(len(h), 2, 3).max(1).repeat(2, 1),
    "rows of halves": lambda h, k, w: jnp.tanh(h.reshape(-1, 3)).reshape(-1, 6),
    "vmap": lambda h, k, w: jax.vmap(lambda row: jnp.sin(row @ w))(h),
    "map": lambda h, k, w: lax.map(lambda row: row * row.sum(), h),
    "scan over columns": lambda h, k, w: lax.scan(lambda c, x: (c + x, c * x), h[:, 0], h.T)[1].T,
    "loop": lambda h, k, w: lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h) + i, h),
    "branch": lambda h, k, w: lax.cond(w[0, 0] > 0, jnp.sin, jnp.cos, h),
    "checkpoint": lambda h, k, w: jax.checkpoint(jnp.sin)(h),
    "gradients": lambda h, k, w: jax.grad(lambda h: jnp.sin(h @ w).sum())(h),
    "convolution": lambda h, k, w: jax.vmap(lambda row: jnp.convolve(row, w[0, :3], "same"))(h),
    "chunks": lambda h, k, w: lax.map(lambda c: jnp.tanh(c @ w), h.reshape(2, -1, 6)).reshape(
        -1, 6
    ),
    "stacked chunks": lambda h, k, w: jnp.stack([*map(jnp.sin, h.reshape(3, -1, 6))]).reshape(
        -1, 6
    ),
    "pairs of neighbours": lambda h, k, w: jnp.repeat(h[0::2] - h[1::2], 2, 0),
    "sorted and put back": lambda h, k, w: sorted_and_put_back(h, k),
    "two views of a row": lambda h, k, w: jnp.subtract(
        *jnp.split(jnp.concatenate([h, 2 * h]) @ w, 2)
    ),
}
TOGETHER = {
    "mean": lambda h, k, w: h - h.mean(0),
    "largest": lambda h, k, w: h / h.max(0),
    "smallest and largest": lambda h, k, w: h - sum(smallest_and_largest(h)),
    "softmax": lambda h, k, w: jax.nn.softmax(h, 0),
    "norm": lambda h, k, w: h / jnp.linalg.norm(h),
    "variance": lambda h, k, w: h * h.var(0),
    "median": lambda h, k, w: h - jnp.median(h, 0),
    "flip": lambda h, k, w: h * h[::-1],
    "roll": lambda h, k, w: h * jnp.roll(h, 1, 0),
    "cumsum": lambda h, k, w: jnp.cumsum(h, 0),
    "difference": lambda h, k, w: h[1:] - h[:-1],
    "sort": lambda h, k, w: h * jnp.sort(h, 0),
    "order": lambda h, k, w: h * h[jnp.argsort(k)],
    "gram": lambda h, k, w: h @ (h.T @ h),
    "every row with every row": lambda h, k, w: jax.nn.softmax(h @ h.T) @ h,
    "inverse": lambda h, k, w: jnp.linalg.solve(h.T @ h + jnp.eye(6), h.T).T,
    "covariance": lambda h, k, w: h @ jnp.cov(h.T),
    "the first": lambda h, k, w: h * h[0],
    "the best": lambda h, k, w: h * h[jnp.argmax(k)],
    "the largest two": lambda h, k, w: h * lax.top_k(h.T, 2)[0][:, 0],
    "sums of classes": lambda h, k, w: jax.ops.segment_sum(h, k, 6)[k],
    "counts of classes": lambda h, k, w: h / (jnp.bincount(k, length=6)[k][:, None] + 1.0),
    "a recurrence": lambda h, k, w: lax.scan(lambda c, row: (jnp.tanh(c + row), c), w[0], h)[1],
    "a loop over rows": lambda h, k, w: (
        h * lax.fori_loop(0, len(h), lambda i, c: jnp.tanh(c + h[i]), w[0])
    ),
    "a branch for all": lambda h, k, w: lax.cond(h.mean() > 0, jnp.sin, jnp.cos, h),
    "until all are done": lambda h, k, w: lax.while_loop(
        lambda h: jnp.abs(h).max() > 0.5, lambda h: h * 0.8, lax.stop_gradient(h)
    ),
    "places": lambda h, k, w: h * jnp.arange(len(h))[:, None],
    "one mask for all": lambda h, k, w: h * jax.random.bernoulli(jax.random.key(0), 0.5, h.shape),
    "views": lambda h, k, w: jnp.multiply(*halves(h)),
    "mean of views": lambda h, k, w: (halves(h) - halves(h).mean(0)).reshape(-1, 6),
    "largest view": lambda h, k, w: halves(h).max(0),
    "products of views": lambda h, k, w: jnp.einsum("vbd,wbd->bvw", halves(h), halves(h)),
    "view after view": lambda h, k, w: lax.scan(
        lambda c, z: (jnp.tanh(c + z), c), jnp.zeros((len(h) // 2, 6)), halves(h)
    )[1],
}


def gradients(operation):
    def loss(w, x, k):
        h = operation(jnp.tanh(x @ w["a"]), k, w["b"])
        return (h.reshape(len(h), -1) ** 2).mean()

    return mt.grad(loss, devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_what_keeps_rows_apart_is_quiet(name):
    jax.eval_shape(gradients(APART[name]), W, X, K)  # warnings are errors


@pytest.mark.slow
@pytest.mark.parametrize("name", TOGETHER)
def test_what_brings_rows_together_is_told(name):
    with pytest.warns(mt.MultitowerWarning, match=r"mt\.check_parallel looks closer"):
        jax.eval_shape(gradients(TOGETHER[name]), W, X, K)

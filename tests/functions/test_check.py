"""check_parallel: every wrong program is named with its line, and no right one is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower import check_parallel

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32)
BATCH = {
    "x": RNG.normal(size=(16, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, 16),
}


def entropies(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_row(w, batch):
    return entropies(batch["x"] @ w, batch["y"])


def mean_with_penalty(w, batch):
    return by_row(w, batch).mean() + 1e-4 * jnp.sum(w**2)


def own_count(w, batch):
    return by_row(w, batch).sum() / batch["x"].shape[0]


def row_after_row(w, batch):
    return jax.lax.scan(lambda total, x: (total, jnp.tanh(x @ w).sum()), 0.0, batch["x"])[1]


def in_a_loop(w, batch):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x), batch["x"] @ w).sum(-1)


def over_time(w, batch):
    tokens = batch["x"].reshape(-1, 1).reshape(-1, 5)
    return jnp.cumsum(jnp.sort(tokens, axis=1), axis=1).max(1) + jnp.sum(w)


def with_branches(w, batch):
    x = jax.lax.cond(jnp.sum(w) > 0, jnp.sin, jnp.cos, batch["x"])
    return jnp.where(x > 0, x, 0.0).mean()


def several(w, batch):
    logits = batch["x"] @ w
    return by_row(w, batch).mean(), {"hits": logits.argmax(-1) == batch["y"], "w": w}


RIGHT = [
    by_row,
    mean_with_penalty,
    own_count,
    row_after_row,
    in_a_loop,
    over_time,
    with_branches,
    several,
    jax.checkpoint(mean_with_penalty),
    lambda w, batch: jax.vmap(lambda x, y: entropies(x @ w, y))(batch["x"], batch["y"]),
    lambda w, batch: jax.nn.relu(jax.jit(by_row)(w, batch)),
    lambda w, batch: optax.l2_loss(batch["x"] @ w).mean(),
]


@pytest.mark.parametrize("fn", RIGHT, ids=lambda fn: fn.__name__)
def test_a_right_program_is_not_blamed(fn):
    # The lie: a check that cries wolf.
    check = check_parallel(fn, W, BATCH)
    assert check, str(check)
    assert str(check) == "can be cut into towers (tried with 16 rows in 8 towers)"
    check.raise_if_wrong()


def total(w, batch):
    return by_row(w, batch).sum()


def baked_divisor(w, batch):
    return by_row(w, batch).sum() / 16


def baked_shape(w, batch):
    return entropies((batch["x"] @ w).reshape(16, 3), batch["y"])


def negatives(w, batch):
    z = batch["x"] @ w
    similar = jax.nn.log_softmax(z @ z.T)
    return -jnp.diagonal(similar)


def batch_statistics(w, batch):
    z = batch["x"] @ w
    z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
    return entropies(z, batch["y"])


def root_of_mean(w, batch):
    return jnp.sqrt(jnp.mean((batch["x"] @ w) ** 2))


def weighted_mean(w, batch):
    weight = (batch["y"] > 0).astype(jnp.float32)
    return (by_row(w, batch) * weight).sum() / weight.sum()


def largest(w, batch):
    return by_row(w, batch).max()


def sorted_rows(w, batch):
    return jnp.sort(by_row(w, batch))


def running_mean(w, batch):
    return jax.lax.scan(lambda seen, x: (0.9 * seen + x, seen.sum()), jnp.zeros(3), batch["x"] @ w)[
        1
    ]


def dropout_of_its_own(w, batch):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return entropies((batch["x"] * kept) @ w, batch["y"])


def noise_of_numpy(w, batch):
    return by_row(w + np.random.normal(), batch)


def counting_metric(w, batch):
    return by_row(w, batch), {"hits": jnp.sum((batch["x"] @ w).argmax(-1) == batch["y"])}


WRONG = [
    (total, "sum", "output", "reduce_sum .*sum()"),
    (baked_divisor, "row count", "output", "div .*/ 16"),
    (baked_shape, "row count", "the function", None),
    (negatives, "mixed rows", "output", "dot_general .*z @ z.T"),
    (batch_statistics, "mixed rows", "output", r"reduce_sum .*z.mean\(0\)"),
    (root_of_mean, "mixed rows", "output", "sqrt "),
    (weighted_mean, "mixed rows", "output", r"div .*weight.sum\(\)"),
    (largest, "mixed rows", "output", "reduce_max "),
    (sorted_rows, "mixed rows", "output", "sort "),
    (running_mean, "mixed rows", "output", "scan "),
    (dropout_of_its_own, "same numbers", "random numbers", "random_bits .*bernoulli"),
    (noise_of_numpy, "not repeatable", "output", None),
    (counting_metric, "sum", "output[1]['hits']", "reduce_sum "),
]


@pytest.mark.parametrize(
    ("fn", "kind", "output", "place"), WRONG, ids=[fn.__name__ for fn, *_ in WRONG]
)
def test_a_wrong_program_is_named_with_its_line(fn, kind, output, place):
    # The lie: training starts, and the loss is of something else.
    check = check_parallel(fn, W, BATCH)
    assert not check
    (problem,) = check.problems
    assert (problem.kind, problem.output) == (kind, output)
    if place is None:
        assert problem.where is None
    else:
        assert problem.where is not None
        assert "test_check.py:" in problem.where
        assert re.search(place, problem.where), problem.where
    with pytest.raises(mt.OutputError, match="cannot be cut into towers as it is"):
        check.raise_if_wrong()


def dropout(w, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return entropies((batch["x"] * kept) @ w, batch["y"])


def dropout_and_statistics(w, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    z = (batch["x"] * kept) @ w
    return entropies(z - z.mean(0), batch["y"])


def test_what_is_drawn_is_judged_by_the_program():
    # Two halves draw other numbers than the whole: that alone is no fault.
    assert check_parallel(dropout, W, BATCH, rng=jax.random.key(0))
    (problem,) = check_parallel(dropout_and_statistics, W, BATCH, rng=jax.random.key(0)).problems
    assert problem.kind == "mixed rows"
    assert "z.mean(0)" in problem.where


def test_axes_as_in_vmap_and_what_cannot_be_tried():
    assert check_parallel(lambda x: x * 2, BATCH["x"])
    assert check_parallel(lambda x, b: x.sum(0) + b, BATCH["x"].T, jnp.ones(16), in_axes=(1, 0))
    assert not check_parallel(lambda x: x - x.mean(0), BATCH["x"])
    with pytest.raises(mt.BatchError, match="one row cannot be cut"):
        check_parallel(by_row, W, {"x": BATCH["x"][:1], "y": BATCH["y"][:1]})


def test_modules_are_taken():
    # The lie: a check for plain pytrees, and a user with a Flax or Equinox model.
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def per_row(model, x, training=True):
        y = model(x) if isinstance(model, nnx.Module) else jax.vmap(model)(x)
        return (y**2).sum(1)

    for model in (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), eqx.nn.Linear(3, 2, key=jax.random.key(0))):
        assert mt.check_parallel(per_row, model, x, in_axes=(None, 0))
        check = mt.check_parallel(lambda model, x: per_row(model, x).sum(), model, x)
        assert [problem.kind for problem in check.problems] == ["sum"]
    normed = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    check = mt.check_parallel(per_row, normed, x)
    assert [problem.kind for problem in check.problems] == ["mixed rows"]
    assert not normed.mean[...].any()  # the user's own module has seen nothing


def test_16_bit_results_are_compared_as_coarsely_as_they_are():
    # The lie: rows that mix, seen in nothing but bfloat16's rounding.
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    assert mt.check_parallel(lambda w, x: ((x @ w) ** 2).astype(jnp.bfloat16).mean(), x[0], x)
    assert not mt.check_parallel(lambda w, x: ((x @ w) ** 2).astype(jnp.bfloat16).sum(), x[0], x)

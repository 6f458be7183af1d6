"""Axes with several values of each row: a warning where a reshape takes other rows for one."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import looking
import multitower as mt
from slow import slow_but_for

ROWS, TIMES, COLUMNS = 8, 3, 4
X = np.random.default_rng(0).normal(size=(ROWS, TIMES, COLUMNS)).astype(np.float32)
W = np.random.default_rng(1).normal(size=COLUMNS).astype(np.float32)
CAUSE = "values of different rows stand where those of one row belong"


def by_time(x):
    """Time first, as `jax.lax.scan` takes it."""
    return jnp.swapaxes(x, 0, 1)


def two_losses(w, x):
    return (x[:, 0] @ w) ** 2, (x[:, 1] @ w) ** 2


def cross_entropy(logits, labels):
    found = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - found


def labels_of(x):
    return (x[..., 0] > 0).astype(int)


RIGHT = {
    "halves": lambda w, x: jnp.concatenate(two_losses(w, x)).reshape(2, len(x)).mean(0),
    "tokens": lambda w, x: ((x.reshape(-1, COLUMNS) @ w) ** 2).reshape(len(x), -1).mean(1),
    "time first": lambda w, x: (
        ((by_time(x).reshape(-1, COLUMNS) @ w) ** 2).reshape(TIMES, -1).mean(0)
    ),
    "repeat": lambda w, x: (jnp.repeat(x[:, 0], 5, axis=0) @ w).reshape(-1, 5).max(1),
    "tile": lambda w, x: (jnp.tile(x[:, 0], (5, 1)) @ w).reshape(5, -1).max(0),
    "tokens of both": lambda w, x: cross_entropy(
        (by_time(x) * w).reshape(-1, COLUMNS), by_time(labels_of(x)).reshape(-1)
    ).mean(),
    # Another order of rows, and in all that is used together: the mean is that of the rows.
    "same order": lambda w, x: cross_entropy(
        (by_time(x) * w).reshape(len(x), TIMES, -1), by_time(labels_of(x)).reshape(len(x), -1)
    ).mean(),
    "put back": lambda w, x: (
        jnp.tanh((by_time(x) @ w).reshape(len(x), -1)).reshape(-1).reshape(TIMES, -1).mean(0)
    ),
    "one copy": lambda w, x: (jnp.tile(x[:, 0], (3, 1)) @ w)[len(x) : 2 * len(x)],
    "all copies but one": lambda w, x: ((jnp.tile(x[:, 0], (3, 1)) @ w)[len(x) :] ** 2).mean(),
    "some of each": lambda w, x: ((jnp.repeat(x[:, 0], 6, axis=0) @ w)[1::2] ** 2).mean(),
    "one of each": lambda w, x: (jnp.repeat(x[:, 0], 5, axis=0) @ w)[4::5] ** 2,
    "mean of sums": lambda w, x: (by_time(x) @ w).reshape(len(x), -1).sum(1).mean() / TIMES,
}
WRONG = {
    "halves": lambda w, x: jnp.concatenate(two_losses(w, x)).reshape(len(x), 2).mean(1),
    "time first": lambda w, x: ((by_time(x) @ w) ** 2).reshape(len(x), -1).mean(1),
    "tokens": lambda w, x: ((x @ w) ** 2).reshape(-1).reshape(TIMES, -1).mean(0),
    "first values": lambda w, x: ((jnp.repeat(x[:, 0], 2, axis=0) @ w)[: len(x)] ** 2).mean(),
    "every other copy": lambda w, x: (jnp.tile(x[:, 0] @ w, 2)[::2] * x[:, 1, 0]).mean(),
    "a shifted copy": lambda w, x: (jnp.tile(x[:, 0] @ w, 2)[1 : len(x) + 1] * x[:, 1, 0]).mean(),
    "square of a sum": lambda w, x: ((by_time(x) @ w).reshape(len(x), -1).sum(1) ** 2).mean(),
    "repeat and tile": lambda w, x: (jnp.repeat(x[:, 0] @ w, 2) * jnp.tile(x[:, 1] @ w, 2)).mean(),
    "labels in another order": lambda w, x: cross_entropy(
        (by_time(x) * w).reshape(-1, COLUMNS), labels_of(x).reshape(-1)
    ).mean(),
    "a mask in another order": lambda w, x: jnp.where(
        labels_of(x) > 0, (by_time(x) @ w).reshape(len(x), -1), 0
    ).mean(),
}

# Those whose numbers are tried every day, of each kind.
EVERY_DAY = ("tokens", "same order", "time first", "labels in another order")


def some_rows(loss):
    """Fewer rows than fill the towers, where a loss is one of each row."""
    return X[: ROWS - 1] if jax.eval_shape(loss, W, X).ndim else X


def mean_of(loss, x):
    """What one device says, from one program."""
    return np.mean(jax.jit(loss)(W, x))


@pytest.mark.parametrize("name", RIGHT)
def test_values_of_a_row_that_stay_together_are_no_warning(name):
    # The lie: an axis with several values of each row brings rows together.
    loss = RIGHT[name]
    looking.look_at_call(mt.value_and_grad(loss, devices=4), W, some_rows(loss))  # it raises them


@pytest.mark.parametrize("name", slow_but_for(EVERY_DAY, RIGHT))
def test_the_mean_of_values_that_stay_together_is_that_of_the_rows(name):
    # The lie: what nobody is warned of is a loss of other rows.
    loss = RIGHT[name]
    few = some_rows(loss)
    value, _ = mt.value_and_grad(loss, devices=4)(W, few)
    np.testing.assert_allclose(value, mean_of(loss, few), rtol=1e-5)


@pytest.mark.parametrize("name", WRONG)
def test_values_of_other_rows_in_place_of_a_row_are_a_warning(name):
    # The lie: a tower's rows lie in such an axis as those of the batch do.
    loss = WRONG[name]
    with pytest.warns(mt.MultitowerWarning, match=CAUSE):
        looking.look_at_call(mt.value_and_grad(loss, devices=4), W, X)


@pytest.mark.parametrize("name", slow_but_for(EVERY_DAY, WRONG))
def test_a_mean_with_values_of_other_rows_is_another_number(name):
    # The lie: a warning of what is right.
    loss = WRONG[name]
    few = some_rows(loss)  # one loss per row is right in full towers
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value, _ = mt.value_and_grad(loss, devices=4)(W, few)
    assert abs(value - mean_of(loss, few)) > 1e-4

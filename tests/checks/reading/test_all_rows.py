"""Where towers meet: what is made of all their rows is right, unless rows were mixed before."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, losses
from told import ours


def mean_of_all(x):
    return jax.lax.pmean(x, "towers")


def by_mean_deviation(w, x):
    z = x @ w
    return (z - mean_of_all(z.mean())) / mean_of_all(z.std())


def by_deviation_of_all(w, x):
    z = x @ w
    mean = mean_of_all(z.mean())
    return (z - mean) / jnp.sqrt(mean_of_all(((z - mean) ** 2).mean()))


def normalised_in_a_tower(w, x):
    z = x @ w
    return mean_of_all((z / z.sum()).mean())


def mean_of_kernels(w, x):
    z = x * w
    return mean_of_all(jnp.exp(-((z[:, None] - z) ** 2).sum(-1)).mean())


def inner_step(w, x):
    gradient = mean_of_all(jax.grad(lambda w: losses(w, x).mean())(w))
    return losses(w - 0.1 * gradient, x)


def centred_over_all(w, x):
    z = x @ w
    return ((z - mean_of_all(z.mean())) ** 2).mean()


def largest_first(w, x):
    z = x @ w
    largest = jax.lax.pmax(jax.lax.stop_gradient(z.max()), "towers")
    return largest + jnp.log(mean_of_all(jnp.exp(z - largest).mean()))


@pytest.mark.parametrize(
    ("loss", "is_right"),
    [
        (by_mean_deviation, False),
        (normalised_in_a_tower, False),
        (mean_of_kernels, False),
        (by_deviation_of_all, True),
        (inner_step, True),
        (largest_first, True),
        (centred_over_all, True),
    ],
)
def test_towers_that_meet_after_their_rows_were_mixed_are_told(loss, is_right):
    # The lie: whatever passes through a pmean is that of the whole batch.
    if is_right:
        look_at(mt.grad(loss, devices=2), X)  # warnings are errors
        return
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(psum .*made of its own rows alone"):
        look_at(mt.grad(loss, devices=2), X)
    with pytest.warns(mt.MultitowerWarning, match=r"aux \(psum .*made of its own rows alone"):
        look_at(mt.grad(lambda w, x: (losses(w, x), loss(w, x)), has_aux=True, devices=2), X)


def test_a_loss_that_sends_rows_to_each_tower_is_read():
    # The lie: a loss for two towers cannot be read with eleven, and so it is right.
    sent = lambda w, x: jax.lax.all_to_all(x * w, "towers", 0, 1, tiled=True)
    right = lambda w, x: (sent(w, x) ** 2).mean()
    look_at(mt.grad(right, devices=2), X)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        look_at(mt.grad(lambda w, x: right(w, x) + (x * w).std(), devices=2), X)


def test_the_largest_of_the_rows_is_told():
    # The lie: the advice to take a mean over the towers, whose largest it is not.
    loss = lambda w, x: losses(w, x) / losses(w, x).max()
    with pytest.warns(mt.MultitowerWarning, match=r"reduce_max .*lax\.pmax\(jax") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert "pmean" not in ours(told)[0]
    rightly = lambda w, x: (
        losses(w, x) / jax.lax.pmax(jax.lax.stop_gradient(losses(w, x).max()), "towers")
    )
    look_at(mt.value_and_grad(rightly, devices=2), X)


def test_what_is_done_with_all_rows_is_told():
    # The lie: silence, because the batch's size is written into the loss.
    loss = lambda w, x: losses(w, x[:64] - x[:64].mean(0))
    with pytest.warns(mt.MultitowerWarning, match="reduce_sum .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), np.ones((64, 3), np.float32))


def in_a_row(w, row):
    return ((row * w) * mt.all_rows(row)[: len(row)]).sum()


def place_in_a_row(w, row):
    return (row @ w - mt.row_index(row)[-1]) ** 2


def heads(w, x):
    """Eight heads of every row, each compared with the same head of all rows."""
    of_head = lambda head: (head @ w) * (mt.all_rows(head) @ w).mean() + mt.row_index(head)
    return jax.vmap(of_head, in_axes=1, out_axes=1)(jnp.stack([x] * 8, axis=1)).sum(1)


@pytest.mark.parametrize(
    ("loss", "said"), [(in_a_row, "mt.all_rows"), (place_in_a_row, "mt.row_index")]
)
def test_all_rows_of_one_row_are_told(loss, said):
    # The lie: the entries of one row taken for the rows of the batch, and other numbers in silence.
    by_row = jax.vmap(loss, in_axes=(None, 0))
    with pytest.warns(mt.MultitowerWarning, match=rf"{said} \(.*{said}\(row\).*of jax.vmap"):
        look_at(mt.grad(by_row, devices=2), X)


@pytest.mark.slow
def test_all_rows_of_each_head_are_rows():
    found = mt.grad(heads, devices=2)(W, X)
    np.testing.assert_allclose(found, jax.grad(lambda w: heads(w, X).mean())(W), rtol=1e-5)

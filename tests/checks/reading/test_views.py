"""A part of the rows is taken: halves, views and slices of a batch are not those of a tower."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import X, look_at, look_at_step, losses


def test_pairs_of_neighbours_in_towers_of_three_rows_are_told():
    # The lie: two rows and one row broadcast, so that a row is paired with that of another pair.
    pairs = lambda w, x: ((x @ w)[::2] - (x @ w)[1::2]) ** 2
    loss = lambda w, x: pairs(w, x).mean()
    with pytest.warns(
        mt.MultitowerWarning, match=r"loss \(slice .*\): a part of the rows is taken"
    ):
        look_at(mt.grad(loss, towers=4, devices=2), np.concatenate([X, X])[:12])
    anew = lambda w, x: pairs(w, x).mean() + 0.0  # what is equal is not looked at again
    look_at(mt.grad(anew, towers=4, devices=2), np.concatenate([X, X]))


def test_the_partner_of_a_row_in_towers_of_three_rows_is_told():
    # The lie: i ^ 1 finds a row of this tower, as it does in towers of two or four rows.
    loss = lambda w, x: ((x @ w) * (x @ w)[jnp.arange(len(x)) ^ 1]).mean()
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(gather .*\): rows are brought together"):
        look_at(mt.grad(loss, towers=4, devices=2), np.concatenate([X, X])[:12])
    anew = lambda w, x: loss(w, x) + 0.0  # what is equal is not looked at again
    look_at(mt.grad(anew, towers=4, devices=2), np.concatenate([X, X]))


def convolved_halves(w, x):
    filters = jnp.ones((2, len(x) // 2, 1))
    sums = jax.lax.conv_general_dilated(
        (x * w).T[:, :, None], filters, (1,), "VALID", feature_group_count=2
    )
    return (sums[:, 0] * sums[:, 1]).sum() / len(x)


def test_halves_of_the_rows_that_a_convolution_sums_up_are_told():
    # The lie: a convolution with the rows as channels sums up all of them, in groups, too.
    with pytest.warns(mt.MultitowerWarning, match="conv_general_dilated"):
        look_at(mt.grad(convolved_halves, devices=2), X)


def halves(w, x):
    one, other = jnp.split(x @ w, 2)  # two views, one after the other: fails with an odd number
    return ((one - other) ** 2).mean()


def first_half(w, x):
    z = x @ w
    return ((z[: len(z) // 2] - z[len(z) // 2 :]) ** 2).mean()


def views(w, x):
    z = (2 * jnp.tanh(x @ w)).reshape(2, -1)
    return ((z[0] - z[1]) ** 2).mean()


def unpacked_views(w, x):
    one, other = jnp.tanh(x @ w).reshape(2, -1)
    return jnp.vdot(one, 2 * other) / len(x)


def sum_of_views(w, x):
    z = jnp.tanh(x @ w).reshape(2, -1)
    return (2 * z.sum(0) ** 2).mean()


def largest_view(w, x):
    return (x @ w).reshape(2, -1).max(0).mean()


def view_after_view(w, x):
    step = lambda before, z: (jnp.tanh(before + z), before)
    return jax.lax.scan(step, jnp.zeros(len(x) // 2), (x @ w).reshape(2, -1))[1].mean()


def views_beside_each_other(w, x):
    z = jnp.tanh(x @ w).reshape(2, -1).T
    return (z[:, 0] * z[:, 1]).mean()


def softmax_of_views(w, x):
    z = jnp.tanh(x * w).reshape(2, -1, 3).swapaxes(0, 1)
    return jax.nn.softmax(z, axis=1)[:, 0].mean()


def one_pair_by_vmap(w, x):
    return jax.vmap(lambda z: z[0] @ z[1])((x * w).reshape(2, -1, 3).swapaxes(0, 1)).mean()


def one_pair_after_another(w, x):
    pairs = (x * w).reshape(2, -1, 3).swapaxes(0, 1)
    return jax.lax.map(lambda z: (z.sum(0) ** 2).sum(), pairs).mean()


def views_side_by_side(w, x):
    return jax.lax.map(lambda views: views[0] @ views[1], tuple((x * w).reshape(2, -1, 3))).mean()


def pair_of_what_a_loop_made(w, x):
    views = jax.lax.map(lambda z: jnp.tanh(z @ w), x.reshape(2, -1, 3).swapaxes(0, 1))
    return (views[:, 0] * views[:, 1]).mean()


def views_of_a_branch(w, x):
    z = jax.lax.cond(w[0] > 0, jnp.tanh, jnp.sin, (x @ w).reshape(2, -1))
    return (z[0] * z[1]).mean()


def views_that_a_loop_carries(w, x):
    z = jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z * w[0]), (x @ w).reshape(2, -1))
    return (z[0] * z[1]).mean()


def other_view(w, x):
    z = (x * w).reshape(2, -1, 3)
    return jnp.einsum("vbd,vbd->b", z, z[::-1]).mean()


def pairs_of_sums(w, x):
    mean = jnp.tile((x @ w).reshape(2, -1).mean(0), 2)
    return (mean.reshape(-1, 2)[:, ::-1] ** 2).mean()


def heads_of_tasks(w, x):
    heads = w * jnp.array([[1.0], [-1.0]])
    return (jnp.einsum("tnd,td->tn", x.reshape(2, -1, 3), heads) ** 3).mean()


def signs_of_halves(w, x):
    return jax.nn.softplus((x @ w).reshape(2, -1) * jnp.array([[-1.0], [1.0]])).mean()


def numbers_of_halves(w, x):
    of_half = lambda rows, number: losses(w, rows) * jnp.tanh(number)
    return jax.vmap(of_half)(x.reshape(2, -1, 3), jnp.arange(2.0)).mean()


def each_half_its_own_loss(w, x):
    labelled, other = (x @ w).reshape(2, -1)
    return (labelled**2).mean() + jnp.abs(other).mean()


def each_half_its_own_weight(w, x):
    z = (x @ w).reshape(2, -1)
    return 0.9 * (z[0] ** 2).mean() + 0.1 * (z[1] ** 2).mean()


def half_less_half(w, x):
    scores = (x @ w).reshape(2, -1)
    return (scores[0].mean() - scores[1].mean()) * 2


def half_alone(w, x):
    return jnp.tanh((x @ w).reshape(2, -1)[0]).mean() + (w**2).sum()


def two_losses_beside_each_other(w, x):
    rows = (x @ w).reshape(2, -1)
    return jnp.stack([fn(z).mean() for fn, z in zip((jnp.abs, jnp.tanh), rows, strict=True)]).mean()


VIEWS = [
    each_half_its_own_loss,
    each_half_its_own_weight,
    half_less_half,
    half_alone,
    two_losses_beside_each_other,
    heads_of_tasks,
    signs_of_halves,
    numbers_of_halves,
    views,
    unpacked_views,
    sum_of_views,
    largest_view,
    view_after_view,
    pairs_of_sums,
    views_beside_each_other,
    softmax_of_views,
    one_pair_by_vmap,
    other_view,
    one_pair_after_another,
    views_side_by_side,
    pair_of_what_a_loop_made,
    views_of_a_branch,
    views_that_a_loop_carries,
]


@pytest.mark.parametrize("loss", VIEWS)
def test_views_by_reshape_are_not_those_of_a_tower(loss):
    # The lie: a reshape to two views is a loop over chunks.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(chunks at .*\): a part of the rows is"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "reorder",
    [
        lambda h: h.reshape(2, -1).T.reshape(-1),
        lambda h: h.reshape(-1, 2).T.reshape(-1),
        lambda h: h.reshape(2, -1)[::-1].reshape(-1),
    ],
    ids=["halves in turn", "even rows first", "second half first"],
)
def test_rows_in_another_order_are_not_those_of_a_tower(reorder):
    # The lie: a reshape and a transposition leave every row where it was.
    loss = lambda w, x: (reorder(jnp.tanh(x @ w)) * x[:, 0]).mean()
    with pytest.warns(
        mt.MultitowerWarning, match=r"loss \(layout at .*\): values of different rows"
    ):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize("loss", [halves, first_half])
def test_halves_of_the_batch_are_not_those_of_a_tower(loss):
    # The lie: two views of an image are compared, and they are views of two images.
    said = r"loss \((split|slice) at .*\): a part of the rows is taken.*view1"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.value_and_grad(loss, devices=2), X)
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at_step(loss)


def by_length(w, x):
    z, half = x @ w, len(x) // 2
    return ((z[:half] - z[half:]) ** 2).mean()


def test_halves_of_three_rows_broadcast():
    """Lie: silence, because the look failed with all other numbers of rows that it chose."""
    with pytest.warns(mt.MultitowerWarning, match=r"slice at .*a part of the rows is taken"):
        look_at(mt.grad(by_length, devices=1), X[:3])


def between_times(w, x):
    z = x @ w
    return ((z[1:] - z[:-1]) ** 2).mean()


def test_a_batch_with_time_first_is_told_to_say_where_its_rows_are():
    # The lie: nothing but halves and views takes a part of axis 0, and the times are rows.
    steps = np.stack([X, X + 1, X * 2, X])  # four times of eight rows
    with pytest.warns(mt.MultitowerWarning, match=r"slice at .*time first, put.*\(None, 1"):
        look_at(mt.grad(between_times, devices=2), steps)
    anew = lambda w, x: between_times(w, x) + 0.0  # what is equal is not looked at again
    look_at(mt.grad(anew, in_axes=(None, 1), devices=2), steps)


ALL_ROWS = [  # each on a line of its own: a function is looked at once
    (8, lambda w, x: losses(w, x[:8])),
    (64, lambda w, x: losses(w, x[:64])),
    (64, lambda w, x: losses(w, x[:64]).mean()),
    (300, lambda w, x: losses(w, x[:300]).mean()),
]
A_PART = [
    (64, lambda w, x: losses(w, x[:4]).mean()),
    (64, lambda w, x: losses(w, x[:63]).mean()),
    (64, lambda w, x: losses(w, x[1:64]).mean()),
    (64, lambda w, x: losses(w, x[:64:3]).mean()),
    (64, lambda w, x: losses(w, x[:64]).mean() + losses(w, x[:62]).mean()),
    (300, lambda w, x: losses(w, x[:64]).mean()),
]


@pytest.mark.parametrize(("rows", "loss"), ALL_ROWS)
def test_as_many_rows_as_the_batch_has_are_all_rows(rows, loss):
    """Lie: "a part of the rows is taken" of MaxText's data[:micro_batch_size]."""
    look_at(mt.value_and_grad(loss, devices=2), np.ones((rows, 3), np.float32))


@pytest.mark.parametrize(("rows", "loss"), A_PART)
def test_fewer_rows_than_the_batch_has_are_a_part(rows, loss):
    # The lie: silence, because some of the rows that are taken are those of the batch.
    with pytest.warns(mt.MultitowerWarning, match=r"slice .*a part of the rows is taken"):
        look_at(mt.value_and_grad(loss, devices=2), np.ones((rows, 3), np.float32))

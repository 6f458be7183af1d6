"""What is looked up by numbers: rows, by their own numbers or by others, and tables."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, Y, look_at, look_at_step, losses
from told import ours


def beside_the_next(w, x):
    return losses(w, x - x[(jnp.arange(len(x)) + 1) % len(x)])


def beside_the_one_before(w, x):
    before = np.mod(np.arange(len(x)) - 1, len(x))
    return losses(w, x - jnp.take(x, before, axis=0))


def beside_the_other_end(w, x):
    return losses(w, x - x[len(x) - 1 - jnp.arange(len(x))])


def beside_the_reversed(w, x):
    return losses(w, x - x[jnp.arange(len(x))[::-1]])


def beside_the_one_behind(w, x):
    return losses(w, x - x[-jnp.arange(len(x))])


def of_all_pairs(w, x):
    one, other = jnp.triu_indices(len(x), 1)
    return (((x @ w)[one] - (x @ w)[other]) ** 2).mean()


@pytest.mark.parametrize(
    "loss",
    [
        beside_the_next,
        beside_the_one_before,
        beside_the_other_end,
        beside_the_reversed,
        beside_the_one_behind,
        of_all_pairs,
        lambda w, x: losses(w, x - x[jnp.arange(len(x)) - 1]),
        lambda w, x: losses(w, x - x[jnp.maximum(jnp.arange(len(x)) - 1, 0)]),
        lambda w, x: losses(w, x[jnp.arange(len(x))[:, None] + jnp.arange(2)].mean(1)),
        lambda w, x: jax.vmap(lambda i: losses(w, x[i] - x[i + 1]))(jnp.arange(len(x))),
    ],
)
def test_rows_that_are_found_by_numbers_of_others_are_told(loss):
    # The lie: an index that is made of the numbers of the rows finds row i.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(gather .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), X)


BY_THEIR_OWN = {
    "class": lambda w, x: losses(w, x) - x[jnp.arange(len(x)), jnp.argmax(x, 1)],
    "flat class": lambda w, x: (
        losses(w, x) - x.reshape(-1)[3 * jnp.arange(len(x)) + jnp.argmax(x, 1)]
    ),
    "flat": lambda w, x: losses(w, x) - x.reshape(-1)[3 * jnp.arange(len(x)) + 1],
    "flat, by NumPy": lambda w, x: losses(w, x) - x.reshape(-1)[3 * np.arange(len(x)) + 1],
    "next class": lambda w, x: losses(w, x) - x[jnp.arange(len(x)), (x[:, 0] > 0).astype(int) + 1],
    "repeated": lambda w, x: losses(w, x - jnp.repeat(x, 2, 0)[2 * jnp.arange(len(x)) + 1]),
    "written": lambda w, x: losses(w, jnp.asarray(x).at[jnp.arange(len(x)), 1].set(0.0)),
}


@pytest.mark.parametrize("name", BY_THEIR_OWN)
def test_nothing_is_said_of_rows_that_are_found_by_their_own_numbers(name):
    look_at(mt.grad(BY_THEIR_OWN[name], devices=2), X)  # warnings are errors


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] * (name != "flat class"))
        for name in BY_THEIR_OWN
    ],
)
def test_rows_that_are_found_by_their_own_numbers(name):
    # The lie: a wrong program among them, which nobody blames.
    loss = BY_THEIR_OWN[name]
    value, _ = mt.value_and_grad(loss, devices=1, towers=4)(W, X)
    np.testing.assert_allclose(value, jax.jit(loss)(W, X).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "turn",
    [
        lambda w, x, i, out: out.at[0].set(losses(w, x[i])),
        lambda w, x, i, out: out.at[i].set(losses(w, x[i]) + out[i - 1]),
        lambda w, x, i, out: (out + losses(w, x[i])).at[i].set(0.0),
        lambda w, x, i, out: out.at[i].set(0.0) + losses(w, x[i]),
    ],
)
def test_a_loop_that_does_more_than_put_a_row_in_its_place_is_told(turn):
    def loss(w, x):
        return jax.lax.fori_loop(0, len(x), lambda *now: turn(w, x, *now), jnp.zeros(len(x)))

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), X)


def test_a_loop_whose_last_row_stays_is_told():
    def loss(w, x):
        put = lambda i, out: out.at[0].set(losses(w, x[i]))
        return jax.lax.fori_loop(0, len(x), put, jnp.zeros(2)).sum()

    with pytest.warns(mt.MultitowerWarning, match=r"loss \(scan .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2, towers=2), X)


def by_class(w, x, y, weights):
    return losses(w, x) * weights[y]


def positions(w, x, y, table):
    return losses(w, x) * table[jnp.arange(3)].sum()


@pytest.mark.parametrize("loss", [pytest.param(by_class, marks=pytest.mark.slow), positions])
@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_table_as_long_as_the_batch_is_told(loss, towers):
    # The lie: half a table, where an index that is too large is clamped.
    table = np.arange(8.0, dtype=np.float32)
    said = r"(weights|table) \(gather .*like in a table.*: in_axes=\(None, 0, 0, None\)"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at(mt.value_and_grad(loss, devices=2, towers=towers), X, Y, table)
    assert len(ours(told)) == 1
    as_it_says = {"in_axes": (None, 0, 0, None)}
    run = mt.value_and_grad(loss, devices=2, towers=towers, **as_it_says)
    whole = run(W, X, Y, table)
    expected = jax.jit(jax.value_and_grad(lambda *a: loss(*a).mean()))(W, X, Y, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, expected)


def test_a_quantile_is_no_table():
    # The lie: an advice to hand every tower the whole of what is a statistic of its own rows.
    loss = lambda w, x, y: losses(w, x) * jnp.quantile(y.astype(float), 0.5)
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2, in_axes=(None, 0, 0)), X, Y)
    assert not any("like in a table" in str(one.message) for one in told)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x[jnp.nonzero(x[:, 0] > 0, size=4, fill_value=0)[0]]).mean(),
        lambda w, x: losses(w, x) * jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 0]),
    ],
    ids=["chosen by a mask", "ranks"],
)
def test_rows_that_rows_choose_are_no_table(loss):
    # The lie: if every tower gets the whole of x, the loss is right.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert not any("table" in str(one.message) for one in told)


def test_a_table_in_a_batch_is_told():
    def loss(w, batch):
        return losses(w, batch["x"]) * batch["weights"][batch["y"]]

    batch = {"x": X, "y": Y, "weights": np.ones(8, np.float32)}
    with pytest.warns(mt.MultitowerWarning, match=r"batch\['weights'\] \(gather .*like in a table"):
        look_at_step(loss, batch, devices=2, towers=None)

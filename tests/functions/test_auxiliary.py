"""What a loss returns: aux by rows, averaged or counted; and losses for rows, not for members."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from two_layers import assert_close, batch_of, losses, numpy_value_and_grad, params_of


@pytest.mark.parametrize(
    ("num_rows", "towers"),
    [
        (16, None),
        (10, 4),
        pytest.param(16, 4, marks=pytest.mark.slow),
        pytest.param(10, None, marks=pytest.mark.slow),
    ],
)
def test_aux_by_rows_or_averaged(num_rows, towers):
    """Lie: aux of the last tower for all, or padding among the rows, or what is no row refused."""
    params, batch = params_of(), batch_of(num_rows)
    norm_of = lambda params: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))

    def loss(params, batch):
        values = losses(params, batch)
        aux = {"values": values, "pair": (batch["x"] > 0, None), "norm": norm_of(params)}
        if num_rows == 16:
            aux["mean"] = batch["y"].mean()
        return values, aux

    options = dict(has_aux=True, devices=1 if towers else 2, towers=towers)
    (value, aux), grads = mt.value_and_grad(loss, **options)(params, batch)
    assert_close((value, grads), numpy_value_and_grad(params, batch))
    values = jax.jit(losses)(params, batch)
    assert_close((aux["values"], aux["norm"]), (values, jax.jit(norm_of)(params)))
    np.testing.assert_array_equal(aux["pair"][0], batch["x"] > 0)
    assert aux["pair"][1] is None
    if num_rows == 16:
        assert_close(aux["mean"], batch["y"].mean())
    grads_again, aux_again = mt.grad(loss, **options)(params, batch)
    assert_close((grads_again, aux_again), (grads, aux))


def test_sixteen_rows_are_not_sixteen_classes():
    """Lie: aux that happens to be as long as the tower's rows is laid side by side."""

    def loss(w, x):
        return w * x, jnp.full(4, x.mean())

    (_, aux), _ = mt.value_and_grad(loss, has_aux=True, devices=2)(1.0, np.arange(8.0))
    np.testing.assert_allclose(aux, [3.5] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4])
def test_trap_four_members_are_taken_for_four_rows(towers):
    """Lie: with 13 rows the last member has the weight of one row; with a sum 4 times too large."""
    x, y = np.ones((13, 3), np.float32), np.arange(52, dtype=np.float32).reshape(13, 4)
    error = lambda w: (x @ w - y) ** 2
    run = lambda loss: mt.value_and_grad(loss, in_axes={"x": 0, "y": 0}, devices=4, towers=towers)

    def by_member(w):
        return ((x @ w - y) ** 2).mean(0)

    def of_members(w):
        return mt.ratio(((x @ w - y) ** 2).sum(0), np.ones(4, np.float32))

    w = jnp.ones((3, 4))
    for loss in (by_member, of_members):
        for _ in range(2):  # not the first call alone
            with pytest.raises(mt.OutputError, match="4 entries on its first axis, whatever"):
                run(loss)(w)

    def by_row(w):
        return ((x @ w - y) ** 2).mean(axis=1)  # as it says

    assert float(run(by_row)(w)[0]) == pytest.approx(float(error(w).mean()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:loss .slice")  # an odd row is left out
def test_rows_of_whole_pairs_are_rows():
    """Lie: with 211 rows, which the first look reads first, there are 210 losses, as in a tower."""
    x = np.random.default_rng(0).normal(size=(420, 3)).astype(np.float32)
    pairs = lambda w, x: (x[: len(x) // 2 * 2] @ w) ** 2
    value, _ = mt.value_and_grad(pairs, towers=2, devices=1)(jnp.ones(3), x)
    assert float(value) == pytest.approx(float(pairs(jnp.ones(3), x).mean()), rel=1e-6)


def test_trap_a_step_takes_four_members_for_four_rows():
    step = mt.train_step(lambda w, y: ((w - y) ** 2).mean(0), optax.sgd(0.1), towers=4, devices=1)
    state = step.init(jnp.ones(4))
    for _ in range(2):
        with pytest.raises(mt.OutputError, match=r"error.mean\(axis=1\) and not error.mean"):
            step(state, np.ones((16, 4), np.float32))


def counting(count, key, counts):
    """A loss that closes over a counter and hands on what `counts` makes of it."""

    def loss(w, x):
        return jax.nn.relu(w * x), {"count": counts(count, x, key), "x": x > 0}

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("jit", [False, True])
def test_a_counter_in_aux_is_that_of_one_device(towers, jit):
    """Flax NNX's examples close over their counters. Lie: a counter that counts towers."""
    wrap = jax.jit if jit else lambda fun: fun
    x = np.arange(10, dtype=np.float32)  # ragged: what does not depend on rows is no mean of them

    @wrap
    def step(count, key):
        loss = counting(count, key, lambda count, x, key: (jax.jit(jnp.add)(count, 1), count > 3))
        return mt.grad(loss, has_aux=True, devices=2, towers=towers)(1.0, x)

    _, aux = step(jnp.array(6), jax.random.key(0))
    assert aux["count"] == (7, True)
    np.testing.assert_array_equal(aux["x"], x > 0)


OTHER_COUNTS = {
    "of rows": lambda count, x, key: count + len(x),
    "of what rows hold": lambda count, x, key: count + (x > 0).sum(),
    "of turns that rows decide": lambda count, x, key: jax.lax.fori_loop(
        0, x.max().astype(int), lambda _, n: n + 1, count
    ),
    "of a tower's own random numbers": lambda count, x, key: jax.random.randint(key, (), 0, 9),
}


@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("counts", OTHER_COUNTS)
def test_a_counter_of_a_tower_stays_an_error(counts, towers):
    """Lie: the count of tower 0, a quarter of the rows, for that of all."""
    loss = counting(jnp.array(6), jax.random.key(0), OTHER_COUNTS[counts])
    with pytest.raises(mt.OutputError, match=r"aux\['count'\] has dtype int32 and no axis of rows"):
        mt.grad(loss, has_aux=True, devices=2, towers=towers)(1.0, np.arange(8.0))


@pytest.mark.parametrize(("towers", "few"), [(4, 7), pytest.param(3, 12, marks=pytest.mark.slow)])
def test_results_of_one_call_are_on_the_same_devices(towers, few):
    """The lie: rows that do not fill the towers are on one device, which JAX refuses to mix."""
    losses = lambda w, x: ((x * w) ** 2, {"rows": x * w})
    x = np.arange(few, dtype=np.float32)
    gradient, aux = mt.grad(losses, has_aux=True, devices=2, towers=towers)(jnp.float32(2), x)
    expected = (x**2).mean() * 8 * x.mean()
    np.testing.assert_allclose(gradient * aux["rows"].mean(), expected, rtol=1e-5)

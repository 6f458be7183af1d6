"""Rows that are sorted: not a word if they are put back, and a warning if they are not."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt

EXPERTS, COLUMNS = 3, 4
X = np.random.default_rng(0).normal(size=(8, 5, COLUMNS)).astype(np.float32)
PARAMS = {
    "router": np.random.default_rng(1).normal(size=(COLUMNS, EXPERTS)).astype(np.float32),
    "experts": np.random.default_rng(2).normal(size=(EXPERTS, COLUMNS, COLUMNS)).astype("f"),
}


def experts(params, tokens, expert):
    """Each token through its expert: `tokens` are sorted by it."""
    return jax.lax.ragged_dot(tokens, params["experts"], jnp.bincount(expert, length=EXPERTS))


def put_back_by_the_inverse(params, tokens, expert):
    order = jnp.argsort(expert)
    return experts(params, jnp.take(tokens, order, axis=0), expert)[jnp.argsort(order)]


def put_back_by_writing(params, tokens, expert):
    order = jnp.argsort(expert)
    return jnp.zeros_like(tokens).at[order].set(experts(params, tokens[order], expert))


def put_back_by_an_inverse_that_is_written(params, tokens, expert):
    order, numbers = jnp.argsort(expert), jnp.arange(len(tokens))
    return experts(params, tokens[order], expert)[jnp.zeros_like(order).at[order].set(numbers)]


@jax.custom_vjp
def reordered(tokens, order):
    return tokens[order]


reordered.defvjp(
    lambda tokens, order: (tokens[order], jnp.argsort(order)),
    lambda back, given: (given[back], None),
)


def with_a_rule_of_its_own(params, tokens, expert):
    order = jnp.argsort(expert)
    there = experts(params, reordered(tokens, order), expert)
    return jax.jit(reordered)(there, jnp.argsort(order))


def sorted_beside_the_key(params, tokens, expert):
    numbers = jnp.arange(len(tokens))
    by_expert, order = jax.lax.sort_key_val(expert, numbers)
    one_by_one = params["experts"][by_expert]
    return jnp.zeros_like(tokens).at[order].add(jnp.einsum("td,tdf->tf", tokens[order], one_by_one))


def two_experts_each(params, tokens, expert):
    both = jnp.stack([expert, (expert + 1) % EXPERTS], axis=1).ravel()
    order = jnp.argsort(both)
    there = experts(params, tokens[order // 2], both)
    return there[jnp.argsort(order)].reshape(*tokens.shape[:1], 2, -1).sum(1)


def added_to_the_token(params, tokens, expert):
    both = jnp.stack([expert, (expert + 1) % EXPERTS], axis=1).ravel()
    order = jnp.argsort(both)
    there = experts(params, tokens[order // 2], both)
    return jnp.zeros_like(tokens).at[order // 2].add(there)


def mixture(layer):
    def loss(params, x):
        tokens = x.reshape(-1, COLUMNS)
        expert = jnp.argmax(tokens @ params["router"], axis=1)
        return ((layer(params, tokens, expert).reshape(x.shape) - x) ** 2).mean((1, 2))

    return loss


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        put_back_by_the_inverse,
        put_back_by_writing,
        pytest.param(put_back_by_an_inverse_that_is_written, marks=pytest.mark.slow),
        pytest.param(with_a_rule_of_its_own, marks=pytest.mark.slow),
        sorted_beside_the_key,
        pytest.param(two_experts_each, marks=pytest.mark.slow),
        pytest.param(added_to_the_token, marks=pytest.mark.slow),
    ],
)
def test_a_mixture_of_experts_brings_nothing_together(layer):
    # The lie: tokens that are sorted by expert and put back are told to be brought together.
    loss = mixture(layer)
    value, _ = mt.value_and_grad(loss, devices=4)(PARAMS, X)  # warnings are errors
    np.testing.assert_allclose(value, loss(PARAMS, X).mean(), rtol=1e-5)


W = np.ones(COLUMNS, np.float32)
Z = X[:, 0]


def in_order(w, x):
    """Losses, and the order of what they are made of."""
    z = x @ w
    return z**2, jnp.argsort(z)


def mean_of_sorted(w, x):
    values, order = in_order(w, x)
    return values[order].mean()


def sum_of_sorted(w, x):
    values, order = in_order(w, x)
    return (jnp.tanh(values)[order] * 2).sum() / len(x)


def sorted_keys_put_back(w, x):
    keys, order = jax.lax.sort_key_val(x @ w, jnp.arange(len(x)))
    return (jnp.zeros_like(keys).at[order].set(keys) ** 2).mean()


@pytest.mark.parametrize(
    "loss",
    [mean_of_sorted, pytest.param(sum_of_sorted, marks=pytest.mark.slow), sorted_keys_put_back],
)
def test_a_mean_over_sorted_rows_is_that_of_the_rows(loss):
    value, _ = mt.value_and_grad(loss, devices=4)(W, Z)  # warnings are errors
    np.testing.assert_allclose(value, loss(W, Z), rtol=1e-5)


def ranked(w, x):
    values, order = in_order(w, x)
    return values * jnp.argsort(order)


def ranked_by_writing(w, x):
    values, order = in_order(w, x)
    return values * jnp.zeros_like(order).at[order].set(jnp.arange(len(x)))


def written_backwards(w, x):
    values, order = in_order(w, x)
    backwards = jnp.arange(len(x))[::-1]
    return values * values[order][jnp.zeros_like(order).at[order].set(backwards)]


def weighed_by_rank(w, x):
    values, order = in_order(w, x)
    return (values[order] / (1.0 + jnp.arange(len(x)))).mean()


def halved(w, x):
    values, order = in_order(w, x)
    return values[order][: len(x) // 2].mean()


def added_up(w, x):
    values, order = in_order(w, x)
    return jnp.cumsum(values[order])[jnp.argsort(order)]


def compared_with_the_next(w, x):
    values, order = in_order(w, x)
    return (values[order] - jnp.roll(values[order], 1))[jnp.argsort(order)]


def put_back_with_the_order(w, x):
    values, order = in_order(w, x)
    return values[order][order]


def put_back_once_of_twice(w, x):
    values, order = in_order(w, x)
    return values[order][order][jnp.argsort(order)]


def put_back_from_the_other_end(w, x):
    values, order = in_order(w, x)
    return values[len(x) - 1 - order][jnp.argsort(order)]


def put_back_elsewhere(w, x):
    values, order = in_order(w, x)
    return values[order][jnp.argsort(jnp.argsort(-values))] * values


def put_back_by_another_sort(w, x):
    values, order = in_order(w, x)
    return values[order][jnp.argsort(jnp.cos(values)[order])]


def put_back_by_the_order_again(w, x):
    values, order = in_order(w, x)
    return values[order][jnp.argsort(jnp.argsort(order))]


def sorted_twice(w, x):
    values, order = in_order(w, x)
    _, twice, again = jax.lax.sort((jnp.cos(values), values[order], jnp.arange(len(x))))
    return twice[jnp.argsort(again)]


def added_to_the_sorted(w, x):
    values, order = in_order(w, x)
    return values[order].at[order].add(values[order])


def written_elsewhere(w, x):
    values, order = in_order(w, x)
    return values * jnp.zeros_like(values).at[jnp.argsort(order)].set(values[order])


def beside_the_unsorted(w, x):
    values, order = in_order(w, x)
    return (values[order] * values).mean()


def beside_another_order(w, x):
    values, order = in_order(w, x)
    return (values[order] * values[jnp.argsort(-values)]).mean()


def beside_a_mean(w, x):
    values, order = in_order(w, x)
    return jnp.maximum(values[order], values[order].mean())[jnp.argsort(order)]


def scanned(w, x):
    values, order = in_order(w, x)
    total, sums = jax.lax.scan(lambda sum, one: (sum + one, sum), 0.0, values[order])
    return total + sums.mean()


def sometimes_sorted(w, x):
    values, order = in_order(w, x)
    return x[:, 0] * jax.lax.cond(w[0] > 0, lambda: values[order], lambda: values)


def looked_up_by_rank(w, x):
    values, order = in_order(w, x)
    return values * jnp.tile(w, 75)[jnp.argsort(order)]


def looked_up_by_place(w, x):
    values, order = in_order(w, x)
    return values * jnp.tile(w, 75)[order][jnp.argsort(order)]


def numbers_put_back(w, x):
    values, order = in_order(w, x)
    return values * order[jnp.argsort(order)]


@pytest.mark.parametrize(
    "loss",
    [
        ranked,
        ranked_by_writing,
        written_backwards,
        weighed_by_rank,
        halved,
        added_up,
        compared_with_the_next,
        put_back_with_the_order,
        put_back_once_of_twice,
        put_back_from_the_other_end,
        put_back_elsewhere,
        put_back_by_another_sort,
        put_back_by_the_order_again,
        sorted_twice,
        added_to_the_sorted,
        written_elsewhere,
        beside_the_unsorted,
        beside_another_order,
        beside_a_mean,
        scanned,
        sometimes_sorted,
        looked_up_by_rank,
        looked_up_by_place,
        numbers_put_back,
    ],
)
def test_what_is_done_with_an_order_is_told(loss):
    # The lie: a rank in the tower that is none in the batch, and nobody is told.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        jax.eval_shape(mt.grad(loss, devices=4), W, Z)


def test_an_order_as_a_result_is_told():
    run = mt.value_and_grad(in_order, has_aux=True, devices=4)
    with pytest.warns(mt.MultitowerWarning, match=r"aux \(sort at .*: rows are brought together"):
        jax.eval_shape(run, W, Z)

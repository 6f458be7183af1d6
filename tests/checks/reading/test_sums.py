"""Sum or mean: a sum over a tower's rows is told, unless what divides it makes it a mean."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_step, losses, total


def divided(w, x, by):
    """As Keras has it: the number is computed in the program, and may be zero."""
    count = jnp.prod(jnp.array(by)).astype(jnp.float32)
    safe = jnp.where(count == 0, 1.0, count)
    return jnp.where(count == 0, 0.0, losses(w, x).sum() / safe)


def test_a_mean_whose_number_of_rows_is_computed():
    # The lie: every Keras loss is called a sum over rows. Or none is: by two it still is one.
    look_at(mt.grad(lambda w, x: divided(w, x, x.shape[:1]), devices=2), X)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):
        look_at(mt.grad(lambda w, x: divided(w, x, (2,)), devices=2), X)


def test_the_number_of_rows_of_all_towers():
    # The lies: the rows of a tower divided by those of all towers, T times too small, and nobody is
    # told; a warning where that number is right.
    every = lambda x: jax.lax.psum(len(x), "towers")
    over_all = lambda w, x: losses(w, x).sum() / every(x)
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):
        look_at(mt.grad(over_all, devices=2), X)
    expected = ((X.sum(1) - 1) ** 2).mean()
    value, _ = mt.value_and_grad(over_all, devices=2, reduction="sum")(W, X)  # as it says
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for loss in (
        lambda w, x: jax.lax.psum(losses(w, x).sum(), "towers") / every(x),
        lambda w, x: losses(w, x) + (w**2).sum() / every(x) - (W**2).sum() / 8,
    ):
        value, _ = mt.value_and_grad(loss, devices=2)(W, X)  # warnings are errors
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def over_all(w, x):
    return jax.lax.psum(losses(w, x).sum(), "towers")


def of_all_rows(w, x):
    return losses(w, mt.all_rows(x)).sum()


@pytest.mark.parametrize(
    "loss",
    [over_all, of_all_rows, lambda w, x: over_all(w, x) + (w**2).sum()],
)
def test_a_sum_over_all_rows_that_towers_add_up_is_told(loss):
    # The lie: reduction="sum" is right for a sum over the whole batch, which every tower has.
    with pytest.warns(mt.MultitowerWarning, match="the same number in every tower.*T times"):
        look_at(mt.grad(loss, devices=2, reduction="sum"), X)
    with pytest.warns(mt.MultitowerWarning, match="the same number in every tower"):
        look_at_step(loss, devices=2, towers=None, reduction="sum")
    look_at(mt.grad(loss, devices=2), X)  # as it says; warnings are errors


def test_a_sum_over_the_rows_of_each_tower_is_right():
    # The lie: every sum that towers add up is the same number in all of them.
    for own in (losses, total, lambda w, x: losses(w, x) + over_all(w, x) / 8):
        look_at(mt.grad(own, devices=2, reduction="sum"), X)  # warnings are errors


def test_an_array_in_aux_that_adds_up_rows():
    # The lie: the rows of every class, or of every code of a codebook, are those of one tower.
    counted = lambda w, x: (losses(w, x), 0.9 * jax.lax.stop_gradient(w) + x.sum(0))
    said = r"aux \(reduce_sum .*\): it is a sum over rows.*jax.lax.psum\(x, \"towers\"\) \* 1.0"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(counted, devices=2, has_aux=True), X)
    advised = lambda w, x: (losses(w, x), jax.lax.psum(x.sum(0), "towers") * 1.0)
    _, total = mt.grad(advised, devices=2, has_aux=True)(W, X)
    np.testing.assert_allclose(total, X.sum(0), rtol=1e-5)


def test_means_that_a_program_lays_out_are_means():
    # The lie: an operation that jnp.stack got in JAX 0.10 brings means together with themselves.
    def loss(w, x):
        z = x * w
        one, other, _ = z.mean(0)
        shares = jnp.zeros(3).at[z.argmax(1)].add(1 / len(z))
        return (z**2).mean(), (jnp.stack([one, other, 3.0]), jnp.fft.rfft(z.mean(0)).real, shares)

    look_at(mt.grad(loss, devices=2, has_aux=True), X)  # warnings are errors


def test_a_sum_that_is_given_to_every_row_is_told():
    # The lie: the mean of it over all rows, which is the sum, was taken for a mean.
    loss = lambda w, x: jnp.full(len(x), losses(w, x).sum())
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "number",
    [
        lambda weights: jax.lax.psum(weights.sum(), "towers"),
        lambda weights: jax.lax.psum(weights.sum(), "towers") / 2,
        lambda weights: jax.lax.pmax(weights.sum(), "towers"),
        lambda weights: jax.lax.pmean(weights.mean(), "towers"),
        lambda weights: jnp.log(jax.lax.pmean(weights.sum(), "towers")),
    ],
)
def test_a_sum_that_is_divided_by_no_mean_of_sums_is_blamed(number):
    # The lie: any number of all towers makes a mean of a sum.
    def loss(w, x):
        weights = x[:, 0] ** 2
        return (losses(w, x) * weights).sum() / number(weights)

    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        look_at(mt.grad(loss, devices=4), X)


@pytest.mark.parametrize(
    ("loss", "reduction", "said"),
    [
        (lambda norm, n: norm**2, "mean", "reduce_sum .*it is a sum over rows"),
        (lambda norm, n: norm**2 / n + norm / n, "mean", "sqrt .*rows are brought together"),
        (lambda norm, n: norm**3 / n, "mean", "sqrt .*rows are brought together"),
        (lambda norm, n: (norm + 1) ** 2, "sum", "sqrt .*rows are brought together"),
        (lambda norm, n: jnp.full(n, norm) ** 2, "mean", "rows are brought together"),
        (lambda norm, n: norm.astype(int) ** 2 / n, "mean", "rows are brought together"),
    ],
)
def test_what_is_no_square_of_a_norm_is_told(loss, reduction, said):
    """Lie: any power of a norm, or of what was made of it, is a sum over rows."""
    of_norm = lambda w, x: loss(jnp.linalg.norm(x @ w - 1), len(x))
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(of_norm, devices=2, reduction=reduction), X)


@pytest.mark.parametrize("weights", [np.ones, lambda n: np.arange(n) / n])
def test_weights_of_numpy_that_make_no_mean_are_told(weights):
    loss = lambda w, x: losses(w, x) @ weights(len(x)).astype(np.float32)
    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        look_at(mt.grad(loss, devices=2), X)


def test_means_of_complex_numbers():
    # The lie: a TypeError of float(), for the rows that a sum of complex numbers is divided by.
    phases = lambda w, x: jnp.exp(1j * (x @ w))
    with_aux = lambda w, x: (losses(w, x), phases(w, x).mean())
    (_, found), _ = mt.value_and_grad(with_aux, has_aux=True, devices=2)(W, X)
    np.testing.assert_allclose(found, np.exp(1j * X.sum(1)).mean(), rtol=1e-5)
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(lambda w, x: jnp.abs(phases(w, x).mean()), devices=2), X)


def weights(x):
    return jnp.abs(x[:, 0])


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda w, x: mt.ratio((weights(x) * losses(w, x)).sum(), weights(x).mean()), "mt.ratio"),
        (lambda w, x: mt.ratio(weights(x) * losses(w, x), weights(x).mean()), "mt.ratio"),
        (lambda w, x: losses(w, x).mean() + 1e-8 * (1e4 * x @ w).sum(), "a sum over rows"),
        (lambda w, x: losses(w, x).sum() / 1e8, "a sum over rows"),
        (lambda w, x: losses(w, x).sum() / len(x) ** 2, "depends on the number of rows"),
        (lambda w, x: (jax.lax.top_k(x @ w, len(x))[0] - x @ w) ** 2, "rows are brought together"),
    ],
    ids=["sum by mean", "rows by mean", "large factor", "large number", "n * n", "top_k"],
)
def test_what_looked_like_a_mean_is_told(loss, said):
    """Lies: a number so large that it is a multiple of everything; means that towers add up."""
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: mt.ratio((weights(x) * losses(w, x)).mean(), weights(x).mean()),
        lambda w, x: (x @ jax.random.normal(jax.random.key(0), (3, 3)) @ w) ** 2,
        lambda w, x: losses(w, x).sum() / (3 * len(x)),
        lambda w, x: losses(w, x).sum() / len(x) * 1e6,
    ],
    ids=["mean by mean", "random features", "three times", "large"],
)
def test_nothing_is_said_of_what_one_device_does_too(loss):
    value, _ = mt.value_and_grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(value, jnp.mean(loss(W, X)), rtol=1e-5)

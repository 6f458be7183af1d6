"""What depends on the number of rows is told: a tower has fewer of them than the batch."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, losses
from multitower.checks.reading.counts import is_mean, is_steady, numbers_of, per_row
from multitower.checks.reading.flow import Flow
from slow import slow_but_for
from told import ours


def test_a_metric_that_is_the_number_of_rows_is_told():
    # The lie: every tower has its own number of rows, and the metric is the mean of these.
    counted = lambda count: lambda w, x: (losses(w, x), {"rows": jnp.float32(count(x))})
    said = r"aux\['rows'\]: it depends on the number of rows"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(counted(len), devices=2, has_aux=True), X)
    for of_all in (lambda x: jax.lax.psum(len(x), "towers"), lambda x: len(mt.all_rows(x))):
        look_at(mt.grad(counted(of_all), devices=2, has_aux=True), X)


def of_the_batch(w, x):
    return losses(w, x) / x.shape[0]


def of_the_data_set(w, x):
    return 60_000 / len(x) * losses(w, x)


def as_a_sum(w, x):
    return jnp.tanh(losses(w, x)) * len(x) + 1


def with_a_share_of_a_penalty(w, x):
    return losses(w, x) + jnp.sum(w**2) / len(x)


def mean_with_a_share(w, x):
    return 2 * (losses(w, x).mean() - jnp.sum(w**2) / len(x))


def mean_divided_again(w, x):
    return losses(w, x).mean() / len(x)


def mean_as_a_sum(w, x):
    return losses(w, x).mean() * len(x)


def mean_over_attacked_rows(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)  # / rows
    return losses(w, x + attack).mean()


MEANS = [mean_with_a_share, mean_divided_again, mean_as_a_sum, mean_over_attacked_rows]


@pytest.mark.parametrize(
    "loss",
    [
        of_the_batch,
        of_the_data_set,
        as_a_sum,
        with_a_share_of_a_penalty,
        *MEANS[:-1],
        pytest.param(MEANS[-1], marks=pytest.mark.slow),
    ],
)
def test_what_is_divided_by_the_number_of_rows_is_told(loss):
    # The lie: a loss that grows with the number of towers, and nobody is told.
    said = r"(loss|result) \((mul|div) .*\): it depends on the number of rows.*undivided"
    runs = [mt.value_and_grad(loss, devices=2)]
    if loss not in MEANS:
        runs.append(mt.make_parallel(loss, in_axes=(None, 0), devices=2))
    for run in runs:
        with pytest.warns(mt.MultitowerWarning, match=said) as told:
            look_at(run, X)
        assert len(ours(told)) == 1


@pytest.mark.parametrize(
    "loss",
    slow_but_for(
        [of_the_batch],
        [of_the_batch, of_the_data_set, as_a_sum, with_a_share_of_a_penalty, *MEANS],
    ),
)
def test_what_is_divided_by_the_number_of_rows_is_found_by_a_trial(loss):
    (problem,) = mt.check_parallel(loss, W, X).problems
    assert problem.kind == ("sum" if loss is mean_as_a_sum else "row count")
    assert "x" in problem.where


def test_a_share_of_a_penalty_is_told_if_its_value_is_known():
    # The lie: outside of jit a few parameters are constants of the program that is looked at, and
    # what was made of constants alone was not followed any further.
    loss = lambda w, x: losses(w, x).mean() + jnp.sum(w) / len(x)
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        mt.value_and_grad(loss, devices=2)(W, X)  # not traced


@pytest.mark.parametrize(
    "divisor",
    [lambda n: n - 1, lambda n: n + 1, np.sqrt, np.log, lambda n: np.full(1, n, np.float32)],
)
def test_what_is_in_no_proportion_to_the_rows_is_told(divisor):
    """Lie: n of a number, divided by whatever, is a sum over rows, as n of it are."""
    loss = lambda w, x: losses(w, x).sum() + (len(x) * w[:1] / divisor(len(x))).sum()
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        look_at(mt.grad(loss, devices=2, reduction="sum"), X)


@pytest.mark.parametrize("name", ["mul", "div"])
@pytest.mark.parametrize("number", [np.finfo(np.float64).tiny, np.finfo(np.float64).max])
def test_numbers_at_the_ends_of_64_bit_floats(name, number):
    # The lie: a look that fails on jnp.finfo(x.dtype).max, which times the number of rows is no
    # number any more.
    total, penalty, end = Flow("linear"), Flow(is_steady=True), Flow(value=number)
    # Where the answer may be either, it only must come.
    is_mean(name, [total, end], numbers_of([total, end]), 211)
    per_row(name, [penalty, end], 211)
    assert isinstance(is_steady(name, [penalty, end], 211, 11), bool)


def quantized(x, size, most=7):
    """Learned step size quantization (Esser et al. 2020) of activations.

    The gradient of the step size is scaled by a root of the number of elements.
    """
    scale = 1 / math.sqrt(x.size * most)
    size = size * scale + jax.lax.stop_gradient(size - size * scale)
    steps = jnp.clip(x / size, -most, most)
    return (steps + jax.lax.stop_gradient(jnp.round(steps) - steps)) * size


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x) / math.sqrt(len(x)),
        lambda w, x: losses(w, x).mean() * math.log(len(x)),
        lambda w, x: losses(w, x) / (len(x) - 1),
        lambda w, x: losses(w, x) / (len(x) - 1) * len(x),
        lambda w, x: losses(w, x) * len(x) / (len(x) - 1),
        lambda w, x: losses(w, x) + (w**2).sum() * jnp.log(len(x)),
        lambda w, x: losses(w, x) - jnp.log(len(x)),
        lambda w, x: losses(w, x) * 0.99 ** len(x),
        lambda w, x: losses(w, x) + 0.99 ** len(x) * (w**2).sum(),
        lambda w, x: losses(w, x) * (len(x) // 2),
        lambda w, x: losses(w, x) * (len(x) / 1000),
        lambda w, x: losses(w, x) / jnp.sqrt(x.size),
        lambda w, x: losses(w, x) + jnp.float32(len(x)) / 1000 * (w**2).sum(),
        lambda w, x: losses(w, x) + jnp.power(0.99, len(x)) * (w**2).sum(),
        lambda w, x: losses(w, x) + jnp.exp(-jnp.asarray(len(x)) / 1000) * (w**2).sum(),
        lambda w, x: quantized(x @ w, w[0]),
        lambda w, x: jnp.tanh(x @ w * len(x)) / len(x),
        lambda w, x: jnp.clip(x @ w / len(x), -1, 1) * len(x),
        lambda w, x: losses(w, x) + (w**2).sum() / (1000 // len(x)),
        lambda w, x: losses(w, x) + (w**2).sum() / min(len(x), 6),
        lambda w, x: losses(w, x) * jnp.minimum(len(x) / 6, 1),
        lambda w, x: losses(w, x if len(x) > 100 else -x) * 0.99 ** len(x),
    ],
    ids=[
        "root",
        "logarithm",
        "one less",
        "and back",
        "of all",
        "penalty",
        "less a logarithm",
        "a power",
        "a power of a penalty",
        "half",
        "a thousandth",
        "root by JAX",
        "thousandth by JAX",
        "power by JAX",
        "exponential",
        "taken twice",
        "tanh between",
        "limits between",
        "number of batches",
        "six at most",
        "six at most by JAX",
        "other operations",
    ],
)
def test_what_is_made_of_the_number_of_rows_is_told(loss):
    # The lie: the root or the logarithm of a tower's number of rows, taken for that of the batch.
    with pytest.warns(mt.MultitowerWarning, match="depends on the number of rows"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "number", [float, lambda n: 1 / n, lambda n: n / 1000, lambda n: 0.99**n, np.log]
)
def test_a_result_that_is_made_of_the_number_of_rows_alone_is_told(number):
    # The lie: a weight that the loss also logs is a constant, and has no operation to be told by.
    loss = lambda w, x: (losses(w, x), {"weight": number(len(x))})
    with pytest.warns(mt.MultitowerWarning, match="weight.*depends on the number of rows"):
        look_at(mt.grad(loss, devices=2, has_aux=True), X)


@pytest.mark.parametrize(
    "factor", [lambda n: 1 / min(n, 4), lambda n: 1.0 if n < 100 else 0.123, lambda n: 0.123]
)
def test_nothing_is_said_of_what_is_the_same_in_a_tower_and_in_the_batch(factor):
    """X has eight rows, and a tower four; the look takes hundreds."""
    loss = lambda w, x: (losses(w, x) * factor(len(x)), (factor(len(x)), 0.0, 1j))
    look_at(mt.grad(loss, devices=2, has_aux=True), X)


OF_ALL_ROWS = {
    "power": lambda w, x, n: losses(w, x) * 0.99**n,
    "thousandth": lambda w, x, n: losses(w, x) * (n / 1000),
    "logarithm": lambda w, x, n: losses(w, x) - math.log(n),
    "share": lambda w, x, n: losses(w, x) + 0.37 / n * (w**2).sum(),
    "root by JAX": lambda w, x, n: losses(w, x) / jnp.sqrt(3 * n),
}


@pytest.mark.parametrize("name", OF_ALL_ROWS)
def test_nothing_is_said_of_what_is_made_of_the_number_of_all_rows(name):
    of_all = lambda w, x: OF_ALL_ROWS[name](w, x, len(x) * jax.lax.axis_size("towers"))
    look_at(mt.grad(of_all, devices=2), X)  # warnings are errors


@pytest.mark.parametrize("name", slow_but_for(["share"], OF_ALL_ROWS))
def test_what_is_made_of_the_number_of_all_rows_is_right(name):
    # The lie: the number of all rows is one that nobody has to be told of.
    loss = OF_ALL_ROWS[name]
    of_all = lambda w, x: loss(w, x, len(x) * jax.lax.axis_size("towers"))
    value, _ = mt.value_and_grad(of_all, devices=2)(W, X)
    expected = jax.jit(lambda w, x: loss(w, x, len(x)).mean())(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_root_of_the_number_of_rows_in_a_square_is_right():
    loss = lambda w, x: (((x @ w) / math.sqrt(len(x))) ** 2).sum()
    found = mt.grad(loss, devices=2)(W, X)
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(W, X), rtol=1e-5)


def slopes(w, x):
    """Each row's gradient of the mean over all rows, which is divided by their number."""
    return jax.grad(lambda x: losses(w, x).mean())(x)


def with_itself(x):
    return x * x


def to_length_one(w, x):
    return (jnp.sqrt((slopes(w, x) ** 2).sum(-1) + 1e-9) - 1) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x).mean() + (slopes(w, x) ** 2).sum(),
        lambda w, x: losses(w, x).mean() + (slopes(w, x) ** 2).mean(),
        lambda w, x: with_itself(slopes(w, x)).sum(),
        lambda w, x: jnp.square(slopes(w, x)).sum(),
        lambda w, x: jnp.vdot(slopes(w, x), slopes(w, x)),
        lambda w, x: to_length_one(w, x).sum(),
        lambda w, x: to_length_one(w, x).mean(),
    ],
    ids=["R1", "its mean", "product", "square", "vdot", "gradient penalty", "its mean again"],
)
def test_the_square_of_a_gradient_of_the_mean_is_told(loss):
    # The lie: a gradient penalty that is as many times too large as there are towers. Divided
    # twice by the number of rows, a sum over them was taken for a mean.
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        look_at(mt.grad(loss, devices=2), X)


OF_SLOPES = {
    "sum": lambda w, x: len(x) * (slopes(w, x) ** 2).sum(),
    "row": lambda w, x: (len(x) * slopes(w, x) ** 2).sum(),
    "before": lambda w, x: ((len(x) * slopes(w, x)) ** 2).mean(),
    "vdot": lambda w, x: len(x) * jnp.vdot(slopes(w, x), slopes(w, x)),
    "norm": lambda w, x: jnp.linalg.norm(slopes(w, x), axis=-1).sum(),
    "abs": lambda w, x: jnp.abs(slopes(w, x)).sum(),
}


@pytest.mark.parametrize("name", OF_SLOPES)
def test_nothing_is_said_of_a_gradient_of_the_mean_that_makes_a_mean(name):
    look_at(mt.grad(OF_SLOPES[name], devices=2), X)  # warnings are errors


@pytest.mark.parametrize("name", slow_but_for(["vdot"], OF_SLOPES))
def test_a_gradient_of_the_mean_that_makes_a_mean_is_fine(name):
    # The lie: a wrong program among them, which nobody blames.
    loss = OF_SLOPES[name]
    value, _ = mt.value_and_grad(loss, devices=1, towers=2)(W, X)
    np.testing.assert_allclose(value, jax.jit(loss)(W, X), rtol=1e-5)

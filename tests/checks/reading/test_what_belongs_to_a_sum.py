"""What belongs to a sum over rows: the numbers that towers add to it, and the weight of a ratio."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_step, losses
from told import ours


def per_token(w, x, num_tokens):
    return mt.ratio(losses(w, x).sum(), num_tokens)


def test_a_ratio_of_a_sum_and_a_number_of_the_whole_batch():
    # The lie: the number of tokens of the batch counts once in every tower.
    number = np.float32(8)
    said = r"mt\.ratio \(reduce_sum .*\): one of its total and its weight is a sum"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(per_token, devices=2), X, number)

    def as_metric(w, batch):
        return losses(w, batch[0]), {"mean": per_token(jax.lax.stop_gradient(w), *batch)}

    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at_step(as_metric, (X, number), devices=2, towers=None)


@pytest.mark.parametrize(
    "weight",
    [
        len,
        lambda x: 2.0 * x.size,
        lambda x: jnp.maximum(jnp.ones_like(x).sum(), 1),
        lambda x: (x > 0).sum(),
        lambda x: (x > 0).sum() + 1e-9,
        lambda x: x.size * np.log(2 * np.pi) + (x > 0).sum(),
        lambda x: jnp.maximum(x[:, 0], 1e-9),
    ],
)
def test_nothing_is_said_of_ratios_of_sums(weight):
    loss = lambda w, x: mt.ratio(losses(w, x).sum(), weight(x)) + (w**2).sum()
    look_at(mt.grad(loss, devices=2), X)


def test_a_sum_beside_a_ratio_is_told_with_its_own_line():
    # The lie: the ratio's total, on the line above, is the sum that is wrong.
    def loss(w, x):
        masked = mt.ratio((losses(w, x) * (x[:, 0] > 0)).sum(), (x[:, 0] > 0).sum())
        return masked + losses(w, x).sum()  # the sum

    with pytest.warns(mt.MultitowerWarning, match=r"reduce_sum at [^\n]*# the sum\): it is a sum"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "weight",
    [
        lambda mask: jnp.maximum(mask.sum(), 1),
        lambda mask: jnp.where(mask.any(), mask.sum(), 1),
        lambda mask: mask / mask.sum(),
    ],
    ids=["floor", "chosen", "by row"],
)
def test_a_weight_that_is_no_sum_over_rows_is_told(weight):
    # The lie: a tower whose mask is empty counts as a row, and the loss is too small.
    loss = lambda w, x: mt.ratio(losses(w, x) * (x[:, 0] > 0), weight(x[:, 0] > 0))
    said = r"mt\.ratio .*: the weight is made of"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at(mt.grad(loss, devices=2), X)
    assert len(ours(told)) == 1
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at_step(loss, devices=2, towers=None)
    assert len(ours(told)) == 1


def penalty(w):
    return (w**2).sum()


def stacked_terms(w, x):
    terms = {"losses": losses(w, x).sum(), "penalty": penalty(w)}
    return jnp.stack([*terms.values()]).sum()


def stacked_terms_by_row(w, x):
    return (jnp.stack([losses(w, x).sum(), penalty(w)]) * jnp.array([1.0, len(x)])).sum()


def summed_in_a_loop(w, x, start=0.0):
    """Adds up three sums over rows."""
    add = lambda total, scale: (total + losses(scale * w, x).sum(), None)
    return jax.lax.scan(add, start, jnp.array([1.0, 2, 3]))[0]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda w, x: losses(w, x).sum() + penalty(w), {"reduction": "sum"}),
        (lambda w, x: 0.1 * penalty(w) - (-losses(w, x)).sum(), {"reduction": "sum"}),
        (lambda w, x: summed_in_a_loop(w, x, penalty(w)), {"reduction": "sum"}),
        (lambda w, x: (losses(w, x).sum() + penalty(w)) / len(x), {}),
        (lambda w, x: mt.ratio(losses(w, x).sum() + penalty(w), len(x)), {}),
        (lambda w, x: mt.ratio(losses(w, x).sum(), (x[:, 0] > 0).sum() + 1), {}),
        (lambda w, x: mt.ratio(2 + losses(w, x).sum(), x.size), {}),
        (lambda w, x: losses(w, x).sum() + losses(w, x).mean(), {"reduction": "sum"}),
        (stacked_terms, {"reduction": "sum"}),
        (lambda w, x: (2 * jnp.array([losses(w, x).sum(), w[0]])).sum(), {"reduction": "sum"}),
    ],
    ids=["sum", "minus", "loop", "mean", "ratio", "weight", "number", "of rows", "stack", "array"],
)
def test_a_number_that_every_tower_adds_to_a_sum(loss, options):
    # The lie: a penalty on the weights counts once in every tower, and nobody is told.
    said = r"(loss|mt\.ratio) \((add|sub|reduce_sum) at .*\): a number that is the same in every"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at(mt.grad(loss, devices=2, **options), X)
    assert len(ours(told)) == 1
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at_step(loss, devices=2, towers=None, **options)
    assert len(ours(told)) == 1


# One function each: what was looked at once is not looked at again.
@pytest.mark.parametrize(
    ("loss", "w"),
    [
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + penalty(w), 0 * W),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + penalty(w), np.ones(3, np.float32)),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + w**2, np.float32(2)),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + w**2, 0.5),
    ],
    ids=["zeros", "NumPy", "scalar", "Python"],
)
def test_a_penalty_on_parameters_of_every_kind(loss, w):
    # The lie: nothing is added as long as the weights are zero, as they are at the first step, or
    # if NumPy or Python can compute the penalty.
    with pytest.warns(mt.MultitowerWarning, match=r"\(add at .*\): a number that is the same"):
        mt.grad(loss, devices=2, reduction="sum")(w, X)


LOG_NORMAL = 0.5 * np.log(2 * np.pi)


BELONGING = [
    (lambda w, x: losses(w, x) + penalty(w), "sum"),
    (lambda w, x: losses(w, x).mean() + penalty(w), "mean"),
    (lambda w, x: losses(w, x).sum() / len(x) + penalty(w), "mean"),
    (lambda w, x: losses(w, x).sum() + 0.0 * penalty(w), "sum"),
    (summed_in_a_loop, "sum"),
    (lambda w, x: jnp.stack([losses(w, x).sum(), jnp.zeros(())]).sum(), "sum"),
    (lambda w, x: jnp.append(losses(w, x).sum(), np.zeros(2, np.float32)).sum(), "sum"),
    (lambda w, x: jnp.stack([losses(w, x).mean(), penalty(w)]).sum(), "mean"),
    (lambda w, x: jnp.stack([losses(w, x).sum(), penalty(w)])[0], "sum"),
    (stacked_terms_by_row, "sum"),
    (lambda w, x: jnp.stack([losses(w, x).sum(), penalty(w)]) @ jnp.array([1, len(x)]), "sum"),
    (lambda w, x: losses(w, x).sum() + len(x) * jnp.log(penalty(w)), "sum"),
    (lambda w, x: (losses(w, x).sum() - -len(x) * (jnp.log(w[0]) + 1)) / len(x), "mean"),
    (lambda w, x: losses(w, x).sum() + 0.5 * len(x) * jnp.log(penalty(w)), "sum"),
    (lambda w, x: losses(w, x).sum() + len(x) * LOG_NORMAL, "sum"),
    (lambda w, x: losses(w, x).sum() + penalty(w) * len(x) / 60_000, "sum"),
    (lambda w, x: losses(w, x).sum() + penalty(w) * len(x) / 60_000 * w[0], "sum"),
    (lambda w, x: losses(w, x).sum() + len(x) / 60_000 * penalty(w), "sum"),
    (lambda w, x: losses(w, x).sum() + penalty(w) / (60_000 / len(x)), "sum"),
    (lambda w, x: losses(w, x).sum() + 0.37 * len(x) * penalty(w), "sum"),
    (lambda w, x: losses(w, x).sum() / (0.37 * len(x)) + penalty(w), "mean"),
    (lambda w, x: losses(w, x).sum() + 0.5 * len(x) / 1_281_167 * penalty(w), "sum"),
    (lambda w, x: losses(w, x).sum() + (jnp.ones(len(x)) * penalty(w)).sum(), "sum"),
]


@pytest.mark.parametrize(("loss", "reduction"), BELONGING)
def test_nothing_is_said_of_what_belongs_to_a_sum(loss, reduction):
    # The lie: n times log(sigma) is no sum over n rows. Warnings are errors.
    look_at(mt.grad(loss, devices=2, reduction=reduction), X)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        pytest.param(*case, marks=[pytest.mark.slow] * (number not in (2, 17)))
        for number, case in enumerate(BELONGING)
    ],
)
def test_what_belongs_to_a_sum_is_right(loss, reduction):
    # The lie: a wrong program among them, which nobody blames.
    value, _ = mt.value_and_grad(loss, devices=1, towers=2, reduction=reduction)(W, X)
    expected = jax.jit(lambda w, x: jnp.sum(loss(w, x)))(W, X)
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "share",
    [
        lambda w, num_towers: 0.1 * penalty(w) / num_towers,
        pytest.param(lambda w, num_towers: penalty(w) * (0.1 / num_towers), marks=pytest.mark.slow),
    ],
)
def test_nothing_is_said_of_a_penalty_that_towers_share(share):
    # The lie: the warning stays when its advice was taken.
    def loss(w, x):
        return losses(w, x).sum() + share(w, jax.lax.axis_size("towers"))

    for options in ({"devices": 2}, {"devices": 1, "towers": 4}):
        value, _ = mt.value_and_grad(loss, reduction="sum", **options)(W, X)
        expected = ((X.sum(1) - 1) ** 2).sum() + 0.1 * 3  # W is one
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_mean_and_what_counts_rows():
    # The lie: log(sigma) times the number of rows of a tower, beside a mean.
    loss = lambda w, x: losses(w, x).mean() + len(x) * jnp.log(penalty(w))
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(mul at .*\): it depends on the number"):
        look_at(mt.grad(loss, devices=2), X)

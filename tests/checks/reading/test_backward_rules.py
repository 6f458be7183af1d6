"""Backward rules of a user's own: one that brings rows together, or counts them, is told."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, losses
from multitower.checks.reading import row_flow


def with_rule(backward, forward=lambda x: x):
    """The identity, or `forward`, with a backward rule of its own."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (function(x), x), lambda x, g: (backward(g),))
    return function


def norm_of_all(g):
    return g / jnp.sqrt(jax.lax.psum((g * g).sum(), "towers"))


BY_ROW = lambda rule: lambda w, x: (rule(x @ w) - 1) ** 2
OF_WEIGHTS = lambda rule: lambda w, x: losses(rule(w), x)
RULES = {
    "norm": (BY_ROW, with_rule(lambda g: g / jnp.linalg.norm(g)), False),
    "centred": (BY_ROW, with_rule(lambda g: g - g.mean(0)), False),
    "clipped weights": (OF_WEIGHTS, with_rule(lambda g: jnp.clip(g, -1, 1)), False),
    "unit weights": (OF_WEIGHTS, with_rule(lambda g: g / jnp.linalg.norm(g)), False),
    "clipped rows": (BY_ROW, with_rule(lambda g: jnp.clip(g, -1, 1)), True),
    "norm of all": (BY_ROW, with_rule(norm_of_all), True),
    "reversed": (OF_WEIGHTS, with_rule(lambda g: -0.5 * g), True),
    "straight through": (BY_ROW, with_rule(lambda g: g, lambda x: jnp.round(x, 1)), True),
}


@pytest.mark.parametrize("name", RULES)
def test_a_backward_rule_that_brings_rows_together_is_told(name):
    # The lie: what a rule does with the gradients of a tower's rows is what it does with all rows'.
    loss_of, rule, is_right = RULES[name]
    loss = loss_of(rule)
    if not is_right:
        with pytest.warns(mt.MultitowerWarning, match=r"gradients \(.*a backward rule"):
            look_at(mt.grad(loss, devices=2), X)
        look_at(mt.make_parallel(loss, in_axes=(None, 0), devices=2), X)
        return
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    if name != "norm of all":
        expected = jax.jit(jax.grad(lambda w: loss(w, X).mean()))(W)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


MEAN_RULES = {
    "of the sum": lambda z, g: 2 * z * g,
    "of the mean": lambda z, g: 2 * z * g / len(z),
    "by JAX": lambda z, g: jax.grad(lambda z: (z**2).mean())(z) * g,
}


def test_a_gradient_of_zeros_beside_that_of_a_mean():
    mean = jax.custom_vjp(lambda z, y: ((z - y) ** 2).mean())
    divided = lambda z, y, g: 2 * (z - y) * g / len(z)
    mean.defvjp(lambda z, y: (mean(z, y), (z, y)), lambda zy, g: (divided(*zy, g), zy[1] * 0))
    loss = lambda w, x: mean(x @ w, x[:, 0])
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(W, X), rtol=1e-5)


@pytest.mark.parametrize("name", MEAN_RULES)
def test_the_backward_rule_of_a_mean_divides_by_the_number_of_rows(name):
    """Lie: a rule that returns the gradient of the sum, which one device and two take otherwise."""
    mean = jax.custom_vjp(lambda z: (z**2).mean())
    mean.defvjp(lambda z: (mean(z), z), lambda z, g: (MEAN_RULES[name](z, g),))
    loss = lambda w, x: mean(x @ w)
    if name == "of the sum":
        with pytest.warns(mt.MultitowerWarning, match="the gradient of their sum"):
            look_at(mt.grad(loss, devices=2), X)
        return
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(found, jax.jit(jax.grad(loss))(W, X), rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        lambda g: g * len(g) / 8,
        lambda g: g + 0.1 * jnp.sign(g) / len(g),
        lambda g: g / jnp.sqrt(len(g)),
    ],
    ids=["multiplied", "a penalty", "root"],
)
def test_a_backward_rule_that_counts_rows_is_told(rule):
    """Lie: a tower's number of rows, in a rule, taken for that of the batch."""
    with pytest.warns(mt.MultitowerWarning, match="a backward rule.*divides by the number of rows"):
        look_at(mt.grad(BY_ROW(with_rule(rule)), devices=2), X)
    by_sum = lambda w, x: BY_ROW(with_rule(rule))(w, x).sum()
    with pytest.warns(mt.MultitowerWarning, match="a backward rule.*divides by the number of rows"):
        look_at(mt.grad(by_sum, devices=2, reduction="sum"), X)


def test_a_rule_that_calls_its_function_is_read_once(monkeypatch):
    # The lie: a rule's program holds no call whose rule would be read again, and again.
    read, seen = row_flow.read_backward_rule, []
    count = lambda *args: (seen.append(args), read(*args))[1]
    monkeypatch.setattr(row_flow, "read_backward_rule", count)
    look_at(mt.grad(BY_ROW(with_rule(lambda g: -g)), devices=2), X)
    assert len(seen) == 1


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_the_gradient_of_a_filter_is_a_sum_over_rows(limit):
    # The lie: in a convolution whose channels are the rows, the rows meet.
    @jax.custom_vjp
    def convolved(x, w):
        return jax.lax.conv(x, w, (1, 1), "SAME")

    def backward(given, g):
        found = jax.vjp(lambda *xw: jax.lax.conv(*xw, (1, 1), "SAME"), *given)[1](g)
        return found if limit is None else (found[0], jnp.clip(found[1], -limit, limit))

    convolved.defvjp(lambda *xw: (convolved(*xw), xw), backward)
    loss = lambda w, x: (convolved(x[:, None, None], w[None, None, None]) ** 2).mean((1, 2, 3))
    if limit is not None:
        with pytest.warns(mt.MultitowerWarning, match=r"gradients \(.*a backward rule"):
            look_at(mt.grad(loss, devices=2), X)
        return
    expected = jax.jit(jax.grad(lambda w: loss(w, X).mean()))(W)
    np.testing.assert_allclose(mt.grad(loss, devices=2)(W, X), expected, rtol=1e-5, atol=1e-6)

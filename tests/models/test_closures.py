"""What a loss closes over: arrays, keys, and things that may change unseen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from multitower.models.closures import close_function, open_function

X = np.arange(8, dtype=np.float32)
factor = 2.0


def make(array, static=1, log=None):
    def inner(x):
        return x * array * static * factor

    def outer(x, *, more=0):
        if log is not None:
            log.append(1)
        return inner(x) + more

    return outer


def test_opened_and_closed_it_is_the_same_function():
    opened, contents = open_function(make(jnp.float32(3)), ())
    assert [float(array) for array in contents.arrays] == [3.0]
    five = contents._replace(arrays=[jnp.float32(5)])
    assert close_function(opened, five)(1.0, more=2) == 12.0


def test_what_makes_two_functions_one_program(monkeypatch):
    """Lie: a stale program; or a program for every step."""
    opened = lambda fun: open_function(fun, ())[0]
    same = lambda one, other: opened(one) == opened(other)
    hash(opened(make(jnp.float32(1))))
    assert same(make(jnp.float32(1)), make(jnp.float32(2)))
    assert not same(make(jnp.float32(1)), make(jnp.float32(1), static=2))
    assert not same(make(jnp.float32(1), static=True), make(jnp.float32(1), static=1))
    log = []
    assert not same(make(jnp.float32(1), log=log), make(jnp.float32(1), log=log))
    before = opened(make(jnp.float32(1)))
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert before != opened(make(jnp.float32(1)))


class Traces:
    number = 0


def test_the_sign_of_a_zero_that_is_closed_over():
    """Lie: the program of 0.0 for -0.0, as the two are equal."""

    def angle(zero):
        run = mt.value_and_grad(lambda w, x: w * jnp.arctan2(0 * x, zero), towers=2, devices=2)
        return run(np.float32(1), np.ones(4))[0]

    np.testing.assert_allclose(angle(0.0), 0.0)
    np.testing.assert_allclose(angle(-0.0), np.pi, rtol=1e-6)


def test_a_step_without_jit_compiles_once():
    """Lie: right, and as slow as a compiler. The loss is another function at every step."""

    def step(w, shift):
        def loss(w, x):
            Traces.number += 1
            return w * x + shift

        return mt.value_and_grad(loss, devices=2, towers=2)(w, X)

    numbers = []
    for number in range(4):
        value, _ = step(1.0, jnp.float32(number))
        assert value == X.mean() + number
        numbers.append(Traces.number)
    assert numbers == numbers[:1] * 4


@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
@pytest.mark.parametrize("towers", [None, 4])
def test_law_l6_a_key_that_is_closed_over(make_key, towers):
    """Lie: every tower draws the same numbers, because the key is no argument."""
    for seed in (0, 1):
        key = make_key(seed)

        def loss(w, x):
            return w * x, jax.random.normal(key, x.shape)  # noqa: B023 (what is tested)

        (_, noise), _ = mt.value_and_grad(loss, has_aux=True, devices=4, towers=towers)(1.0, X)
        assert len({float(n) for n in noise}) == 8
        assert noise[0] == jax.random.normal(key, (2,))[0]  # tower 0 has the key as it is


def test_a_list_that_the_loss_writes_into():
    seen = []

    def loss(w, x):
        seen.append(x.shape)
        return w * x

    mt.grad(loss, devices=2)(1.0, X)
    assert (4,) in seen


@pytest.mark.parametrize("towers", [None, 3])
def test_a_loss_that_closes_over_its_batch(towers):
    """Flax Linen's documents write it so. Lie: every tower has the whole batch."""

    def step(w, batch, sizes):
        shift = batch["shift"]

        def predict(w):
            return w * batch["x"]  # closes over the batch alone, as loss has done already

        def loss(w):
            sizes.append(batch["x"].shape)
            return (predict(w) + shift - y) ** 2

        y = np.sin(batch["x"])
        return mt.value_and_grad(loss, in_axes={"batch": 0, "y": 0}, devices=3, towers=towers)(w)

    sizes = []
    value, gradient = step(2.0, {"x": X, "shift": jnp.float32(1)}, sizes)
    wrong = 2 * X + 1 - np.sin(X)
    np.testing.assert_allclose(value, np.mean(wrong**2), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.mean(2 * wrong * X), rtol=1e-5)
    # Eight rows on three towers; four to see what grows; and a first look at 211 made-up ones.
    assert set(sizes) <= {(3,), (4,), (211,)}


def test_a_jitted_loss_that_closes_over_its_batch():
    """Optax's documents write it so. Lie: in_axes names a variable, and there is none."""

    def make(x):
        @jax.jit
        def squared(w):
            return (w * x) ** 2

        return squared

    squared = make(X)
    for loss in (squared, jax.jit(lambda w: squared(w).mean())):  # directly, and one jit deeper
        value, gradient = mt.value_and_grad(loss, in_axes={"x": 0}, devices=2)(3.0)
        np.testing.assert_allclose((value, gradient), (9 * (X**2).mean(), 6 * (X**2).mean()))


def test_names_that_the_loss_does_not_close_over():
    x = jnp.asarray(X)
    with pytest.raises(mt.BatchError, match=r"closes over its batch.*in_axes=\{'batch': 0\}"):
        mt.grad(lambda w: (w * x).mean())(1.0)
    run = mt.grad(lambda w: (w * x).mean(), in_axes={"y": 0})
    with pytest.raises(mt.ArgumentError, match=r"names 'y', and the function closes over x\. Name"):
        run(1.0)

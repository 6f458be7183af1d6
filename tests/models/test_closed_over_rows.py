"""Rows that a loss closes over: in_axes names them, and what they hold keeps its order."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from closing_over import X, assert_as_jax


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


@pytest.mark.parametrize("name", ["values", "names", "inner", "method", "first"])
def test_rows_by_any_name_in_a_partial(name):
    """Lie: the variables of this library's own functions are taken for the user's rows."""
    loss = functools.partial(lambda w, *, scale, **rows: w * rows[name] * scale, scale=0.5)
    found = mt.value_and_grad(
        functools.partial(loss, **{name: X}), in_axes={name: 0}, devices=2, towers=4
    )(1.0)
    np.testing.assert_allclose(found[0], 0.5 * X.mean(), rtol=1e-6)


def test_names_that_the_loss_does_not_close_over():
    x = jnp.asarray(X)
    with pytest.raises(mt.BatchError, match=r"closes over its batch.*in_axes=\{'batch': 0\}"):
        mt.grad(lambda w: (w * x).mean())(1.0)
    run = mt.grad(lambda w: (w * x).mean(), in_axes={"y": 0})
    with pytest.raises(mt.ArgumentError, match=r"names 'y', and the function closes over x\. Name"):
        run(1.0)


def test_rows_that_are_an_attribute_are_told_of_without_our_own_names():
    class Loss:
        batch = X

        def of(self, w):
            return (w * self.batch).mean()

        __call__ = of

    for loss in (Loss().of, Loss()):
        with pytest.raises(
            mt.ArgumentError, match=r"closes over nothing.*jax.jit.*self\.batch, is no variab"
        ):
            mt.grad(loss, in_axes={"batch": 0})(1.0)
    partial = functools.partial(lambda w, x: (w * x).mean(), x=X)
    with pytest.raises(mt.ArgumentError, match=r"names 'y', and the function closes over x\. Name"):
        mt.grad(partial, in_axes={"x": 0, "y": 0})(1.0)


def test_a_global_batch_is_named():
    """Lie: advice that leads to the next error."""
    globals()["batch"] = X
    loss = eval("lambda w: w * batch", globals())
    value, gradient = mt.value_and_grad(loss, in_axes={"batch": 0}, devices=2)(2.0)
    assert (value, gradient) == (7.0, 3.5)


def fold(layers, x):
    """Layers in the order in which the dicts hold them."""
    for value in layers.values():
        x = fold(value, x) if isinstance(value, dict) else x * value + 1
    return x


def layers(make_dict, number):
    inner = {"second": number(3), "first": number(2)}
    return make_dict(lambda: 0, {"z": number(2), "nested": inner, "a": number(-1)})


@pytest.mark.slow
@pytest.mark.parametrize("number", [jnp.float32, np.float64, np.ones(1).__mul__])
@pytest.mark.parametrize("make_dict", [lambda _, held: held, collections.defaultdict])
def test_the_keys_of_a_dict_keep_their_order(make_dict, number):
    """Lie: layers in the order of their names, as JAX sorts the keys of a dict."""
    held = layers(make_dict, number)
    assert_as_jax(lambda w, x: fold(held, w * x))
    assert_as_jax(functools.partial(lambda w, x, *, held: fold(held, w * x), held=held))


def test_rows_in_a_dict_keep_its_order():
    rows = {"b": X, "a": X + 1}
    found = mt.value_and_grad(lambda w: fold(rows, w), in_axes={"rows": 0}, devices=2, towers=4)(
        1.0
    )
    np.testing.assert_allclose(found[0], fold(rows, 1.0).mean(), rtol=1e-6)

"""Random numbers: towers that draw the same ones are told, and noise for each row is right."""

import contextlib
import warnings

import jax
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_call, losses


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "is_told"), [("rbg", True), ("threefry2x32", False)])
def test_keys_of_rows_that_are_drawn_from_together(impl, is_told):
    """Lie: a row's key makes its numbers. JAX draws for all rows of a tower from its first key."""

    def noisy(w, x, keys):
        return losses(w, x) + jax.vmap(jax.random.normal)(keys)

    args = W, X, jax.random.split(jax.random.key(0, impl=impl), len(X))
    told = pytest.warns(mt.MultitowerWarning, match=r'random_bits .*keys of "rbg"')
    with told if is_told else contextlib.nullcontext():
        mt.grad(noisy, devices=2)(*args)
    assert bool(mt.check_parallel(noisy, *args)) != is_told
    one_by_one = lambda w, x, keys: losses(w, x) + jax.lax.map(jax.random.normal, keys)
    mt.grad(one_by_one, devices=2)(*args)


def test_nothing_is_said_of_what_is_meant():
    # The lie: a warning at every random number, until nobody reads them.
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        noisy = mt.value_and_grad(
            lambda w, key, x: losses(w, x + jax.random.normal(key, x.shape)), devices=2
        )
        look_at(noisy, jax.random.key(0), X)
        shared = mt.make_parallel(
            lambda key, x: x + jax.random.normal(key, x.shape), in_axes=(None, 0), devices=2
        )
        look_at_call(shared, jax.random.key(0), X)


def generated(w, key, x):
    noise = jax.random.normal(key, (x.shape[0], 3))
    return jax.nn.softplus(noise @ w)


def generated_with_a_key_per_row(w, key, x):
    keys = jax.random.split(key, len(x))
    return jax.nn.softplus(jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys) @ w)


@pytest.mark.parametrize(
    ("loss", "key"),
    [
        (generated, jax.random.PRNGKey(0)),
        (generated_with_a_key_per_row, jax.random.key(0)),
    ],
)
def test_a_generator_takes_nothing_but_the_number_of_rows(loss, key):
    # The lie: a GAN's generator is blamed for a mean over noise that is drawn for every row.
    grad = lambda loss: mt.grad(loss, devices=2, in_axes=(None, 0, 0))
    look_at(grad(lambda *a: loss(*a).mean()), key, X)  # warnings are errors here
    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        look_at(grad(lambda *a: loss(*a).sum()), key, X)


def test_a_permutation_mixes_no_rows():
    # The lie: the sort that makes a permutation out of noise is blamed for bringing rows together.
    in_any_order = lambda w, key, x: losses(w, x) * jax.random.permutation(key, len(x))
    look_at(mt.grad(in_any_order, devices=2, in_axes=(None, 0, 0)), jax.random.key(0), X)


def test_rows_in_any_order_are_no_false_alarm():
    # The lie: partners at random are fine as x[permutation], and in-batch negatives otherwise.
    blended = lambda w, key, x: losses(w, x) + jax.random.permutation(key, losses(w, x))
    look_at(mt.grad(blended, devices=2, in_axes=(None, 0, 0)), jax.random.key(0), X)


def noise_like(x):
    return jax.random.normal(jax.random.key(0), x.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, mt.all_rows(x) + noise_like(mt.all_rows(x))).mean(),
        lambda w, x: losses(w, x + noise_like(mt.all_rows(x))[mt.row_index(x)]),
    ],
)
def test_numbers_for_all_rows_are_the_same_in_every_tower(loss):
    """Lie: "all towers draw the same numbers" of noise that is one for all of them, as in PPO."""
    found, _ = mt.value_and_grad(loss, devices=2)(W, X)
    np.testing.assert_allclose(found, losses(W, X + noise_like(X)).mean(), rtol=1e-6)


def test_numbers_for_a_towers_own_rows_are_told_where_towers_meet():
    # The lie: silence, because some rows of the loss are those of all towers.
    loss = lambda w, x: losses(w, x + noise_like(x) - mt.all_rows(x).mean(0))
    with pytest.warns(mt.MultitowerWarning, match="a key that is the same in every tower"):
        look_at(mt.value_and_grad(loss, devices=2), X)

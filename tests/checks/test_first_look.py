"""The first look: every entry point warns once of what no tower should do, and of nothing else."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = jnp.ones(3)


def losses(w, x):
    return (x @ w - 1) ** 2


def total(w, x):
    return losses(w, x).sum()


def centred(w, x):
    z = x @ w
    return (z - z.mean()) ** 2


def one_mask(w, x):
    return losses(w, x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape))


def step_of(loss, **options):
    def run(w, x):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
        state, _ = step(step.init(w), x)
        return step(state, x)

    return run


ENTRIES = {
    "value_and_grad": lambda loss: mt.value_and_grad(loss, devices=2),
    "towers": lambda loss: mt.value_and_grad(loss, devices=2, towers=4),
    "under jit": lambda loss: jax.jit(mt.value_and_grad(loss, devices=4)),  # not looked at yet
    "train_step": step_of,
    "same bits": lambda loss: step_of(loss, towers=4),
}
WRONG = [
    (total, r"loss \(reduce_sum .*\): it is a sum over rows.*check_parallel"),
    (centred, r"loss \(reduce_sum .*z.mean\(\)\) \*\* 2\): rows are brought together"),
    (
        one_mask,
        r"random numbers \(random_bits .*\): they come from a key that every tower has alike",
    ),
]


@pytest.mark.parametrize("entry", ENTRIES)
@pytest.mark.parametrize(("loss", "said"), WRONG, ids=[loss.__name__ for loss, _ in WRONG])
def test_each_entry_point_warns_once(entry, loss, said):
    # The lie: training that goes on, of something else, and nobody is told.
    run = ENTRIES[entry](loss)
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run(W, X)
    assert len(told) == 1
    if entry in ("value_and_grad", "towers", "under jit"):
        run(W, X)  # warnings are errors here: a second one would fail


def divided(w, x, by):
    """As Keras has it: the number is computed in the program, and may be zero."""
    count = jnp.prod(jnp.array(by)).astype(jnp.float32)
    safe = jnp.where(count == 0, 1.0, count)
    return jnp.where(count == 0, 0.0, losses(w, x).sum() / safe)


def test_a_mean_whose_number_of_rows_is_computed():
    # The lie: every Keras loss is called a sum over rows. Or none is: by two it still is one.
    mt.grad(lambda w, x: divided(w, x, x.shape[:1]), devices=2)(W, X)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):
        mt.grad(lambda w, x: divided(w, x, (2,)), devices=2)(W, X)


def test_make_parallel_warns_of_rows_that_meet():
    with pytest.warns(mt.MultitowerWarning, match=r"result \(reduce_max .*\): rows are brought"):
        mt.make_parallel(lambda x: x - x.max(0), devices=2)(X)


def normalised(w, batch, *, model_state):
    mean = batch.mean(0)
    return losses(w, batch - mean), {}, 0.9 * model_state + 0.1 * mean


def test_nothing_is_said_of_what_is_meant():
    # The lie: a warning at every BatchNorm, until nobody reads them.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step = mt.train_step(normalised, optax.sgd(0.1), devices=2)
        step(step.init(W, model_state=jnp.zeros(3)), X)
        run = mt.value_and_grad(
            lambda w, mean, x: (losses(w, x - x.mean(0)).mean(), 0.9 * mean + 0.1 * x.mean(0)),
            has_aux=True,
            in_axes=(None, None, 0),
            devices=2,
        )
        run(W, jnp.zeros(3), X)
        noisy = mt.value_and_grad(
            lambda w, key, x: losses(w, x + jax.random.normal(key, x.shape)), devices=2
        )
        noisy(W, jax.random.key(0), X)
        shared = mt.make_parallel(
            lambda key, x: x + jax.random.normal(key, x.shape), in_axes=(None, 0), devices=2
        )
        shared(jax.random.key(0), X)

"""Keras 3 on JAX: `stateless_call`, whose state holds BatchNorm's averages and dropout's seeds.

The reference runs every tower by hand, with JAX and Keras alone.
"""

import os
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from tower_keys import tower_key
from trees import assert_close

# The statistics of a tower's own rows are what these tests are about.
pytestmark = pytest.mark.filterwarnings("ignore:.*with statistics of their own tower's rows")

X = np.random.default_rng(0).normal(size=(2, 16, 4)).astype(np.float32)  # two batches of 16 rows


@pytest.fixture(scope="module")
def keras():
    os.environ["KERAS_BACKEND"] = "jax"  # read when keras is imported: seconds, so only here
    with pytest.MonkeyPatch.context() as patch:
        # Most of these are for what it takes where it finds it, and no test needs: wrappers, plots.
        for name in ("sklearn", "matplotlib.pyplot"):
            patch.setitem(sys.modules, name, None)
        import keras

    return keras


def make_model(keras):
    keras.utils.set_random_seed(0)
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((4,)),
            layers.Dense(6, use_bias=False),
            layers.BatchNormalization(momentum=0.5),
            layers.Dropout(0.5, seed=3),
            layers.Dense(1),
        ]
    )


def train(keras, value_and_grad, jit):
    """The documented loop (Keras's guide "custom train step in JAX"), on arrays."""
    model = make_model(keras)
    optimizer = keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    def compute_loss_and_updates(trainable, non_trainable, x):
        y, non_trainable = model.stateless_call(trainable, non_trainable, x, training=True)
        return ((y[:, 0] - x.sum(-1)) ** 2).mean(), non_trainable

    grad_fn = value_and_grad(compute_loss_and_updates, has_aux=True)

    def train_step(state, x):
        trainable, non_trainable, variables = state
        (_, non_trainable), grads = grad_fn(trainable, non_trainable, x)
        trainable, variables = optimizer.stateless_apply(variables, grads, trainable)
        return trainable, non_trainable, variables

    train_step = jax.jit(train_step) if jit else train_step
    state = tuple(
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    )
    for x in X:
        state = train_step(state, x)
    return state


def towers_by_hand(num_towers):
    """jax.value_and_grad, tower by tower: own rows, own seeds, everything averaged."""

    def value_and_grad(fun, has_aux):
        def run(trainable, non_trainable, x):
            towers = []
            one = jax.value_and_grad(fun, has_aux=has_aux)
            for tower, rows in enumerate(jnp.split(x, num_towers)):
                seed = tower_key(non_trainable[-1], tower)
                own = [*non_trainable[:-1], seed]
                towers.append(one(trainable, own, rows))
            seed = towers[0][0][1][-1]
            for (_, state), _ in towers:
                state[-1] = seed
            mean = lambda *x: x[0] if x[0].dtype == np.uint32 else sum(x) / num_towers
            return jax.tree.map(mean, *towers)

        return run

    return value_and_grad


def parallel(devices, towers=None):
    return lambda fun, has_aux: mt.value_and_grad(
        fun, has_aux=has_aux, in_axes=(None, None, 0), devices=devices, towers=towers
    )


@pytest.fixture(scope="module")
def two_towers(keras):
    return train(keras, towers_by_hand(2), jit=True)


@pytest.mark.slow
def test_law_l2_dropout_and_batch_norm_as_by_hand(keras, two_towers):
    """Lie: one mask for all towers, since Keras's seeds are plain numbers; a seed per tower."""
    found = train(keras, parallel(2), jit=True)
    assert_close(found, two_towers)
    np.testing.assert_array_equal(found[1][-1], [3, 2])  # the seed, and two draws


@pytest.mark.slow
def test_law_l3_same_bits(keras, two_towers):
    one, two = (train(keras, parallel(devices, towers=2), jit=False) for devices in (1, 2))
    assert mt.fingerprint(one) == mt.fingerprint(two)
    assert_close(one, two_towers)


@pytest.mark.slow
def test_train_step_takes_the_variables(keras, two_towers):
    """The whole step: what is not trained is model state."""
    model = make_model(keras)

    def losses(trainable, x, *, model_state):
        y, state = model.stateless_call(trainable, model_state, x, training=True)
        return (y[:, 0] - x.sum(-1)) ** 2, {}, state

    values = lambda variables: [variable.value for variable in variables]
    step = mt.train_step(losses, optax.sgd(0.1), devices=2)
    state = step.init(
        values(model.trainable_variables), model_state=values(model.non_trainable_variables)
    )
    for x in X:
        state, _ = step(state, x)
    assert_close((state.params, state.model_state), two_towers[:2])


@pytest.mark.slow
def test_keras_losses_are_means(keras):
    """Lie: a warning that they are sums over rows; Keras computes how many there are."""
    labels = keras.utils.to_categorical(np.arange(16) % 4, 4)
    for loss in (
        keras.losses.CategoricalCrossentropy(from_logits=True),
        keras.losses.MeanSquaredError(),
    ):
        by_rows = lambda w, x, y, loss=loss: loss(y, x @ w)
        args = np.eye(4, dtype=np.float32), X[0], labels
        mt.grad(by_rows, devices=2)(*args)  # warnings are errors
        assert mt.check_parallel(by_rows, *args)


def test_variables_are_no_arrays(keras):
    """JAX's transformations refuse them since 0.9, in words that help nobody."""
    with pytest.raises(mt.ArgumentError, match=r"w\[0\] is a .*\[v.value for v in"):
        mt.grad(lambda w, x: x.mean())(make_model(keras).trainable_variables, X[0])


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_trap_weights_that_were_trained_since(keras, towers):
    """Lie: a model that is called in parallel keeps the weights of its first call, silently."""
    model = make_model(keras)
    with pytest.warns(mt.MultitowerWarning, match=r"keeps the weights .* model\.stateless_call\("):
        mt.make_parallel(model, devices=2, towers=towers)
    given = lambda weights, state, x: model.stateless_call(weights, state, x)[0]
    infer = mt.make_parallel(given, in_axes=(None, None, 0), devices=2, towers=towers)
    for scale in (1.0, 2.0):
        model.trainable_variables[-1].assign_add(np.full(model.output_shape[1:], scale))
        held = model.trainable_variables, model.non_trainable_variables
        found = infer(*([v.value for v in own] for own in held), X[0])
        np.testing.assert_allclose(found, model(X[0]), rtol=1e-5)


def test_a_model_is_no_parameters(keras):
    """Lies: a call without arguments, as for a function that makes them; a dtype to convert."""
    model = make_model(keras)
    loss = lambda model, x: model(x)[:, 0]
    with pytest.raises(mt.ArgumentError, match=r"params is Sequential, .*\[v.value for v in"):
        mt.train_step(loss, optax.sgd(0.1), devices=1).init(model)
    with pytest.raises(mt.ArgumentError, match=r"model is Sequential, .*stateless_call"):
        mt.grad(loss, devices=1)(model, X[0])

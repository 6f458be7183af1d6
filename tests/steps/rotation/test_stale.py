"""Rules for stale gradients: momentum and steps are as small as the staleness makes them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from multitower.errors import ArgumentError
from multitower.steps.optimizing.optimizer import call_update
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.rotation.stale import for_stale_gradients
from rotations import W, X, Y, make, train

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")


def lowered(momentum, staleness):
    return max(momentum - staleness / (1 + staleness), 0)


def replayed_with_less_momentum(update):
    """Parameters after twelve updates of groups 0, 1, 0, 2, whose staleness is 0 to 3."""
    newest = W.astype(np.float64)
    versions, made = [newest] * 3, [0] * 3
    for k in range(len(X)):
        group = (0, 1, 0, 2)[k % 4]
        x, y = X[k].astype(np.float64), Y[k].astype(np.float64)
        gradient = 2 * x.T @ (x @ versions[group] - y) / len(y)
        newest = newest + update(k, gradient, lowered(0.9 if k < 6 else 0.6, k - made[group]))
        versions[group], made[group] = newest, k + 1
    return newest


def sgd_in_numpy():
    trace = np.zeros(3)

    def update(k, gradient, momentum):
        nonlocal trace
        trace = gradient + momentum * trace
        return -0.05 * trace

    return update


def adam_in_numpy():
    first, second = np.zeros(3), np.zeros(3)

    def update(k, gradient, b1):
        nonlocal first, second
        first = b1 * first + (1 - b1) * gradient
        second = 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - b1 ** (k + 1)), second / (1 - 0.999 ** (k + 1))
        return -0.05 * mean / (np.sqrt(square) + 1e-8)

    return update


@pytest.mark.parametrize(
    ("optimizer", "in_numpy", "name"),
    [
        (optax.inject_hyperparams(optax.sgd)(0.05, momentum=0.9), sgd_in_numpy, "momentum"),
        (
            optax.chain(optax.identity(), optax.inject_hyperparams(optax.adam)(0.05)),
            adam_in_numpy,
            "b1",
        ),
    ],
    ids=["sgd", "adam in a chain"],
)
def test_momentum_correction_equals_a_numpy_replay(optimizer, in_numpy, name):
    # The lies: momentum that is lowered once more in every update, or for another staleness.
    step = make(optimizer=optimizer, rotation=(0, 1, 0, 2), momentum_correction=True)
    state, _ = train(step, step.init({"w": W}), range(6))
    kept = (state.opt_state if name == "momentum" else state.opt_state[1]).hyperparams
    assert kept[name] == np.float32(0.9)
    kept[name] = np.float32(0.6)  # what a user writes there is lowered too
    state, _ = train(step, state, range(6, 12))
    expected = replayed_with_less_momentum(in_numpy())
    np.testing.assert_allclose(state.params["w"], expected, rtol=2e-5)


def test_the_momentum_of_an_optimizer_inside_of_another_is_lowered():
    inner = optax.inject_hyperparams(optax.sgd)(0.05, momentum=0.9)
    outer = optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))(rate=2.0)
    options = RotationOptions(None, None, None, momentum_correction=True)
    optimizer = for_stale_gradients(outer, options, jnp.int32(1))
    state = optimizer.init(jnp.float32(0))
    _, state = optimizer.update(jnp.float32(1), state)
    update, state = optimizer.update(jnp.float32(1), state)
    assert float(update) == pytest.approx(-2 * 0.05 * (1 + 0.9 - 1 / 2))
    assert state.inner_state[0].hyperparams["momentum"] == np.float32(0.9)


def test_the_rules_for_stale_gradients_keep_short_floats():
    # The lies: updates and momenta that are float32 because the staleness is; a user's strict mode.
    options = RotationOptions(None, None, lambda staleness: 1 / (1 + staleness), True)
    optimizer = optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.75)
    optimizer = for_stale_gradients(optimizer, options, jnp.int32(1))
    one = jnp.ones((), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        state = optimizer.init(one)
        _, state = optimizer.update(one, state)
        update, state = optimizer.update(one, state)
    assert update.dtype == state.inner_state[0].trace.dtype == jnp.bfloat16
    assert float(update) == -0.5 * (1 + 0.25) / 2


def test_an_optimizer_that_needs_the_loss_gets_it_with_the_rules_too():
    needs_it = lambda gradient, state, params=None, *, value: (gradient * value, state)
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), needs_it)
    options = RotationOptions(None, None, lambda staleness: staleness / 2, False)
    optimizer = for_stale_gradients(optimizer, options, np.float32(1))
    update, _ = call_update(optimizer, np.float32(3), (), None, loss=np.float32(5))
    assert float(update) == 7.5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), "does not hold its momentum: make it with optax.inject"),
        (optax.inject_hyperparams(optax.sgd)(0.1), "does not hold its momentum"),
        (
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=optax.linear_schedule(0, 1, 9)),
            "momentum is a schedule",
        ),
    ],
    ids=["plain", "without momentum", "schedule"],
)
def test_momentum_that_is_not_known_is_refused(optimizer, message):
    step = make(optimizer=optimizer, momentum_correction=True)
    with pytest.raises(ArgumentError, match=message):
        step.init({"w": W})

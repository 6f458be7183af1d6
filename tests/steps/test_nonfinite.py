"""Steps that are not finite: what is skipped leaves nothing behind, and a NaN is one NaN."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from linear_steps import both_ways, where
from trees import assert_close


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_nan_of_the_other_sign_ends_as_the_one_nan_in_metrics_and_state(num_devices):
    """The lie: the sign of a NaN, which follows the order of operands, passes for the same bits."""
    step = mt.train_step(
        lambda w, x: w * x, optax.sgd(0.1), towers=6, devices=num_devices, diagnostics=True
    )
    rows = np.ones(6, np.float32)
    rows[5] = np.copysign(np.float32(np.nan), np.float32(-1))
    state, metrics = step(step.init(1.0), rows)
    for value in (state.params, metrics["loss"]):
        assert np.asarray(value).tobytes() == np.float32(np.nan).tobytes()


@both_ways
def test_a_skipped_step_leaves_nothing_but_its_number(towers):
    """Lie: the parameters are kept, and momentum, average or statistics have seen the bad rows.

    A loss and a gradient are bad each by itself. The replay has never heard of these steps.
    """

    def loss(w, x, *, model_state):
        bad_loss = jnp.where(x == 77, jnp.nan, 0.0)
        bad_slope = jnp.sqrt(jnp.where(x == 88, 0 * w, 1.0))  # finite, and its slope is not
        return (w * x - 1) ** 2 + bad_loss + bad_slope, {}, 0.5 * model_state + x.mean()

    rows = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    rows[1, 3], rows[3, 6] = 77, 88
    decay = lambda count: count / (count + 1.0)
    step = mt.train_step(
        loss, optax.sgd(0.1, momentum=0.9), **where(towers),
        ema_decay=decay, skip_nonfinite=True,
    )  # fmt: skip
    state = step.init(np.float32(1), model_state=np.float32(0))
    w, trace, average, statistics = 1.0, 0.0, 1.0, 0.0
    for number, x in enumerate(rows.astype(float), start=1):
        state, metrics = step(state, rows[number - 1])
        assert float(metrics["skipped"]) == (number in (2, 4))
        assert np.isnan(float(metrics["loss"])) == (number == 2)
        if number not in (2, 4):
            trace = 0.9 * trace + (2 * (w * x - 1) * x).mean()
            w = w - 0.1 * trace
            average = decay(number) * average + (1 - decay(number)) * w
            statistics = 0.5 * statistics + x.mean()
        expected = (w, trace, average, statistics)
        found = (state.params, state.opt_state[0].trace, state.ema_params, state.model_state)
        assert_close(found, expected)
        assert int(state.step) == number


def test_a_bad_gradient_is_not_added_up():
    """Lie: a step is good if its parameters are, and the sum of gradients is NaN for ever."""
    loss = lambda w, x: jnp.sqrt(jnp.abs(w * x))  # for x = 0 finite, and its slope is not
    optimizer = optax.MultiSteps(optax.sgd(1.0), 3)
    step = mt.train_step(loss, optimizer, devices=1, skip_nonfinite=True)
    state = step.init(np.float32(1))
    skipped: list[float] = []
    for bad in (False, True, False, False):
        state, metrics = step(state, np.array([1, 1 - bad], np.float32))
        skipped.append(float(metrics["skipped"]))
    assert (skipped, float(state.params)) == ([0, 1, 0, 0], 0.5)


def test_an_infinite_number_that_an_optimizer_begins_with_is_no_bad_step():
    """Lie: a bound of infinity in the optimizer's state, and no step is ever made."""
    bound = optax.GradientTransformation(lambda w: jnp.float32(jnp.inf), lambda g, s, w: (g, s))
    optimizer = optax.chain(bound, optax.sgd(1.0))
    step = mt.train_step(lambda w, x: w * x, optimizer, devices=1, skip_nonfinite=True)
    state, metrics = step(step.init(np.float32(1)), np.float32([0.25, 0.75]))
    assert (float(metrics["skipped"]), float(state.params)) == (0, 0.5)

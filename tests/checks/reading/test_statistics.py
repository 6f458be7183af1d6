"""Statistics that a state keeps are meant, as BatchNorm's are; other means over rows are told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_step, losses
from told import ours


def normalised(w, batch, *, model_state):
    mean = batch.mean(0)
    return losses(w, batch - mean), {}, 0.9 * model_state + 0.1 * mean


def normalised_with_aux(w, mean, x):
    return losses(w, x - x.mean(0)).mean(), 0.9 * mean + 0.1 * x.mean(0)


ZEROS = np.zeros(3, np.float32)


def step_with_statistics(devices=2, **options):
    step = mt.train_step(normalised, optax.sgd(0.1), devices=devices, **options)
    state, metrics = step(step.init(W, model_state=ZEROS), X)
    step(state, X)
    return metrics["loss"]


def look_at_a_step(**options):
    look_at_step(normalised, model_state=ZEROS, devices=2, **options)


def gradient_with_statistics(devices=2, **options):
    return mt.value_and_grad(
        normalised_with_aux, has_aux=True, in_axes=(None, None, 0), devices=devices, **options
    )


def value_with_statistics(**options):
    run = gradient_with_statistics(**options)
    (value, _), _ = run(W, ZEROS, X), run(W, ZEROS, X)
    return value[0]


def look_at_a_gradient(**options):
    look_at(gradient_with_statistics(**options), ZEROS, X)


def step_with_those_of_tower_0(**options):
    return step_with_statistics(model_state_from="first", **options)


def look_at_those_of_tower_0(**options):
    look_at_a_step(model_state_from="first", **options)


@pytest.mark.parametrize(
    ("run", "look"),
    [
        (step_with_statistics, look_at_a_step),
        pytest.param(step_with_those_of_tower_0, look_at_those_of_tower_0, marks=pytest.mark.slow),
        pytest.param(value_with_statistics, look_at_a_gradient, marks=pytest.mark.slow),
    ],
)
def test_batch_norm_without_towers_is_told_once(run, look):
    # The lie: another model on another number of devices, and nobody is told.
    said = r"loss \(.*mean\(0\).*\): rows are normalised with statistics of their own tower's rows"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run()
    assert len(ours(told)) == 1
    assert "towers=2 gives the same" in ours(told)[0]
    look(towers=2)  # as it says, and nothing is left to be told: warnings are errors here
    whole = losses(W, X - X.mean(0)).mean()
    np.testing.assert_allclose(run(devices=1), whole, rtol=1e-6)  # as it says


def test_two_batch_norms_whose_statistics_the_loss_closes_over():
    # The lie: Flax's ImageNet example is told, five times, that it brings rows together.
    def gradient(old, **options):
        def loss(w):  # as with TrainState.batch_stats
            first = X.mean(0)
            hidden = jnp.tanh(X - first)
            second = hidden.mean(0)
            new = [0.9 * a + 0.1 * b for a, b in zip(old, (first, second), strict=True)]
            return losses(w, hidden - second).mean(), new

        look_at(mt.grad(loss, has_aux=True, in_axes={"X": 0}, devices=2, **options))

    old = [jnp.zeros(3), jnp.zeros(3)]
    gradient(old, towers=2)  # warnings are errors here
    with pytest.warns(mt.MultitowerWarning, match="rows are normalised with statistics") as told:
        gradient(old)
    assert len(ours(told)) == 1


def turned_around(x):
    return x * x[::-1]


def compared_with_all(x):
    return jax.nn.softmax(x @ x.T) @ x


def largest_first(x):
    return jnp.sort(x, axis=0)


def divided_by_their_norm(x):
    return x / jnp.linalg.norm(x)


def decayed_by_a_scan(x):
    decay = lambda carry, row: (0.5 * carry + row, 0.5 * carry + row)
    return jax.lax.scan(decay, jnp.zeros(3), x)[1]


def summed_up(x):
    return jnp.cumsum(x, axis=0)


MEETINGS = [turned_around, divided_by_their_norm, summed_up]
MEETINGS_TOO = [compared_with_all, largest_first, decayed_by_a_scan]  # much as the others


@pytest.mark.parametrize(
    "mixed", [*MEETINGS, *(pytest.param(fn, marks=pytest.mark.slow) for fn in MEETINGS_TOO)]
)
def test_rows_that_meet_before_a_batch_norm_are_no_statistics(mixed):
    # The lie: a model keeps a running mean of what it makes of rows that met, so that nobody is
    # told of a loss that is not that of one device.
    def loss(w, x, *, model_state):
        hidden = mixed(x)
        mean = hidden.mean(0)
        return losses(w, hidden - mean), {}, 0.9 * model_state + 0.1 * mean

    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        look_at_step(loss, model_state=ZEROS)


def a_median(x):
    middle = jnp.median(x, axis=0)
    return x - middle, middle


def a_variance_by_the_mean_of_squares(x):
    mean = x.mean(0)
    variance = (x**2).mean(0) - mean**2
    return (x - mean) / jnp.sqrt(variance + 1e-5), jnp.stack([mean, variance])


def one_in_every_layer(x):
    def layer(h, scale):
        mean = h.mean(0)
        return jnp.tanh(h - mean) * scale, mean

    return jax.lax.scan(layer, x, jnp.array([1.0, 2, 3]))


def folded_into_a_factor_and_a_shift(x):
    mean, variance = x.mean(0), x.var(0)
    deviation = jnp.maximum(jnp.sqrt(variance), 1e-3)
    return x * (1 / deviation) - mean / deviation, jnp.stack([mean, variance])


@pytest.mark.parametrize(
    "norm",
    [
        a_median,
        a_variance_by_the_mean_of_squares,
        folded_into_a_factor_and_a_shift,
        pytest.param(one_in_every_layer, marks=pytest.mark.slow),
    ],
)
def test_statistics_that_are_kept_are_meant(norm):
    def loss(w, x, *, model_state):
        hidden, kept = norm(x)
        return losses(w, hidden), {}, 0.9 * model_state + 0.1 * kept

    kept = jax.eval_shape(norm, X)[1]
    before = np.zeros(kept.shape, kept.dtype)
    look_at_step(loss, model_state=before)  # warnings are errors here


def divided_by_their_running_means(w, x, *, model_state):
    each = (losses(w, x)[:, None] * x**2).mean(0)
    running = 0.5 * model_state + 0.5 * each
    return (each / running).sum(), {}, running


def entropy_of_the_mean(w, x, *, model_state):
    mean = jax.nn.softmax(x * w).mean(0)
    return losses(w, x) + (mean * jnp.log(mean)).sum(), {}, 0.9 * model_state + 0.1 * mean


def rows_divided_by_the_mean(w, x, *, model_state):
    running = 0.5 * model_state + 0.5 * (x**2).mean(0)
    return losses(w, x / running), {}, running


def a_masked_mean_on_the_line_of_the_state(w, x, *, model_state):
    mask = x[:, 0] > 0
    # fmt: off
    return (losses(w, x) * mask).sum() / jnp.maximum(mask.sum(), 1), {}, model_state + x.mean(0)
    # fmt: on


def the_load_of_experts(w, x, *, model_state):
    """Experts of a mixture should get as many rows each (Fedus et al. 2021)."""
    gates = jax.nn.softmax(x * w)
    load, share = jax.nn.one_hot(gates.argmax(-1), 3).mean(0), gates.mean(0)
    kept = 0.9 * model_state + 0.1 * (load + share)
    return losses(w, x) + 3 * (load * share).sum(), {}, kept


def a_mean_beside_the_running_mean(w, x, *, model_state):
    running = 0.9 * model_state + 0.1 * (x * w).mean(0)
    return losses(w, x) + ((running - 1) ** 2).sum(), {}, running


def a_product_of_means(w, x, *, model_state):
    first, last = (x * w).mean(0), (x**2).mean(0)
    return losses(w, x) + first @ last, {}, 0.9 * model_state + first + last


TOGETHER, DIVIDED = "rows are brought together", "it is a division by a sum or a mean over rows"


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (divided_by_their_running_means, TOGETHER),
        (entropy_of_the_mean, TOGETHER),
        (the_load_of_experts, TOGETHER),
        pytest.param(a_mean_beside_the_running_mean, TOGETHER, marks=pytest.mark.slow),
        pytest.param(a_product_of_means, TOGETHER, marks=pytest.mark.slow),
        pytest.param(rows_divided_by_the_mean, DIVIDED, marks=pytest.mark.slow),
        (a_masked_mean_on_the_line_of_the_state, DIVIDED),
    ],
)
def test_a_kept_mean_that_normalises_no_rows_is_told(loss, why):
    """Lie: a mean that goes into a state is a statistic, whatever else the loss makes of it."""
    with pytest.warns(mt.MultitowerWarning, match=rf"loss \(.*\): {why}"):
        look_at_step(loss, model_state=ZEROS)


def test_a_kept_mean_that_is_only_added_up_is_right():
    def loss(w, x, *, model_state):
        mean = (x * w).mean(0)
        return losses(w, x) + mean.sum(), {}, 0.9 * model_state + 0.1 * mean

    look_at_step(loss, model_state=ZEROS)  # warnings are errors here


def test_statistics_that_a_scan_makes_are_meant():
    def loss(w, x, *, model_state):
        total, _ = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(3), x)
        mean = total / len(x)
        return losses(w, x - mean), {}, 0.9 * model_state + 0.1 * mean

    look_at_step(loss, model_state=ZEROS)  # warnings are errors here

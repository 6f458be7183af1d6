"""Right programs that look like wrong ones: nothing is said of them, and they are right."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from looking import W, X, look_at, losses


def test_arrays_that_are_copied_together_are_not_taken_for_each_other():
    def loss(w, x):
        x, w = jax.device_put((x, w))
        return jnp.broadcast_to(w, (2, 3)).sum() * losses(w, x)

    look_at(mt.value_and_grad(loss, devices=2), X)


def scaled_by_the_data_set(w, x):
    return 60_000 / x.shape[0] * losses(w, x).sum()


def summed_after_it_was_divided(w, x):
    return (losses(w, x) / len(x)).sum()


def weighted(w, x):
    shares = jnp.ones(len(x)) / len(x)
    return (losses(w, x) * shares).sum() + jnp.vdot(x @ w, shares)


def divided_and_multiplied(w, x):
    return jnp.abs(losses(w, x) / len(x)) * len(x)


def mean_multiplied_and_divided(w, x):
    return losses(w, x).mean() * len(x) / len(x) + (losses(w, x) / len(x)).mean() * len(x)


def attacked_by_signs(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    return losses(w, x + 0.1 * jnp.sign(attack)).mean()


def attacked_by_directions(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    norms = jnp.linalg.norm(attack, axis=1, keepdims=True)
    other = jax.lax.rsqrt((attack * attack).sum(1, keepdims=True) + 1e-12)
    return losses(w, x + attack / jnp.maximum(norms, 1e-12) + attack * other).mean()


def attacked_within_limits(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    norms = jnp.linalg.norm(attack, axis=1, keepdims=True)
    is_known = jnp.log(norms) > -30  # asked of it, and not part of it
    within = jnp.where(is_known, attack / jnp.clip(norms, 1e-12, 1e12), 0.0)
    return losses(w, x + within).mean()


def discounted(w, x):
    return losses(w, x) * 0.9 ** mt.row_index(x) * (1 + mt.row_index(x))


def divided_by_a_number(w, x):
    other = x[:, 0] * 1234.5678 / 223
    return losses(w, x) / 211 + other  # numbers of rows that the reader tries


def with_strange_numbers(w, x):
    found = losses(w, x)
    for number in (jnp.nan, jnp.inf, -1e38, 1e-44, 1j, True):
        factor = jnp.asarray(number).real.astype(jnp.float32)
        row = losses(w, x) / number if number else losses(w, x)
        x = x * jnp.abs(row * number * factor)[:, None]
    strange = jnp.abs(x.sum(1) / jnp.float32(0) * jnp.complex64(1j))
    return found + jnp.nan_to_num(strange, posinf=1.0)


def averaged_with_weights(w, x):
    return jnp.average(losses(w, x), weights=jnp.ones(x.shape[0]))


def guarded(w, x):
    mean = losses(w, x).mean()
    small = jax.lax.cond(jnp.isfinite(mean), lambda mean: 0.1 * mean, jnp.zeros_like, mean)
    return jnp.where(jnp.isnan(mean), 0.0, mean) + jnp.nan_to_num(mean) + small


def guarded_by_rows(w, x):
    found = losses(w, x)
    mean = jnp.where(jnp.isnan(found.mean()) & ~jnp.any(jnp.isnan(found)), 0.0, found.mean())
    small = jax.lax.cond(jnp.isfinite(x).all(), lambda: 0.1 * mean, lambda: 0.0 * mean)
    return small + optax.losses.ranking_softmax_loss(x * w, x)


def with_a_full_mask(w, x):
    mask = jnp.ones(x.shape[0], bool)
    return jnp.where(mask, losses(w, x), 0).sum() / mask.sum()


def summed_by_a_scan(w, x):
    total, _ = jax.lax.scan(lambda total, row: (total + losses(w, row), None), 0.0, x)
    return total / x.shape[0]


def with_split(w, x):
    first, second = jnp.split(x @ jnp.ones((3, 4)), 2, axis=1)
    mean = jnp.split((first - second).mean(0), 2)
    return mean[0].sum() * w.sum()


def picked_by_class(w, x):
    logits = x * w
    return -jax.nn.log_softmax(logits)[jnp.arange(x.shape[0]), (x[:, 0] > 0).astype(int)]


def picked_by_numbers_of_numpy(w, x):
    return -jax.nn.log_softmax(x * w)[np.arange(len(x)), (x[:, 0] > 0).astype(int)]


def picked_along_axis(w, x):
    largest = jnp.argmax(x, axis=1)
    return jnp.take_along_axis(x * w, largest[:, None], axis=1)[:, 0]


def looked_up(w, x):
    return w[(x[:, 0] > 0).astype(int)] * x[:, 1]


def halved_by_a_solver(w, x):  # Diffrax batches its loops itself
    halve = jax.jit(lambda z: jnp.where(z > 1, z / 2, z))
    body = lambda z: jnp.squeeze(halve(z[:, None]), 1)
    start = jax.lax.stop_gradient(losses(w, x)) + 2
    return losses(w, x) * jax.lax.while_loop(lambda z: jnp.any(z > 1), body, start)


def each_until_small(w, x):
    halve = lambda z: jax.lax.while_loop(lambda z: z > 1, lambda z: z / 2, z)
    return jax.vmap(halve)((x @ w) ** 2)


def convolved_features(w, x):
    return jax.vmap(lambda row: jnp.convolve(row, w, mode="same"))(x).sum(1)


def mapped_in_batches(w, x):
    return jax.lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=4)


def by_the_mean_of_weights(w, x):  # as detectors divide by the mean number of boxes
    boxes = x[:, 0] > 0
    number = jax.lax.pmean(boxes.sum(), "towers")
    return (losses(w, x) * boxes).sum() / jnp.maximum(number, 1e-3)


def by_their_clipped_mean(w, x):
    boxes = (x[:, 0] > 0).astype(jnp.float32)
    number = jax.lax.psum(boxes.sum(), "towers") / jax.lax.axis_size("towers")
    return 2 * (losses(w, x) * boxes).sum() / jnp.clip(number, 1e-3) + 0.1 * (w**2).sum()


def with_features_that_are_off(w, x):  # an option that leaves an array with no columns
    none = x[:, :0]
    largest = jnp.max(none, initial=0.0)
    return losses(w, x) + (none**2).sum() + largest + jnp.einsum("ni,nj->ij", none, x).sum()


def norm_squared(w, x):
    error = x @ w - 1
    norm = jnp.linalg.norm(error)
    return norm**2 / len(x) + norm * norm / x.size + jnp.sqrt(jnp.mean(error**2)) ** 2.0


def weighted_by_arrays_of_numpy(w, x):
    share = np.full(len(x), 1 / len(x), np.float32)
    return losses(w, x) @ share + (losses(w, x) * share).sum()


RIGHT = [
    norm_squared,
    weighted_by_arrays_of_numpy,
    with_features_that_are_off,
    by_the_mean_of_weights,
    by_their_clipped_mean,
    summed_after_it_was_divided,
    weighted,
    divided_and_multiplied,
    mean_multiplied_and_divided,
    attacked_by_signs,
    attacked_by_directions,
    attacked_within_limits,
    discounted,
    with_strange_numbers,
    divided_by_a_number,
    averaged_with_weights,
    guarded,
    guarded_by_rows,
    with_a_full_mask,
    summed_by_a_scan,
    with_split,
    picked_by_class,
    picked_by_numbers_of_numpy,
    picked_along_axis,
    looked_up,
    halved_by_a_solver,
    each_until_small,
    convolved_features,
    mapped_in_batches,
]


@pytest.mark.parametrize("loss", [scaled_by_the_data_set, *RIGHT])
def test_what_is_right_is_not_blamed(loss):
    # The lie: warnings at right programs, until nobody reads them. (Warnings are errors here.)
    if loss is not each_until_small:  # a while loop has no reverse mode
        look_at(mt.value_and_grad(loss, devices=2), X)
    is_asking = loss in (by_the_mean_of_weights, by_their_clipped_mean)  # of the other towers
    if not is_asking and jax.eval_shape(loss, W, X).ndim:
        look_at(mt.make_parallel(loss, in_axes=(None, 0), devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize("loss", RIGHT)
def test_they_are_right(loss):
    # The lie: a wrong program among them, which nobody blames.
    assert mt.check_parallel(loss, W, X)

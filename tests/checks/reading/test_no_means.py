"""States that are no means over rows are told: those that hold rows, or quotients of sums."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import multitower as mt
from looking import W, X, Y, look_at_step, losses
from told import ours


def queueing(rows, w, batch, *, model_state):
    """A queue of the newest rows, as momentum contrast keeps one."""
    return losses(w, batch), {}, jnp.concatenate([rows(batch), model_state])[:300]


def queueing_in_place(rows, w, batch, *, model_state):
    new = rows(batch)
    return losses(w, batch), {}, model_state.at[jnp.arange(len(new))].set(new)


def largest(rows, w, batch, *, model_state):
    top = jnp.full((300, 3), rows(batch).max())
    return losses(w, batch), {}, jnp.maximum(model_state, top)


def high(rows, w, batch, *, model_state):
    """A running percentile, as an agent keeps one to scale its returns."""
    top = jnp.percentile(rows(batch), 95)
    return losses(w, batch), {}, 0.9 * model_state + 0.1 * top


def worst_of_each_class(rows, w, batch, *, model_state):
    """The largest loss of each class so far, as hard examples are looked for."""
    new = rows(batch)
    return losses(w, batch), {}, model_state.at[(new[:, 0] > 0).astype(int)].max(new)


def seen(rows, w, batch, *, model_state):
    """Which features have had a large value."""
    return losses(w, batch), {}, jnp.where((rows(batch) > 1).any(0), 1.0, model_state)


@pytest.mark.parametrize(
    "loss",
    [
        queueing,
        *(
            pytest.param(fn, marks=pytest.mark.slow)
            for fn in (worst_of_each_class, largest, queueing_in_place, high, seen)
        ),
    ],
)
def test_a_state_that_holds_rows_is_told(loss):
    # The lie: a queue of rows that no batch has, means of different rows; a largest or a
    # percentile that is none.
    def queue(rows):
        step = mt.train_step(functools.partial(loss, rows), optax.sgd(0.1), devices=1, towers=4)
        return step(step.init(W, model_state=before), X)[0].model_state

    before = jnp.zeros(() if loss is high else (300, 3))
    said = r"model_state \((concat\w+|scatter|scatter-max|reduce_\w+|gather) .*\): .* holds rows"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        wrong = queue(lambda x: x)
    assert len(ours(told)) == 1
    whole = jax.jit(lambda before: loss(lambda x: x, W, X, model_state=before)[2])
    on_one_device = np.asarray(whole(before))
    np.testing.assert_allclose(queue(mt.all_rows), on_one_device, rtol=1e-5)  # as it says
    assert (np.asarray(wrong) != on_one_device).any()


def test_a_short_queue_that_takes_the_rows_of_all_towers_is_read():
    # The lie: a queue of 64 rows has no room for those that are tried, so nothing is known of it.
    def run(more):
        def loss(w, batch, *, model_state):
            new = jax.lax.dynamic_update_slice(model_state, mt.all_rows(batch), (0, 0))
            return losses(w, batch) + more(batch), {}, new

        look_at_step(loss, np.tile(X, (4, 1)), model_state=jnp.zeros((64, 3)), towers=2)

    run(lambda x: 0.0)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        run(jnp.std)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (lambda old, z, k: jnp.maximum(old, jax.ops.segment_max(z, k, 2)), "scatter-max"),
        (lambda old, z, k: old.at[k].mul(z), "scatter-mul"),
        (lambda old, z, k: old + jax.lax.reduce(z, 0.0, lambda a, b: a * b + 1, (0,)), "reduce"),
        (
            lambda old, z, k: (
                old + jax.lax.reduce_window(z, 0.0, jax.lax.max, (len(z),), (1,), "VALID")
            ),
            "reduce_window",
        ),
        (lambda old, z, k: jnp.where((z > 3).any(), 1.0, old), "reduce_or"),
        (lambda old, z, k: (old > 0) & (z < 3).all(), "reduce_and"),
    ],
)
def test_a_state_that_is_no_mean_over_rows_is_told(new, said):
    # The lie: check_parallel says that it is safe, and the state is that of no batch.
    def loss(w, batch, *, model_state):
        found = losses(w, batch)
        kept = jax.lax.stop_gradient(found)
        return found, {}, new(model_state, kept, (batch[:, 0] > 0).astype(int))

    with pytest.warns(mt.MultitowerWarning, match=rf"model_state \({said} .*\): it is kept"):
        look_at_step(loss, model_state=jnp.zeros(2))


def first(w, batch, *, model_state):
    return losses(w, batch), {}, model_state.at[: len(batch)].set(batch)


def shifted(w, batch, *, model_state):
    return losses(w, batch), {}, jnp.concatenate([batch, model_state[: -len(batch)]])


@pytest.mark.slow
@pytest.mark.parametrize("loss", [first, shifted])
def test_a_state_that_holds_rows_and_is_short_is_told(loss):
    # The lie: the mean of different rows; and it cannot be read with more rows than it has.
    with pytest.warns(mt.MultitowerWarning, match="it is kept .* holds rows"):
        look_at_step(loss, model_state=jnp.zeros((16, 3)))
    report = mt.check_parallel(loss, W, X, model_state=jnp.zeros((16, 3)))
    assert "holds rows" in str(report)


def per_group(losses, groups):
    members = jax.nn.one_hot(groups, 3)
    return members.T @ losses / (members.sum(0) + 1e-6)


def worst_group(w, batch, *, model_state):
    """Distributionally robust: groups of examples with larger losses get larger weights."""
    x, groups = batch
    of_groups = per_group(losses(w, x), groups)
    weights = model_state * jnp.exp(0.1 * jax.lax.stop_gradient(of_groups))
    return (weights / weights.sum()) @ of_groups, {}, weights / weights.sum()


def prototypes(w, batch, *, model_state):
    x, groups = batch
    return losses(w, x), {}, 0.9 * model_state + 0.1 * per_group(x[:, 0], groups)


def multiplier(w, batch, *, model_state):
    return losses(w, batch[0]), {}, jnp.maximum(0, model_state + batch[0].mean())


def soft_maximum(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state * 0.9 + jnp.log(jnp.exp(batch[0]).mean(0))


def adapted(w, batch, *, model_state):
    change = jnp.where(batch[0].mean() > 0.1, 1.5, 1 / 1.5)
    return losses(w, batch[0]), {}, model_state * change


def over_a_norm(w, batch, *, model_state):
    return losses(w, batch[0]), {}, 2 / jnp.linalg.norm(model_state + batch[0].mean(0)) + W


def logarithm_of_a_size(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.log(jnp.abs(batch[0].mean(0)))


def inverse_root(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jax.lax.rsqrt((batch[0] ** 2).mean(0))


def cube(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + batch[0].mean(0) ** 3


def inverse(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + batch[0].var(0) ** -1


def whitening(w, batch, *, model_state):
    covariance = batch[0].T @ batch[0] / len(batch[0])
    return losses(w, batch[0]), {}, jnp.linalg.inv(covariance) @ model_state


def which(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.argmax(batch[0], 0)


def phase(w, batch, *, model_state):
    x = batch[0]
    return losses(w, x), {}, model_state + jnp.arctan2(jnp.sin(x).mean(0), jnp.cos(x).mean(0))


def size_of_all_rows(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.linalg.norm(batch[0], axis=0)


def power_iteration(w, batch, *, model_state):
    direction = batch[0].T @ (batch[0] @ model_state)
    return losses(w, batch[0]), {}, direction / jnp.linalg.norm(direction)


@pytest.mark.parametrize(
    "loss",
    [
        worst_group,
        prototypes,
        multiplier,
        soft_maximum,
        adapted,
        power_iteration,
        over_a_norm,
        logarithm_of_a_size,
        inverse_root,
        cube,
        inverse,
        whitening,
        which,
        phase,
        size_of_all_rows,
    ],
)
def test_a_state_that_is_made_of_sums_and_no_mean_of_them(loss):
    """Lies: the mean of the towers' quotients or decisions; and no word on the loss beside it."""
    with pytest.warns(mt.MultitowerWarning) as told:
        look_at_step(loss, (X, Y), model_state=jnp.ones(3))
    found = [str(one.message) for one in told if one.category is mt.MultitowerWarning]
    assert ["no mean over rows" in one for one in found].count(True) == 1
    assert any(one.startswith("loss") for one in found) == (loss is worst_group)


def clipped_variance(w, batch, *, model_state):
    x = batch[0]
    return losses(w, x), {}, jnp.maximum(0, ((x - x.mean(0)) ** 2).mean(0)) + 0.0 * model_state


def test_a_variance_that_is_kept_from_being_negative_is_meant():
    """A false alarm: Equinox's BatchNorm clips a variance that never is negative."""
    look_at_step(clipped_variance, (X, Y), model_state=jnp.ones(3))


@pytest.mark.slow
def test_a_system_with_a_matrix_of_no_rows_is_solved_for_a_mean():
    """A false alarm: the solution for a mean over rows is a mean over rows, as a product is."""
    matrix = np.eye(3, dtype=np.float32) + 0.5
    solved = lambda batch: jnp.linalg.solve(matrix, batch[0].mean(0))
    loss = lambda w, batch, *, model_state: (losses(w, batch[0]), {}, model_state + solved(batch))
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.zeros(3)), (X, Y))
    expected = np.linalg.solve(matrix, X.mean(0))
    np.testing.assert_allclose(state.model_state, expected, rtol=1e-4)


class OfMasked(nnx.Module):
    def __init__(self):
        self.norms = nnx.List([nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2)])

    def __call__(self, x, mask):
        for norm in self.norms:
            x = norm(x, mask=mask)
        return x


@pytest.mark.slow
def test_states_of_one_module_are_named_once():
    """A mean of the rows that a mask leaves is a quotient, of four leaves by the same line."""
    loss = lambda model, x, mask: model(x, mask[:, None]).mean(1) ** 2
    run = mt.value_and_grad(loss, devices=2, towers=4)
    with pytest.warns(mt.MultitowerWarning) as told:
        run(OfMasked(), X, Y > 0)
    assert any(str(one.message).startswith("the state of the module (div at") for one in told)


@pytest.mark.slow
def test_prototypes_of_all_rows_as_the_warning_says():
    def of_all(w, batch, *, model_state):
        x, members = batch[0], jax.nn.one_hot(batch[1], 3)
        total, number = jax.lax.psum((members.T @ x[:, 0], members.sum(0)), "towers")
        return losses(w, x), {}, 0.9 * model_state + 0.1 * total / (number + 1e-6)

    step = mt.train_step(of_all, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.ones(3)), (X, Y))
    expected = 0.9 + 0.1 * jax.jit(per_group)(X[:, 0], Y)
    np.testing.assert_allclose(state.model_state, expected, rtol=1e-6)

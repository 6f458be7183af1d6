"""A state that counts or adds up rows is told: a tower has its own rows alone."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_step, losses


def counting(w, batch, *, model_state):
    return losses(w, batch), {}, model_state + (batch > 0).sum(0).astype(model_state.dtype)


def counting_in_place(w, batch, *, model_state):
    above = (batch > 0).sum().astype(model_state.dtype)
    return losses(w, batch), {}, model_state.at[1].set(model_state[1] + above)


def counting_all(w, batch, *, model_state):
    every = jax.lax.psum((batch > 0).sum(0), "towers")
    return losses(w, batch), {}, model_state + every.astype(model_state.dtype)


def averaging_in_place(w, batch, *, model_state):
    return losses(w, batch), {}, model_state.at[1].set(batch.mean())


def revived_by_where(counts):  # codes that nobody uses get the count of the one that most use
    return jnp.where(counts < 0.1, counts.max() / 2, counts)


def revived_by_a_condition(counts):
    return jax.lax.cond((counts < 0.1).any(), revived_by_where, lambda counts: counts, counts)


def revived_in_a_loop(counts):
    is_unused = lambda counts: (counts < 0.1).any()
    split = lambda counts: counts.at[counts.argmin()].set(counts.max() / 2)
    return jax.lax.while_loop(is_unused, split, counts)


def moments(w, batch, *, model_state):
    """The running mean of observations, as reinforcement learning keeps it."""
    seen, mean = model_state
    rows = batch.shape[0]
    total = seen + rows
    return losses(w, batch), {}, (total, mean + (batch.mean(0) - mean) * rows / total)


def state_after(loss, before, batch=X):
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    return step(step.init(W, model_state=before), batch)[0].model_state


def test_a_state_that_counts_the_rows_of_a_tower_is_told():
    # The lie: every tower counts its own rows, so that the number grows T times too slowly.
    count = lambda w, x, *, model_state: (losses(w, x), {}, model_state + len(x))
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(add .*\): it depends on the num"):
        look_at_step(count, model_state=jnp.int32(0))
    said = r"model_state\[0\] and model_state\[1\] \(add .*seen \+ rows\): it depends on the number"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at_step(moments, model_state=(jnp.float32(1), jnp.zeros(3)))
    elements = lambda w, x, *, model_state: (losses(w, x), {}, model_state + x.size)
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(add .*\): it depends on the num"):
        look_at_step(elements, model_state=jnp.int32(0))


@pytest.mark.parametrize(
    "totals",
    [
        lambda state, x: state.at[0].add(len(x)),
        lambda state, x: state + jnp.array([len(x), 1.0]),
    ],
    ids=["in place", "beside another"],
)
def test_rows_that_are_counted_in_one_entry_of_a_state_are_told(totals):
    count = lambda w, x, *, model_state: (losses(w, x), {}, totals(model_state, x))
    with pytest.warns(
        mt.MultitowerWarning, match=r"model_state \((scatter-)?add .*: it depends on"
    ):
        look_at_step(count, model_state=jnp.zeros(2))


@pytest.mark.slow
def test_a_place_in_a_buffer_that_moves_by_the_rows_of_a_tower_is_told():
    """Lie: the next rows are written over those of this step, as the place has hardly moved."""

    def loss(rows, w, x, *, model_state):
        buffer, place = model_state
        new = mt.all_rows(x)
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, new, place, 0)
        return losses(w, x), {}, (buffer, (place + len(rows(x))) % len(buffer))

    before = jnp.zeros((4096, 3)), jnp.int32(0)
    with pytest.warns(mt.MultitowerWarning, match=r"model_state\[1\] \(.*: it depends on the num"):
        look_at_step(functools.partial(loss, lambda x: x), model_state=before)
    assert state_after(functools.partial(loss, mt.all_rows), before)[1] == len(X)  # as it says
    # Places in two buffers stop no look.
    turns = lambda w, x, *, model_state: (losses(w, x), {}, (model_state + 1) % np.array([3, 2]))
    np.testing.assert_array_equal(state_after(turns, jnp.ones(2, jnp.int32)), [2, 0])


@pytest.mark.parametrize(
    "change",
    [
        lambda seen, x: seen + len(x) / 1000,
        lambda seen, x: seen + (x.mean() - seen) * (len(x) / 256),
        lambda seen, x: seen * 0.99 ** len(x) + x.mean(),
    ],
    ids=["thousands", "a part of the way", "a half-life"],
)
def test_a_state_that_depends_on_the_rows_of_a_tower_is_told(change):
    # The lie: 0.008 thousand rows of a tower are 0.064 thousand rows of the batch.
    keep = lambda w, x, *, model_state: (losses(w, x), {}, change(model_state, x))
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(.*\): it depends on the number"):
        look_at_step(keep, model_state=jnp.float32(0))


@pytest.mark.slow
def test_a_state_that_counts_calls_or_the_rows_of_the_batch_is_not_told():
    calls = lambda w, x, *, model_state: (losses(w, x), {}, model_state + 1)
    assert state_after(calls, jnp.int32(0)) == 1
    of_all = lambda w, x, *, model_state: (losses(w, x), {}, model_state + len(mt.all_rows(x)))
    assert state_after(of_all, jnp.int32(0)) == len(X)
    by_size = lambda x: float(len(x) * jax.lax.axis_size("towers"))
    of_sizes = lambda w, x, *, model_state: (losses(w, x), {}, model_state + by_size(x))
    assert state_after(of_sizes, jnp.float32(0)) == len(X)
    thousands = lambda x: jax.lax.psum(len(x), "towers") / 1000
    kept = lambda w, x, *, model_state: (losses(w, x), {}, model_state + thousands(x))
    np.testing.assert_allclose(state_after(kept, jnp.float32(0)), len(X) / 1000)
    given = lambda w, b, *, model_state: (losses(w, b["x"]), {}, model_state + b["rows"])
    assert state_after(given, jnp.int32(0), {"x": X, "rows": np.int32(len(X))}) == len(X)
    last = lambda w, x, *, model_state: (losses(w, x), {}, 0.9 * model_state + x[:, -1].mean())
    state_after(last, jnp.float32(0))


def count_in_aux(w, seen, x):
    return losses(w, x), {"seen": seen["seen"] + x.sum(0)}


@pytest.mark.parametrize("loss", [counting, counting_in_place])
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.int32, marks=pytest.mark.slow)])
def test_a_state_that_adds_up_rows_is_told(loss, dtype):
    # The lie: counts of a codebook or of classes that are T times too small, and nobody is told.
    said = r"model_state \(reduce_sum .*batch > 0.*\): it is kept for the next step, and it adds up"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at_step(loss, model_state=jnp.zeros(3, dtype))
    # Not those of Python, such as of a file that an earlier test has left open.
    (only,) = [str(one.message) for one in told if one.category is mt.MultitowerWarning]
    assert 'jax.lax.psum(x.sum(0), "towers") to the old value' in only


@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.int32, marks=pytest.mark.slow)])
def test_a_state_that_adds_up_the_rows_of_all_towers_is_right(dtype):
    """Lie: it counts as the warning of `test_a_state_that_adds_up_rows_is_told` says, and wrong."""
    np.testing.assert_array_equal(state_after(counting_all, jnp.zeros(3, dtype)), (X > 0).sum(0))


@pytest.mark.parametrize("revived", [revived_by_where, revived_by_a_condition, revived_in_a_loop])
@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_state_of_sums_is_told_when_unused_entries_are_replaced(revived, towers):
    # The lie: replacing the codes that nobody uses makes a mean of the counts of a codebook.
    def with_state(update):
        loss = lambda w, kept, x: (
            losses(w, x),
            {"seen": revived(0.9 * kept["seen"] + update(x))},
        )
        run = mt.value_and_grad(
            loss, has_aux=True, in_axes=(None, None, 0), devices=2, towers=towers
        )
        look_at(run, {"seen": jnp.ones(3)}, X)

    with pytest.warns(mt.MultitowerWarning, match="state.* and it adds up rows"):
        with_state(lambda x: (x > 0).sum(0))
    # Of means it adds up nothing, and yet every tower decides by its own.
    with pytest.warns(mt.MultitowerWarning, match="state.* no mean over rows.*decision") as told:
        with_state(lambda x: (x > 0).mean(0))
    assert not [one for one in told if "adds up rows" in str(one.message)]
    with_state(lambda x: jax.lax.psum((x > 0).sum(0), "towers"))


APART = {"towers": 4, "sync_every": 2, "outer_optimizer": optax.sgd(1.0)}
IN_TURNS = {"towers": 4, "updates": "asynchronous"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [APART, IN_TURNS])
def test_towers_that_exchange_nothing_are_not_told_to_add_up_a_state(options):
    # The lie: an advice that the same step refuses.
    with pytest.warns(mt.MultitowerWarning, match="adds up rows.*Keep a mean instead"):
        look_at_step(counting, model_state=jnp.zeros(3), devices=2, **options)


def test_a_state_in_aux_that_adds_up_rows_is_told():
    run = mt.value_and_grad(count_in_aux, has_aux=True, in_axes=(None, None, 0), devices=2)
    with pytest.warns(
        mt.MultitowerWarning, match=r"state\['seen'\] .*it is kept for the next step"
    ):
        look_at(run, {"seen": jnp.zeros(3)}, X)


def test_a_metric_that_the_loss_updates_is_told_to_be_updated_after_the_gradient():
    # The lie: only a psum helps, and nobody can write one into a metric of Keras.
    def loss(w, metric, x):
        answers = x @ w
        return ((answers - 1) ** 2).mean(), [metric[0] + (answers > 0).sum()]

    run = mt.value_and_grad(loss, has_aux=True, in_axes=(None, None, 0), devices=2)
    with pytest.warns(mt.MultitowerWarning, match="adds up rows.*update the metric after"):
        look_at(run, [jnp.zeros(())], X)


def test_a_mean_that_is_written_into_a_state_is_right():
    np.testing.assert_allclose(
        state_after(averaging_in_place, jnp.zeros(3))[1], X.mean(), rtol=1e-6
    )

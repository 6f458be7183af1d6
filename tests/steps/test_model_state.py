"""The state of a model: the mean of the towers, or that of the first, and never of empty ones."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from linear_steps import batch_of, losses, params_of, same_bits_every_day, where
from trees import assert_close


def statistics_loss(params, batch, *, model_state):
    new = {
        "mean": batch["y"].mean(),
        "count": model_state["count"] + 1,
        "seen": jnp.full((), batch["n"][0]),
        "key": jax.random.fold_in(model_state["key"], 1),
    }
    return losses(params, batch), {}, new


@pytest.mark.filterwarnings("ignore:model_state.* holds rows")  # one, to tell towers
@pytest.mark.parametrize(
    ("source", "towers"),
    [
        ("mean", 4),
        ("first", None),
        pytest.param("mean", None, marks=pytest.mark.slow),
        pytest.param("first", 4, marks=pytest.mark.slow),
    ],
)
def test_model_state_is_averaged_or_taken_from_the_first_tower(source, towers):
    """Lie: the last tower's statistics, counters averaged, or an empty tower's copies counted."""
    step = mt.train_step(
        statistics_loss,
        optax.sgd(0.1),
        towers=towers,
        devices=1 if towers else 4,
        model_state_from=source,
    )
    key = jax.random.key(5)
    first = {"mean": 0.0, "count": np.int32(0), "seen": np.int32(0), "key": key}
    state = step.init(params_of(), model_state=first)
    full = batch_of(12) | {"n": np.arange(12, dtype=np.int32)}
    ragged = {name: rows[:7] for name, rows in full.items()}  # towers of 3, 3, 1 and 0 rows
    state, _ = step(state, full)
    expected = full["y"].mean() if source == "mean" else full["y"][:3].mean()
    assert_close(state.model_state["mean"], expected)
    copies = pytest.warns(mt.MultitowerWarning, match=r"copies .* count in model_state\['mean'\]")
    with copies if source == "mean" else contextlib.nullcontext():  # tower 0 is full
        state, _ = step(state, ragged)
    tower_2 = np.take(ragged["y"], [6, 0, 1]).mean()  # one real row, filled up with copies
    by_tower = [ragged["y"][:3].mean(), ragged["y"][3:6].mean(), tower_2]
    expected = np.average(by_tower, weights=[3, 3, 1]) if source == "mean" else by_tower[0]
    assert_close(state.model_state["mean"], expected)
    assert int(state.model_state["count"]) == 2
    assert int(state.model_state["seen"]) == 0
    assert state.model_state["key"] == jax.random.fold_in(jax.random.fold_in(key, 1), 1)


@same_bits_every_day
def test_metrics_of_parameters_alone_hold_in_any_batch(towers):
    """Lie: a batch that does not fill the towers is refused, or makes 3 a mean over empty ones."""

    def loss(w, batch):
        by_row = w * batch["y"]
        of_rows = {"mean": by_row.mean()} if "mean" in batch else {}
        return by_row, {"weight": jnp.exp(w), "three": 3.0, **of_rows}

    step = mt.train_step(loss, optax.sgd(0.1), towers=towers, devices=1 if towers else 4)
    state = step.init(np.float32(1))
    for num_rows in (8, 5, 1):
        before = float(state.params)
        state, metrics = step(state, {"y": np.ones(num_rows, np.float32)})
        assert float(metrics["three"]) == 3
        assert_close(metrics["weight"], np.exp(before))
    with pytest.raises(mt.OutputError, match=r"metrics\['mean'\] is not per example"):
        step(state, {"y": np.ones(5, np.float32), "mean": np.float32(0)})


def test_model_state_that_a_loss_returns_may_be_a_number():
    step = mt.train_step(
        lambda w, x, *, model_state: (w * x, {}, 2.0), optax.sgd(0.1), devices=1, towers=1
    )
    state, _ = step(step.init(np.float32(1), model_state=np.float32(0)), np.ones(2, np.float32))
    assert state.model_state == 2


@pytest.mark.filterwarnings("ignore:model_state.* holds rows")  # one, to tell towers
@pytest.mark.filterwarnings("ignore:the batch has 5 rows")  # the third tower is partly full
@same_bits_every_day
def test_trap_an_empty_tower_turns_the_loss_to_nan(towers):
    """tensorflow#41657; here it even returns NaN as its statistics."""

    def loss(params, batch, *, model_state):
        # Rows are filled up with copies in order: the empty tower starts at row 6 mod 5 = 1.
        bad = jnp.where(batch["n"][0] % 2 == 1, jnp.nan, 1.0)
        return losses(params, batch), {}, bad

    devices = 1 if towers else 4  # four towers of two rows, and five rows: the last one is empty
    step = mt.train_step(loss, optax.sgd(0.1), devices=devices, towers=towers, global_batch=8)
    batch = batch_of(5) | {"n": np.arange(5, dtype=np.int32)}
    state, metrics = step(step.init(params_of(), model_state=np.float32(0)), batch)
    assert_close(metrics["loss"], losses(params_of(), batch).mean())
    assert float(state.model_state) == 1.0
    # With a full batch the last tower starts at row 6, and one of odd number is heard of.
    odd = batch_of(8) | {"n": np.array([0, 9, 2, 9, 4, 9, 7, 9], np.int32)}
    state, _ = step(state, odd)
    assert np.isnan(float(state.model_state)), "the trap is none, so the test proves nothing"


@same_bits_every_day
def test_copies_of_rows_that_count_in_a_state_are_told_of_once(towers):
    """Lie: silence; or words about full batches, empty towers, or states that no row is in."""

    def loss(w, x, *, model_state):
        mean, count = model_state
        return w * x, {}, (mean * 0.9 + x.mean() * 0.1, count + 1)

    step = mt.train_step(loss, optax.sgd(0.1), **where(towers))
    state = step.init(np.float32(1), model_state=(np.float32(0), np.float32(0)))
    tower_rows = 3 if towers else 6
    for num_rows in (12, 6):
        state, _ = step(state, np.ones(num_rows, np.float32))
    with pytest.warns(mt.MultitowerWarning) as told:
        state, _ = step(state, np.ones(8, np.float32))
    (text,) = [str(one.message) for one in told]
    assert f"the batch has 8 rows, and a tower takes {tower_rows}" in text
    assert "count in model_state[0]. Leave" in text
    step(state, np.ones(7, np.float32))  # not told again: warnings are errors here

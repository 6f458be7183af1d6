"""Law L8 in every way to run a step: one schedule step per update, whatever runs it."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

WAYS = {
    "fast": {},
    "towers": {"towers": 4, "devices": 2},
    "shard_update": {"towers": 4, "devices": 2, "shard_update": True},
    "shard_params": {"devices": 2, "shard_params": True},
    "stages": {"towers": 4, "devices": 2, "stages": 2},
    "local": {"towers": 4, "devices": 2, "sync_every": 3, "outer_optimizer": optax.sgd(1.0)},
    "steps_per_call": {"devices": 2, "steps_per_call": 3},
    "asynchronous": {"towers": 4, "devices": 2, "updates": "asynchronous"},
}


def losses(params, x):
    """Every row's gradient is 1 for every weight: only the rates of the schedule show."""
    return mt.cut(x * params["first"]) + x * params["last"]


# Those that compile most are slow: blocks and own updates of towers, beside those of stages.
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, marks=[pytest.mark.slow] if way in ("shard_update", "local") else [])
        for way in WAYS
    ],
)
def test_law_l8_one_schedule_step_per_update(way):
    # The lies: the count goes up once per tower, device or stage, once per call of several steps or
    # once per exchange of towers, so that the rate falls too fast, or too slowly (accelerate#2926).
    options = WAYS[way]
    step = mt.train_step(losses, optax.sgd(lambda count: 0.5**count), **options)
    state = step.init({"first": np.float32(0), "last": np.float32(0)})
    batches = [np.ones(8, np.float32)] * 3
    if "steps_per_call" in options:
        state, _ = step(state, batches)
    else:
        for batch in batches:
            state, _ = step(state, batch)
    assert int(state.step) == 3
    for count in (x for x in jax.tree.leaves(state.opt_state) if x.dtype == jnp.int32):
        assert int(count) == 3
    for weight in state.params.values():
        assert float(weight) == -(1 + 0.5 + 0.25)

"""TrainState: a pytree that knows when it has been overwritten."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt


def made(**options):
    optimizer = optax.sgd(0.1, momentum=0.9)
    step = mt.train_step(lambda w, x: (x @ w) ** 2, optimizer, devices=2, **options)
    return step, step.init(np.ones(3, np.float32))


@pytest.mark.parametrize("towers", [None, 4])
def test_a_state_that_was_given_to_a_step_is_gone(towers):
    """Lie: JAX's "array has been deleted", or old values, instead of a word about the state."""
    step, state = made(towers=towers)
    new, _ = step(state, np.ones((4, 3), np.float32))
    readers = [
        lambda: state.params,
        lambda: state.step,
        lambda: jax.tree.leaves(state),
        lambda: state.replace(rng=None),
        lambda: step(state, np.ones((4, 3), np.float32)),
    ]
    for read in readers:
        with pytest.raises(mt.StateError, match="overwritten"):
            read()
    assert repr(state) == "TrainState(overwritten)"
    assert int(new.step) == 1


@pytest.mark.slow
def test_waiting_for_a_state_makes_no_arrays():
    """Lie: whole copies of the optimizer state, or, in one of several processes, a wait forever."""
    step, state = made(towers=2, shard_update=True, ema_decay=0.9)
    state, _ = step(state, np.ones((4, 3), np.float32))
    before = len(jax.live_arrays())
    assert state.block_until_ready() is state
    assert len(jax.live_arrays()) == before
    step(state, np.ones((4, 3), np.float32))
    with pytest.raises(mt.StateError, match="overwritten"):
        state.block_until_ready()


@pytest.mark.parametrize("towers", [None, 4])
def test_a_copy_stays(towers):
    step, state = made(towers=towers)
    kept = jax.tree.map(jnp.copy, state)
    for _ in range(2):
        state, _ = step(state, np.ones((4, 3), np.float32))
    np.testing.assert_array_equal(kept.params, np.ones(3))
    assert int(kept.step) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"towers": 4},
        pytest.param({"towers": 4, "shard_update": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_copy_of_pythons_trains_on_by_itself(options):
    """Lie: a copy that shares its arrays, which the next step overwrites."""

    def losses(w, x, *, rng):
        return (x @ w * jax.random.bernoulli(rng, 0.5, x.shape[:1])) ** 2

    step = mt.train_step(losses, optax.sgd(0.1, momentum=0.9), devices=2, **options)
    rows = np.ones((4, 3), np.float32)
    state, _ = step(step.init(np.ones(3, np.float32), rng=jax.random.key(0)), rows)
    before = mt.fingerprint(state)
    ahead = set()
    for copied in (copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))):
        other = copied(state)
        assert repr(other).startswith("TrainState(step=")
        ahead.add(mt.fingerprint(step(other, rows)[0]))
        assert mt.fingerprint(state) == before
    assert ahead == {mt.fingerprint(step(state, rows)[0])}


@pytest.mark.parametrize("towers", [None, 4])
def test_it_is_a_pytree_with_named_paths_whole_on_every_device(towers):
    step, state = made(towers=towers, ema_decay=0.5)
    state, metrics = step(state, np.ones((4, 3), np.float32))
    paths = {jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(state)}
    assert {".params", ".ema_params", ".step", ".opt_state[0].trace"} <= paths
    for leaf in jax.tree.leaves(state):
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == set(mt.devices(2))
    assert state.step.dtype == jnp.int32
    assert metrics["loss"].shape == ()


def test_reading_a_state_does_not_change_what_follows():
    """Lie: a look at the parameters (a log line) compiles again, or changes bits."""
    found = []
    step, _ = made(towers=4)
    for looks in (False, True):
        state = step.init(np.ones(3, np.float32))
        for _ in range(3):
            state, _ = step(state, np.ones((4, 3), np.float32))
            if looks:
                str(state.params), float(state.opt_state[0].trace[0])
        found.append(mt.fingerprint(state))
    assert found[0] == found[1]

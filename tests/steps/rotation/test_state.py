"""The state of a rotation: every group's version is kept, moved, changed by users, and refused."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import StateError
from rotations import W, X, Y, batch_of, losses, make, train

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")


def test_model_state_goes_with_the_group():
    def loss(params, batch, *, model_state):
        return losses(params, batch), {}, {"calls": model_state["calls"] + 1}

    step = make(loss, towers=2)
    state = step.init({"w": W}, model_state={"calls": np.int32(0)})
    state, _ = train(step, state, range(3))
    assert int(state.model_state["calls"]) == 2  # group 0's, which made updates 0 and 2
    assert list(state.local["model_state"]["calls"]) == [2, 1]


@pytest.mark.slow
def test_a_skipped_update_leaves_the_model_state_of_its_group():
    # The lie: the state of the group whose turn was before.
    def loss(params, batch, *, model_state):
        seen = jnp.where(jnp.isfinite(batch["y"]).all(), batch["x"].mean(0), jnp.nan)
        return losses(params, batch), {}, {"seen": seen}

    step = make(loss, towers=2, devices=2, skip_nonfinite=True)
    state = step.init({"w": W}, model_state={"seen": np.zeros(3, np.float32)})
    state, _ = train(step, state, range(2))
    state, metrics = step(state, {"x": X[2], "y": np.full(8, np.nan, np.float32)})
    assert metrics["skipped"] == 1
    kept = state.local["model_state"]["seen"]
    np.testing.assert_allclose(kept, [X[0].mean(0), X[1].mean(0)], rtol=1e-6)
    np.testing.assert_array_equal(state.model_state["seen"], kept[0])
    np.testing.assert_array_equal(state.local["params"]["w"][0], state.params["w"])


@pytest.mark.parametrize("moments", [(5,), pytest.param((1, 3, 5), marks=pytest.mark.slow)])
def test_a_state_goes_on_from_any_moment_on_other_devices(moments):
    # The lie (law L4): a version that is the newest after a resume, or another group's turn.
    whole, expected = train(step := make(devices=2), step.init({"w": W}), range(8))
    for moment in moments:
        state, before = train(step, step.init({"w": W}), range(moment))
        other = make(devices=1 + (moment + 1) % 3)
        copied = jax.tree.map(jnp.copy, state)
        state, after = train(other, copied, range(moment, 8))
        assert mt.fingerprint(state) == mt.fingerprint(whole)
        assert mt.fingerprint([*before, *after]) == mt.fingerprint(expected)


def test_what_is_written_into_a_state_is_used():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step = make(optimizer=optimizer, towers=2, devices=2)
    state, _ = train(step, step.init({"w": W}), range(3))
    before, versions = np.array(state.params["w"]), np.array(state.local["params"]["w"])
    state.opt_state.hyperparams["learning_rate"] = 0.0
    state, metrics = step(state, batch_of(3))
    assert np.array_equal(state.params["w"], before)
    assert np.array_equal(state.local["params"]["w"], [versions[0], before])
    assert int(metrics["staleness"]) == 1


@pytest.mark.slow
def test_from_synchronous_to_asynchronous_and_back():
    plain = mt.train_step(losses, optax.sgd(0.05, momentum=0.9), towers=3, devices=1)
    state, _ = train(plain, plain.init({"w": W}), range(2))
    start = np.array(state.params["w"])
    step = make()
    state, seen = train(step, state, range(2, 4))
    assert [int(metrics["staleness"]) for metrics in seen] == [0, 1]
    # Updates 2 and 3 were those of groups 2 and 0.
    assert np.array_equal(state.local["params"]["w"][1], start)
    with pytest.raises(StateError, match=r"keep of their own \(state.local\).*replace\(local=None"):
        plain(state, batch_of(4))
    state, _ = plain(state.replace(local=None), batch_of(4))
    assert state.local is None
    with pytest.raises(StateError, match=r"versions of 3 groups, and this step has 2 groups"):
        make(towers=2)(train(step, step.init({"w": W}), range(1))[0], batch_of(1))


def test_an_update_overwrites_the_steps_own_state_and_nothing_of_the_users():
    # The lies: an old state that seems to be whole; arrays of the user whose memory is gone.
    step = make()
    old, _ = train(step, step.init({"w": W}), range(1))
    state, _ = step(old, batch_of(1))
    with pytest.raises(StateError, match="overwritten"):
        step(old, batch_of(1))
    kept = jax.tree.map(jnp.array, state.opt_state)
    state, _ = step(state.replace(opt_state=kept), batch_of(1))
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(kept))


@pytest.mark.parametrize(
    ("local", "kind"),
    [
        ([np.zeros(3)], "none of this kind"),  # as another step keeps it
        ({"v": np.zeros(3)}, "none of this kind"),
        ({"params": {"v": np.zeros(3)}, "step": np.zeros(3)}, "versions of 3 groups"),
    ],
    ids=["list", "names", "parameters"],
)
def test_versions_of_another_kind_are_refused(local, kind):
    step = make()
    state = step.init({"w": W}).replace(local=local)
    with pytest.raises(StateError, match=rf"state.local has {kind}, and this step has 3 groups"):
        step(state, batch_of(0))


@pytest.mark.parametrize("bad", [0, 2])
def test_a_step_that_is_not_finite_is_left_out(bad):
    step = make(devices=2, skip_nonfinite=True, diagnostics=True)
    state, _ = train(step, step.init({"w": W}), range(bad))
    before = np.array(state.params["w"])
    broken = {"x": X[bad] * np.inf, "y": Y[bad]}
    state, metrics = step(state, broken)
    assert float(metrics["skipped"]) == 1
    assert metrics["tower_losses"].shape == (1,)
    assert np.array_equal(state.params["w"], before)
    assert np.array_equal(state.local["params"]["w"][bad], before)  # it goes on with the newest
    assert int(state.step) == bad + 1
    state, metrics = step(state, batch_of(bad))
    assert float(metrics["skipped"]) == 0

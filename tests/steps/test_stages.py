"""train_step(stages=): what a step can do, each against the same step without stages."""

import pickle

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import multitower as mt
from multitower.errors import ArgumentError, DeviceError
from multitower.steps.state.replicas import check_replicas
from multitower.steps.state.train_state import state_of
from multitower.training.checkpoints.checkpoint import Checkpoints
from processes import run_fork
from staged_steps import WEIGHTS, X, check, losses, make, train

MOMENTUM = optax.sgd(0.05, momentum=0.9)  # a state that compiles faster than Adam's


def check_model(loss, params):
    """The same training with and without stages, and with the bits of one device."""
    found = check(loss, params=params)
    assert mt.fingerprint(train(make(loss, devices=1), params)) == mt.fingerprint(found)


def test_each_leaf_is_on_the_devices_of_its_stage():
    step = make(optimizer=MOMENTUM, ema_decay=0.5, stages=2, devices=2, towers=1)
    state, _ = train(step, WEIGHTS[:2], X[:1])
    places = [leaf.devices() for leaf in state.params]
    assert places == [{device} for device in mt.devices(2)]
    assert [leaf.devices() for leaf in state.ema_params] == places
    assert [leaf.devices() for leaf in state.opt_state[0].trace] == places


@pytest.mark.slow
def test_scalar_losses_metrics_and_a_sum_of_losses():
    def loss(params, batch):
        each = losses(params, batch)
        weighted = mt.ratio(each * batch[:, 0] ** 2, batch[:, 0] ** 2)
        return each.sum(), {"rows": each, "mean": each.mean(), "weighted": weighted}

    _, metrics = check(loss, optax.sgd(0.01), reduction="sum")
    assert set(metrics) == {"loss", "rows", "mean", "weighted"}


def test_trap_weights_of_a_model_that_fits_no_device_are_never_whole():
    """keras#21634: all of them made on the first device, before they are taken apart."""
    step = make(ema_decay=0.9)
    state = step.init(WEIGHTS)
    leaves = jax.tree.leaves((state.params, state.opt_state, state.ema_params))
    assert len(leaves) == 4 * len(WEIGHTS) + 1  # Adam's count
    assert all(isinstance(leaf, np.ndarray) for leaf in leaves)


@pytest.mark.slow
def test_an_nnx_model_with_batch_norm_and_dropout():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
            self.norm = nnx.BatchNorm(4, rngs=rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = mt.cut(jnp.tanh(layer(x)))
            return self.dropout(self.norm(x))

    def loss(model, batch):
        return ((model(batch) - batch) ** 2).sum(1)  # alone it would hardly depend on the weights

    check_model(loss, Model(nnx.Rngs(0)))


@pytest.mark.slow
def test_an_equinox_model():
    model = eqx.nn.MLP(4, 4, 8, 3, key=jax.random.key(0))
    check_model(lambda model, batch: (jax.vmap(model)(batch) ** 2).sum(1), model)


@pytest.mark.slow
def test_changed_learning_rates_and_states_of_other_steps():
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)
    step, plain = make(optimizer=optimizer), make(optimizer=optimizer, stages=None)
    state, _ = train(step)
    state.opt_state.hyperparams["learning_rate"] = jnp.float32(0.0)
    before = np.asarray(state.params[0])
    state, _ = step(state, X[0])
    assert np.array_equal(state.params[0], before)
    state, _ = plain(state, X[0])  # from stages to none, and back
    state, _ = step(state, X[1])
    assert int(state.step) == 6
    other = optax.sgd(0.1).init(state.params)
    with pytest.raises(mt.StateError, match=r"opt_state\.count is missing"):
        step(state.replace(opt_state=other), X[1])


@pytest.mark.slow
def test_a_replica_with_other_bits_is_named():
    # The lie: replicas of a stage that drift apart unnoticed.
    step = make(optimizer=optax.sgd(0.05), layout=(2, 1), devices=2, stages=2, towers=2)
    state, _ = train(step, WEIGHTS[:2], X[:1])
    check_replicas(state)
    block = state.kept.parts().blocks[1][1]
    block.params[1] = block.params[1] + 1
    with pytest.raises(mt.StateError, match=r"cpu:1 holds .* in state\.params\[1\] than cpu:0"):
        check_replicas(state)


def test_trap_a_resume_on_another_layout(tmp_path):
    # torchtitan#474: a checkpoint that only the layout that made it can read.
    given = {"optimizer": MOMENTUM, "towers": 2, "ema_decay": 0.9, "clip_norm": 0.1}
    step = make(devices=2, stages=2, **given)
    state, _ = train(step, WEIGHTS[:2], X[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        undisturbed = mt.fingerprint(step(state, X[2])[0])
        there = make(devices=2, stages=2, layout=(2, 1), **given)
        restored = checkpoints.restore(like=there.init(WEIGHTS[:2])).state
        assert mt.fingerprint(there(restored, X[2])[0]) == undisturbed
        whole = make(devices=1, stages=None, **given)
        state, _ = whole(checkpoints.restore(like=whole.init(WEIGHTS[:2])).state, X[2])
    assert int(state.step) == 3


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"towers": None}, ArgumentError, "needs towers=.*towers=8"),
        ({"shard_update": True}, ArgumentError, "exclude each other"),
        ({"stages": 0}, ArgumentError, "stages=0"),
        ({"stages": None, "layout": (1, 2)}, ArgumentError, "stages= is missing"),
        ({"stages": None, "remat": False}, ArgumentError, "remat=False is for stages="),
        ({"layout": (1, 4)}, ArgumentError, "use|Use"),
        ({"layout": (2, 2), "devices": 3}, DeviceError, "needs 4 devices, and there are 3"),
        ({"layout": (2, 1), "towers": 1}, DeviceError, "2 replicas, and towers=1"),
        pytest.param({"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)),
                      "stages": 2, "devices": 2}, ArgumentError,
                     r"of stages \[0, 1\].*clip_norm=", marks=pytest.mark.slow),
        pytest.param({"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, ArgumentError,
                     "more towers", marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        train(make(**options))


def test_a_weight_that_depends_on_parameters_is_refused():
    def loss(params, batch):
        each = losses(params, batch)
        return mt.ratio(each, jax.lax.stop_gradient(each) > 0)

    with pytest.raises(ArgumentError, match="before the first stage begins"):
        train(make(loss))


def test_idle_devices_are_named():
    with pytest.warns(mt.MultitowerWarning, match="3 of 4 devices busy"):
        assert len(make(devices=4).placement.devices) == 1


MEMORY = """
import jax, jax.numpy as jnp, numpy as np, optax
import multitower as mt

mt.configure(simulated_devices=4)
params = [np.zeros((200, 200), np.float32) for _ in range(8)]

def losses(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return batch.sum(1)

for devices in (1, 2, 4):
    step = mt.train_step(
        losses, optax.adam(0.1), towers=4, stages=4, devices=devices, ema_decay=0.9
    )
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, np.ones((4, 200), np.float32))
    jax.block_until_ready(state.params)
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    print(*(held[device] / params[0].nbytes for device in jax.devices()[:devices]))
    del state, step, array, shard
"""


@pytest.mark.slow
def test_a_device_holds_its_stages_alone():
    # The lie: "cut", and every device still has everything. In a process of its own, as arrays
    # that other tests have left behind would count.
    lines = run_fork("-c", MEMORY).splitlines()
    # Eight blocks: each with two moments and a moving average.
    for line, each in zip(lines, (32, 16, 8), strict=True):
        assert [float(x) for x in line.split()] == pytest.approx([each] * (32 // each), rel=0.02)


@pytest.mark.slow
def test_states_and_batches_in_other_forms():
    step = make(optimizer=MOMENTUM, stages=2, devices=2, ema_decay=0.9)
    state, _ = train(step, WEIGHTS[:2], X[:1])
    copy = jax.tree.map(jnp.copy, state)
    pickled = pickle.loads(pickle.dumps(state))
    assert all(a is b for a, b in zip(step.model(state), state.params, strict=True))
    ready = mt.shard(X[1], towers=4, devices=2)  # on other devices than the rows of stages
    (fetched,) = mt.prefetch([X[1]], towers=4, devices=step.placement.devices)
    found = {
        mt.fingerprint(step(one, batch)[0])
        for one, batch in ((state, X[1]), (copy, ready), (pickled, fetched))
    }
    assert len(found) == 1
    with pytest.raises(mt.StateError):
        step(state, X[1])


def test_the_users_arrays_are_never_overwritten():
    params = [jnp.asarray(w) for w in WEIGHTS[:2]]
    step = make(optimizer=MOMENTUM, stages=2, devices=1)
    state = step.init(params)
    state, _ = step(state, X[0])
    step(state_of(state.kept.fields()), X[1])
    assert np.array_equal(params[0], WEIGHTS[0])


def _haiku_model(x):
    return hk.nets.MLP([6, 5, 1])(x)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["linen", "haiku"])
def test_models_of_functions(framework):
    if framework == "linen":
        model = linen.Sequential(
            [linen.Dense(6), jnp.tanh, linen.Dense(5), jnp.tanh, linen.Dense(1)]
        )
        params, apply = model.init(jax.random.key(0), X[0]), model.apply
    else:
        model = hk.without_apply_rng(hk.transform(_haiku_model))
        params, apply = model.init(jax.random.key(0), X[0]), model.apply
    check_model(lambda params, batch: apply(params, batch)[:, 0] ** 2, params)


@pytest.mark.slow
def test_rows_of_other_shapes_are_another_program():
    """Lie: JAX's words about argument types, for sentences of another length."""
    loss = lambda w, x: (jnp.tanh(x.mean(1, keepdims=True) @ w["a"]) @ w["b"]).sum(1)
    params = {"a": np.ones((1, 4), np.float32), "b": np.ones((4, 1), np.float32)}
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=1, stages=2)
    state = step.init(params)
    for columns in (4, 6, 4):
        state, metrics = step(state, np.ones((4, columns), np.float32))
    assert float(metrics["loss"]) < 4 * np.tanh(1)

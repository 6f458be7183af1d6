"""train_step(stages=): what a step can do, each against the same step without stages."""

import pickle
from typing import NamedTuple

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
from multitower.stages.chain import SPLIT
from multitower.steps.loss import LossFunction
from multitower.steps.parts import StepParts
from multitower.steps.staged.state import _side_by_side
from multitower.steps.staged.update import WholeUpdate, may_be_split
from multitower.steps.state.fields import Fields
from multitower.steps.state.replicas import check_replicas
from multitower.steps.state.train_state import state_of
from multitower.training.checkpoints.checkpoint import Checkpoints
from processes import run_fork
from trees import assert_close

RNG = np.random.default_rng(0)
X = RNG.normal(size=(3, 8, 4)).astype(np.float32)
WEIGHTS = [RNG.normal(size=(4, 4)).astype(np.float32) / 2 for _ in range(3)]


def losses(params, batch):
    for w in params:
        batch = jnp.tanh(batch @ w)
    return (batch**2).sum(1)


def make(loss=losses, optimizer=None, stages=3, devices=3, towers=4, **options):
    return mt.train_step(
        loss,
        optimizer or optax.adam(0.05),
        devices=devices,
        towers=towers,
        stages=stages,
        **options,
    )


def train(step, params=WEIGHTS, batches=X, **extras):
    state = step.init(params, **extras)
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


def check(
    loss=losses, optimizer=None, params=WEIGHTS, batches=X, extras=None, rtol=2e-4, **options
):
    """The same training with and without stages; returns what the one with stages gave."""
    found = train(make(loss, optimizer, **options), params, batches, **(extras or {}))
    options["stages"] = None
    expected = train(make(loss, optimizer, **options), params, batches, **(extras or {}))
    flat, _ = jax.tree_util.tree_flatten_with_path(expected)
    for (path, a), b in zip(flat, jax.tree.leaves(found), strict=True):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if jnp.issubdtype(a.dtype, jnp.floating):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol / 50, err_msg=name)
    return found


def check_model(loss, params):
    """The same training with and without stages, and with the bits of one device."""
    found = check(loss, params=params)
    assert mt.fingerprint(train(make(loss, devices=1), params)) == mt.fingerprint(found)


def test_each_leaf_is_on_the_devices_of_its_stage():
    step = make(ema_decay=0.5)
    state, _ = train(step)
    places = [leaf.devices() for leaf in state.params]
    assert places == [{device} for device in mt.devices(3)]
    assert [leaf.devices() for leaf in state.ema_params] == places
    assert [leaf.devices() for leaf in state.opt_state[0].mu] == places


@pytest.mark.slow
def test_scalar_losses_metrics_and_a_sum_of_losses():
    def loss(params, batch):
        each = losses(params, batch)
        weighted = mt.ratio(each * batch[:, 0] ** 2, batch[:, 0] ** 2)
        return each.sum(), {"rows": each, "mean": each.mean(), "weighted": weighted}

    _, metrics = check(loss, optax.sgd(0.01), reduction="sum")
    assert set(metrics) == {"loss", "rows", "mean", "weighted"}


@pytest.mark.slow
@pytest.mark.parametrize("bad", [1, None])
def test_skip_nonfinite_is_decided_once_for_all_stages(bad):
    # The lie: the stage whose gradients are finite moves, the others stay.
    batches = X.copy()
    if bad is not None:
        batches[bad, 3] = np.nan
    found, metrics = check(batches=batches[:2], skip_nonfinite=True, diagnostics=True)
    assert metrics["skipped"] == (bad is not None)
    assert metrics["finite_params"].shape == (3,)
    assert int(found.step) == 2


@pytest.mark.slow
def test_skip_nonfinite_looks_at_the_state_of_every_stage():
    # The lie: squares of gradients overflow, and Adam never moves these parameters again.
    large = lambda params, batch: 1e25 * losses(params, batch)
    found, metrics = check(large, batches=X[:2], skip_nonfinite=True)
    assert metrics["skipped"] == 1
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(found.opt_state))


class Rate(NamedTuple):
    hyperparams: dict


def _by_its_own_rate(gradients, state, params=None):
    """The first weights have a learning rate of their own, which follows their gradient."""
    rate = 0.1 / (1 + jnp.abs(gradients[0]).max())
    scaled = [-rate * gradients[0], *(-0.1 * g for g in gradients[1:])]
    return scaled, Rate({"learning_rate": rate})


@pytest.mark.slow
def test_means_and_rates_are_told_and_a_bad_step_changes_no_stage():
    # The lies: a sum of towers told as their mean; a rate that only the first stage knows; one
    # replica, or one stage, that moves in a step that is skipped.
    first = lambda params: Rate({"learning_rate": jnp.float32(0.1)})
    loss = lambda params, x: (losses(params, x).mean(), {"most": x.max(1).mean()})
    optimizer = optax.GradientTransformation(first, _by_its_own_rate)
    more = {"skip_nonfinite": True, "extra_metrics": ["gradient_norm", "learning_rate"]}
    step = make(loss, optimizer, stages=2, layout=(2, 1), towers=2, **more)
    state, metrics = step(step.init(WEIGHTS[:2]), X[0])
    total, gradients = jax.value_and_grad(lambda p: loss(p, X[0])[0])(WEIGHTS[:2])
    updates, wanted = _by_its_own_rate(gradients, None)
    norm = np.sqrt(sum((np.asarray(g) ** 2).sum() for g in gradients))
    expected = {"loss": total, "most": X[0].max(1).mean(), "gradient_norm": norm, "skipped": 0.0}
    expected |= wanted.hyperparams
    params = [w + update for w, update in zip(WEIGHTS, updates, strict=False)]
    assert_close((state.params, metrics), (params, expected), 1e-4)
    before = mt.fingerprint((state.params, state.opt_state))
    state, metrics = step(state, np.nan * X[1])
    assert metrics["skipped"] == 1
    check_replicas(state)
    assert mt.fingerprint((state.params, state.opt_state)) == before


@pytest.mark.slow
def test_bfloat16_parameters_and_clipping():
    params = [w.astype(jnp.bfloat16) for w in WEIGHTS]
    check(params=params, batches=X.astype(jnp.bfloat16), clip_norm=0.1, rtol=3e-2, ema_decay=0.9)


@pytest.mark.slow
def test_parameters_without_arrays():
    # The lie: an error of JAX about concatenating nothing, where it works without stages.
    more = {"clip_norm": 1.0, "skip_nonfinite": True, "diagnostics": True}
    more["extra_metrics"] = ["gradient_norm"]
    loss = lambda params, x: mt.cut(x).sum(1)
    _, metrics = check(loss, params={}, batches=X[:1], stages=2, devices=2, **more)
    assert metrics["gradient_norm"] == 0
    assert metrics["finite_params"].shape == (0,)


@pytest.mark.slow
def test_trap_clipping_over_stages_for_many_steps():
    # torchtitan#4312: the norm added up in another order parts from step 15 on.
    batches = np.tile(X, (34, 1, 1))
    options = {"clip_norm": 0.002, "optimizer": optax.sgd(0.1, momentum=0.9)}
    one, metrics = train(
        make(devices=1, extra_metrics=["gradient_norm"], **options), batches=batches
    )
    assert metrics["gradient_norm"] > 0.1  # so that it is clipped to the end
    assert int(one.step) == 102
    three, _ = train(make(devices=3, **options), batches=batches)
    assert mt.fingerprint(three.params) == mt.fingerprint(one.params)
    check(batches=batches[:30], **options)


@pytest.mark.slow
def test_trap_tied_weights_over_first_and_last_stage():
    """pytorch#176076, Megatron-LM#844, torchtitan#4486: counted twice in the norm, or one moves."""

    def tied(params, batch):
        h = mt.cut(jnp.tanh(batch @ params["tied"]))
        return ((h @ params["own"] @ params["tied"].T - batch) ** 2).sum(1)

    params = {"tied": WEIGHTS[0], "own": WEIGHTS[1]}
    step = make(tied, optax.sgd(1.0), stages=2, devices=2, clip_norm=0.1)
    state, _ = step(step.init(params), X[0])
    gradients = jax.grad(lambda p: tied(p, X[0]).mean())(params)
    norm = np.sqrt(sum((np.asarray(g, np.float64) ** 2).sum() for g in gradients.values()))
    assert norm > 1
    for name, gradient in gradients.items():
        moved = state.params[name] - params[name]
        np.testing.assert_allclose(moved, -0.1 / norm * gradient, rtol=2e-4, atol=1e-6)
    assert state.params["tied"].devices() == {mt.devices(2)[0]}


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


def test_a_replica_with_other_bits_is_named():
    # The lie: replicas of a stage that drift apart unnoticed.
    step = make(layout=(2, 1), devices=2)
    state, _ = train(step, batches=X[:1])
    check_replicas(state)
    block = state.kept.parts().blocks[1][2]
    block.params[2] = block.params[2] + 1
    with pytest.raises(mt.StateError, match=r"cpu:1 holds .* in state\.params\[2\] than cpu:0"):
        check_replicas(state)


def test_trap_a_resume_on_another_layout(tmp_path):
    # torchtitan#474: a checkpoint that only the layout that made it can read.
    step = make(devices=3, ema_decay=0.9, clip_norm=0.1)
    state, _ = train(step, batches=X[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        undisturbed = mt.fingerprint(step(state, X[2])[0])
        there = make(devices=2, ema_decay=0.9, clip_norm=0.1, layout=(2, 1))
        restored = checkpoints.restore(like=there.init(WEIGHTS)).state
        assert mt.fingerprint(there(restored, X[2])[0]) == undisturbed
        whole = make(devices=2, stages=None, ema_decay=0.9, clip_norm=0.1)
        state, _ = whole(checkpoints.restore(like=whole.init(WEIGHTS)).state, X[2])
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
        ({"optimizer": optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1)), "stages": 2,
          "devices": 2}, ArgumentError, r"of stages \[0, 1\].*clip_norm="),
        ({"optimizer": optax.MultiSteps(optax.sgd(0.1), 2)}, ArgumentError, "more towers"),
    ],
)  # fmt: skip
def test_what_does_not_go_together_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        train(make(**options))


@pytest.mark.slow
def test_trap_towers_with_unequal_token_counts():
    # torchtitan#1733, DeepSpeed#7773: towers with other numbers of tokens weigh alike.
    def loss(params, batch):
        mask = batch > -1
        return mt.ratio(losses(params, batch)[:, None] * mask, mask) + 0.1 * (params[0] ** 2).sum()

    state, _ = check(loss, optax.sgd(0.1), batches=(X[0], X[1]))
    one = train(make(loss, optax.sgd(0.1), devices=1), batches=(X[0], X[1]))[0]
    assert mt.fingerprint(one) == mt.fingerprint(state)
    ragged = mt.train_step(
        lambda p, b: mt.ratio(losses(p, b), b[:, 0] ** 2), optax.sgd(0.1), towers=3, stages=2,
        devices=2, global_batch=8,
    )  # fmt: skip
    state, metrics = ragged(ragged.init(WEIGHTS), X[0][:7])
    whole = lambda params: losses(params, X[0][:7]).sum() / (X[0][:7, 0] ** 2).sum()
    total, gradients = jax.value_and_grad(whole)(WEIGHTS)
    np.testing.assert_allclose(metrics["loss"], total, rtol=1e-5)
    for new, old, gradient in zip(state.params, WEIGHTS, gradients, strict=True):
        np.testing.assert_allclose((old - new) / 0.1, gradient, rtol=2e-4, atol=2e-5)


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


def test_states_and_batches_in_other_forms():
    step = make(devices=2, ema_decay=0.9)
    state, _ = train(step, batches=X[:1])
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
    params = [jnp.asarray(w) for w in WEIGHTS]
    step = make(devices=1)
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


STACKED = {"layers": np.stack([*WEIGHTS, *WEIGHTS[::-1]]), "head": np.ones(4, np.float32)}


def scanned(params, batch):
    def layer(h, w):
        return jnp.tanh(h @ w) + h, None

    h, _ = jax.lax.scan(layer, batch, params["layers"])
    return (h @ params["head"]) ** 2


@pytest.mark.slow
def test_a_scan_over_layers_keeps_each_layer_with_its_stage(tmp_path):
    # The lie: a scan is cut, and the first stage still has all layers.
    options = {"clip_norm": 0.5, "ema_decay": 0.9, "skip_nonfinite": True, "diagnostics": True}
    state, metrics = check(scanned, params=STACKED, **options)
    assert metrics["finite_params"].shape == (2,)
    kept = [block.params for block in state.kept.parts().blocks[0]]
    assert [block[1].shape for block in kept] == [(2, 4, 4)] * 3
    found = {mt.fingerprint((state, metrics))}
    for layout in ((1, 1), (2, 2)):
        step = make(scanned, devices=4, layout=layout, **options)
        other, metrics = train(step, STACKED, X[:2])
        with Checkpoints(tmp_path / str(layout)) as checkpoints:
            checkpoints.save(2, other, {})
            other = checkpoints.restore(like=step.init(STACKED)).state
        other, metrics = step(other, X[2])
        found.add(mt.fingerprint((other, metrics)))
    assert len(found) == 1


@pytest.mark.slow
def test_a_scan_with_an_optimizer_that_looks_at_whole_leaves():
    # Its norms are over all layers: they stay together.
    state, _ = check(scanned, optax.lamb(0.05), params=STACKED)
    assert state.params["layers"].shape == (6, 4, 4)


def _keep_first(params):
    """The first weights, and numbers that no update ever changes."""
    return {"first": params, "rate": jax.tree.map(jnp.ones_like, params), "count": jnp.zeros(())}


def _pull_back(gradients, state, params):
    gradients = jax.tree.map(
        lambda g, p, first, rate: rate * (g + 0.1 * (p - first)),
        *(gradients, params, state["first"], state["rate"]),
    )
    return gradients, {**state, "count": state["count"] + 1}


def _by_ndim(tree):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, tree)


def _by_size(tree):
    return jax.tree.map(lambda leaf: leaf.size > 20, tree)


KEEPS_FIRST = optax.GradientTransformation(_keep_first, _pull_back)


@pytest.mark.slow
def test_state_that_never_changes_is_split_with_its_stacked_parameter():
    # The lies: all layers of it in every stage, so that shapes do not fit; one stage's layers
    # pulled to the first weights of another.
    stacked = {**STACKED, "layers": STACKED["layers"][:4]}
    optimizer = optax.chain(KEEPS_FIRST, optax.sgd(0.1, momentum=0.9))
    state, _ = check(scanned, optimizer, stacked, X[:2], stages=2, devices=1, towers=2)
    np.testing.assert_array_equal(state.opt_state[0]["first"]["layers"], stacked["layers"])
    kept = state.kept.parts().blocks[0]
    assert [sorted(leaf.shape for leaf in own.opt_state.values()) for own in kept] == [
        [(2, 4, 4)] * 3,
        [(2, 4, 4)] * 3 + [(4,)] * 3,
    ]
    other, _ = train(make(scanned, optimizer, 2, 2, 2), stacked, X[:2])
    assert mt.fingerprint(other) == mt.fingerprint(state)


@pytest.mark.slow
def test_state_that_never_changes_is_where_its_parameter_is():
    # The lie: the first weights of all stages on the last one, and copied to each at every step.
    optimizer = optax.chain(
        KEEPS_FIRST, optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
    )
    state, _ = check(optimizer=optimizer, batches=X[:2])
    for kept in (state.opt_state[0]["first"], state.opt_state[0]["rate"]):
        assert [leaf.devices() for leaf in kept] == [{device} for device in mt.devices(3)]
    assert set(state.kept.parts().head.opt_state) == {0, 7, 8, 9}  # counts and rates
    one, _ = train(make(optimizer=optimizer, devices=1), batches=X[:2])
    assert mt.fingerprint(one) == mt.fingerprint(state)


@pytest.mark.slow
def test_a_rate_of_one_stage_alone_is_used_as_written_there():
    # The lie: a rate that never changes and that one group has, left at its first value.
    rates = {
        "first": optax.inject_hyperparams(optax.sgd)(learning_rate=0.1),
        "rest": optax.inject_hyperparams(optax.adam)(learning_rate=0.01),
    }
    optimizer = optax.multi_transform(rates, lambda params: ["first", "rest", "rest"])

    def run(**options):
        step = make(optimizer=optimizer, **options)
        state, _ = train(step, batches=X[:1])
        inner = dict(state.opt_state.inner_states)
        kept = inner["first"].inner_state
        kept = kept._replace(hyperparams={"learning_rate": jnp.float32(0.4)})
        inner["first"] = inner["first"]._replace(inner_state=kept)
        changed = state.replace(opt_state=state.opt_state._replace(inner_states=inner))
        return step(changed, X[1])[0]

    found, one = run(stages=2, devices=2), run(stages=2, devices=1)
    assert mt.fingerprint(found) == mt.fingerprint(one)
    params, opt_state = WEIGHTS, optimizer.init(WEIGHTS)
    for n, batch in enumerate(X[:2]):
        gradients = jax.grad(lambda p, x: losses(p, x).mean())(params, batch)
        if n:
            opt_state.inner_states["first"].inner_state.hyperparams["learning_rate"] = 0.4
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
    assert_close(found.params, params, rtol=1e-4)


@pytest.mark.slow
def test_stacked_layers_in_stages_are_trained_as_by_plain_optax():
    # The lies: another stage's layers, or their first weights or squares; a cast that is made in
    # one stage alone.
    stacked = {"layers": STACKED["layers"][:4], "head": STACKED["head"], "shift": WEIGHTS[0][:1]}
    optimizer = optax.chain(KEEPS_FIRST, optax.trace(0.9), optax.scale(-0.1))

    def loss(params, batch):
        shift = params["shift"].T[:, 0]
        layer = lambda h, w: (jnp.tanh(h @ w) + h, None)
        h, _ = jax.lax.scan(layer, batch + shift, params["layers"])
        return (h @ params["head"] + shift.sum()) ** 2

    @jax.jit
    def plain(params, opt_state, average, batch):
        total, gradients = jax.value_and_grad(lambda p: loss(p, batch).mean())(params)
        norm = jnp.sqrt(sum((g**2).sum() for g in jax.tree.leaves(gradients)))
        gradients = jax.tree.map(lambda g: g * 0.5 / norm, gradients)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        params = optax.apply_updates(params, updates)
        average = jax.tree.map(lambda a, p: 0.9 * a + 0.1 * p, average, params)
        return (params, opt_state, average), {"loss": total, "gradient_norm": norm}

    step = make(
        loss, optimizer, stages=2, devices=2, towers=2, clip_norm=0.5, ema_decay=0.9,
        diagnostics=True, extra_metrics=["gradient_norm"],
    )  # fmt: skip
    state, expected = step.init(stacked), (stacked, optimizer.init(stacked), stacked)
    for batch in X[:2]:
        state, metrics = step(state, batch)
        expected, wanted = plain(*expected, batch)
        assert wanted["gradient_norm"] > 0.5
        assert metrics["finite_params"].tolist() == [True] * 3
        found = (state.params, state.opt_state, state.ema_params)
        assert_close((found, {name: metrics[name] for name in wanted}), (expected, wanted), 2e-4)
    assert [block.params[1].shape for block in state.kept.parts().blocks[0]] == [(2, 4, 4)] * 2
    assert state.opt_state[0]["first"]["shift"].devices() == state.params["shift"].devices()
    made, _ = step(step.init(lambda: jax.tree.map(jnp.positive, stacked)), X[0])
    given, _ = step(step.init(stacked), X[0])
    assert mt.fingerprint(made) == mt.fingerprint(given)


def _one_late(gradients, state, params=None):
    return state["before"], {"before": state["last"], "last": gradients}


def test_state_is_kept_with_its_parameter_whatever_it_depends_on():
    # The lies: stacks of other lengths that are all split like the first; state that depends on
    # other state alone, on the last device.
    params = {"long": jnp.zeros((4, 2)), "one": jnp.zeros(3), "short": jnp.zeros((2, 2))}
    begin = lambda params: {"before": params, "last": params}
    optimizer = optax.GradientTransformation(begin, _one_late)
    loss = LossFunction.of(losses)
    step = StepParts(loss, optimizer, None, "mean", False, False, None, "mean")
    rows = {0: {0: (0, 2), 1: (2, 4)}, 2: {0: (0, 1), 1: (1, 2)}}
    fields = Fields(jnp.int32(0), params, begin(params), None, (), None)
    homes = WholeUpdate(step, fields, ((SPLIT, 1, SPLIT), rows), jnp.float32(0)).homes
    assert homes.opt_state == (SPLIT, 1, SPLIT) * 2
    assert homes.rows_of_state == {0: rows[0], 2: rows[2], 3: rows[0], 5: rows[2]}


def _over_their_number(updates, state, params=None):
    return jax.tree.map(lambda u: u / jnp.sum(jnp.ones_like(u)), updates), state


def _beside_whole_arrays(params):
    return params["layers"] + jnp.zeros((4, 4, 4))


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (optax.adamw(0.1, mask=_by_ndim), True),
        (optax.adamw(0.1, mask=_by_size), False),
        (optax.masked(optax.adam(0.1), _by_ndim), True),
        (optax.masked(optax.adam(0.1), _by_size), False),
        (optax.sm3(0.1), False),
        (optax.adafactor(0.1, min_dim_size_to_factor=2), False),
        (optax.lamb(0.1), False),
        (optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(0)), optax.sgd(0.1)), False),
        (KEEPS_FIRST, True),
        (optax.GradientTransformation(lambda params: (), _over_their_number), False),
        (optax.GradientTransformation(_beside_whole_arrays, optax.sgd(0.1).update), False),
    ],
    ids=["decay by ndim", "decay by size", "by ndim", "by size", *("sm3", "adafactor", "lamb"),
         "noise", "first weights", "number", "whole arrays"],
)  # fmt: skip
def test_which_optimizers_split_stacked_parameters(optimizer, expected):
    # The lie: a trial on halves passes a mask that is another one for a stage's quarter.
    params = {"layers": jax.ShapeDtypeStruct((4, 4, 4), jnp.float32), "head": STACKED["head"]}
    rows = {1: {stage: (stage, stage + 1) for stage in range(4)}}
    assert may_be_split(optimizer, params, rows) is expected


def test_rows_of_other_shapes_are_another_program():
    """Lie: JAX's words about argument types, for sentences of another length."""
    loss = lambda w, x: (jnp.tanh(x.mean(1, keepdims=True) @ w["a"]) @ w["b"]).sum(1)
    params = {"a": np.ones((1, 4), np.float32), "b": np.ones((4, 1), np.float32)}
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, towers=2, stages=2)
    state = step.init(params)
    for columns in (4, 6, 4):
        state, metrics = step(state, np.ones((4, columns), np.float32))
    assert float(metrics["loss"]) < 4 * np.tanh(1)


def test_what_is_joined_from_stages_cannot_be_written_into():
    """Lie: a write is accepted, and changes a copy alone."""
    whole = _side_by_side([np.zeros(2), np.ones(2)], {0: (0, 2), 1: (2, 4)})
    with pytest.raises(ValueError, match="read-only"):
        whole[0] = 1


def test_a_skipped_step_keeps_the_optimizers_count_and_the_model_state():
    """Lie: what belongs to no stage is chosen by the program for something else."""

    def loss(params, x, *, model_state):
        hidden = mt.cut(jnp.tanh(x @ params[0]))
        return (hidden @ params[1]) ** 2, {}, {"n": model_state["n"] + 1}

    step = mt.train_step(loss, optax.adam(0.1), devices=1, towers=1, stages=2, skip_nonfinite=True)
    params = [np.ones((3, 2), np.float32), np.ones(2, np.float32)]
    state = step.init(params, model_state={"n": np.float32(0)})
    for factor in (1, np.nan, 1):
        state, _ = step(state, np.full((2, 3), factor, np.float32))
    assert (int(state.opt_state[0].count), float(state.model_state["n"])) == (2, 2)


def test_layers_of_a_loop_that_runs_backwards_come_back_in_their_order():
    """Lie: the layers of the first stage, which are the last ones, come first."""

    def loss(stack, x):
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack, reverse=True)
        return h.sum(1)

    draw = np.random.default_rng(0)
    stack, x = (draw.normal(size=size).astype(np.float32) for size in ((4, 3, 3), (2, 3)))
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=1, stages=2)
    state, _ = step(step.init(stack), x)
    gradient = jax.grad(lambda stack: loss(stack, x).mean())(stack)
    np.testing.assert_allclose(state.params, stack - 0.1 * gradient, rtol=1e-4)

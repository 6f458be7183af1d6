"""shard_update: the same bits on any number of devices, the same state outside, less memory."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.blocks.state import BlockState
from multitower.training.checkpoints.checkpoint import Checkpoints
from processes import run_fork

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")

ROWS = np.random.default_rng(0).normal(size=(3, 14, 4)).astype(np.float32)  # 14 rows on 4 towers
PARAMS = {
    "in": np.random.default_rng(1).normal(size=(4, 9)).astype(np.float32),
    "out": np.ones(9, np.float32),
    "shift": np.float32(0.5),
}


def losses(params, batch, *, rng, model_state):
    kept = jax.random.bernoulli(rng, 0.8, batch.shape)
    hidden = jnp.tanh((batch * kept) @ params["in"])
    loss = (hidden @ params["out"] + params["shift"]) ** 2
    return loss, {"hidden": hidden.mean(1)}, 0.9 * model_state + 0.1 * hidden.mean()


def make(devices=2, optimizer=None, loss=losses, **options):
    optimizer = optimizer or optax.adamw(optax.linear_schedule(0.1, 0.05, 3))
    return mt.train_step(
        loss, optimizer, devices=devices, towers=4, global_batch=16, ema_decay=0.9, **options
    )


def first(step, params=PARAMS):
    return step.init(params, rng=jax.random.key(0), model_state=jnp.float32(0))


def train(step, state, batches=ROWS):
    for batch in batches:
        state, metrics = step(state, batch)
    return state, metrics


FULL = [np.concatenate([rows, rows[:2]]) for rows in ROWS]


@pytest.mark.slow
def test_law_l3_the_same_bits_on_any_number_of_devices():
    # The lie: blocks that are cut by device.
    mt.testing.assert_same_bits(
        losses, optax.adamw(0.1), PARAMS, FULL, devices=(1, 3), towers=4, ema_decay=0.9,
        rng=jax.random.key(0), model_state=jnp.float32(0), shard_update=True, diagnostics=True,
    )  # fmt: skip


# Every day: momentum in steps/state/test_changed_state.py, adam in steps/test_clip_norm.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        optax.adamw(0.1, mask={"in": True, "out": False, "shift": False}),
        optax.sgd(0.1, momentum=0.9),
        optax.lion(1e-2),
        optax.MultiSteps(optax.adam(0.1), 2),
    ],
    ids=["mask by name", "momentum", "lion", "MultiSteps"],
)
def test_it_equals_the_whole_update(optimizer):
    # The lies: a block that never reaches its device; a schedule that counts blocks.
    whole, _ = train(step := make(1, optimizer), first(step), FULL)
    cut, _ = train(step := make(optimizer=optimizer, shard_update=True), first(step), FULL)
    assert jax.tree.structure(whole) == jax.tree.structure(cut)
    for (path, a), b in zip(
        jax.tree_util.tree_flatten_with_path(whole)[0], jax.tree.leaves(cut), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert (a.shape, a.dtype) == (b.shape, b.dtype), name
        if a.dtype == np.float32:
            np.testing.assert_allclose(a, b, rtol=2e-4, atol=2e-6, err_msg=name)


@pytest.mark.slow
def test_ragged_batches_and_16_bit_parameters():
    def per_row(params, batch):
        return (batch @ params.astype(jnp.float32)) ** 2

    params = jnp.linspace(-1, 1, 4).astype(jnp.bfloat16)
    found = []
    for devices in (1, 2):  # of three towers, so that one device has more
        step = mt.train_step(
            per_row, optax.adam(0.1), devices=devices, towers=3, ema_decay=0.5, shard_update=True
        )
        state = step.init(params)
        for batch in (ROWS[0], ROWS[1][:5], ROWS[2]):
            state, _ = step(state, batch)
        assert state.params.dtype == jnp.bfloat16
        assert state.ema_params.dtype == jnp.float32
        found.append(mt.fingerprint(state))
    assert len(set(found)) == 1


@pytest.mark.slow
def test_law_l4_a_checkpoint_goes_on_anywhere_in_either_form(tmp_path):
    # The lie: a checkpoint of blocks that only as many devices can read.
    step = make(3, shard_update=True)
    state, _ = train(step, first(step), FULL[:2])
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state, {})
        through = train(step, state, FULL[2:])[0]
        undisturbed = mt.fingerprint(through)
        there = make(2, shard_update=True)
        restored = checkpoints.restore(like=first(there)).state
        assert mt.fingerprint(train(there, restored, FULL[2:])[0]) == undisturbed
        whole = make(1)
        restored = checkpoints.restore(like=first(whole)).state
        state, _ = train(whole, restored, FULL[2:])
    assert int(state.step) == 3
    assert int(state.opt_state[0].count) == 3
    for one, other in zip(*map(jax.tree.leaves, (state.params, through.params)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-4, atol=2e-6)


MEMORY = """
import jax, numpy as np, optax
import multitower as mt

mt.configure(simulated_devices=4)
params = np.zeros((1000, 100), np.float32)
for shard_update in (False, True):
    step = mt.train_step(
        lambda w, batch: (batch @ w).sum(1), optax.adam(0.1), towers=4, ema_decay=0.9,
        shard_update=shard_update,
    )
    state = step.init(params)
    for _ in range(2):
        state, _ = step(state, np.ones((4, 1000), np.float32))
    jax.block_until_ready(state.kept.parts())
    held = dict.fromkeys(jax.devices(), 0)
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    print(*(held[device] / params.nbytes for device in jax.devices()))
    del state, step, array, shard
"""


@pytest.mark.slow
def test_it_saves_memory_on_every_device():
    # The lie: "sharded", and everything is still everywhere. In a process of its own, as arrays
    # that other tests have left behind would count.
    whole, sharded = run_fork("-c", MEMORY).splitlines()
    # Parameters, two moments and a moving average; the last three in quarters.
    assert [float(x) for x in whole.split()] == pytest.approx([4] * 4, rel=0.01)
    assert [float(x) for x in sharded.split()] == pytest.approx([1 + 3 / 4] * 4, rel=0.01)


def by_dimensions(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)


@pytest.mark.parametrize(
    "optimizer",
    [
        optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
        optax.lamb(0.1),
        optax.adafactor(0.1),
        optax.adamw(0.1, weight_decay=0.3, mask=by_dimensions),
        optax.chain(optax.add_noise(1.0, 0.5, 0), optax.sgd(0.1)),
        optax.scale_by_factored_rms(min_dim_size_to_factor=4),
    ],
    ids=["global norm", "lamb", "adafactor", "mask by shape", "noise", "factors"],
)
def test_an_optimizer_that_mixes_elements_is_refused(optimizer):
    # The lie: a norm over a block, taken for the norm over all.
    with pytest.raises(mt.ArgumentError, match="needs an optimizer that works element by element"):
        first(make(optimizer=optimizer, shard_update=True))


def test_state_that_is_no_block_of_a_parameters_state_is_named():
    optimizer = optax.GradientTransformation(
        lambda params: jax.tree.map(lambda leaf: jnp.zeros(leaf.ndim + 1), params),
        lambda updates, state, params=None: (updates, state),
    )
    said = r"float32\[3\] for a whole parameter and float32\[2\] for a block"
    with pytest.raises(mt.ArgumentError, match=said):
        first(make(optimizer=optimizer, shard_update=True))


@pytest.mark.slow
def test_an_optimizer_may_keep_a_typed_key():
    """Lies: a state that cannot be read, a key of one tower that another tower overwrites."""

    def update(updates, key, params=None):
        drawn = jax.random.uniform(key)
        return jax.tree.map(lambda leaf: leaf * drawn, updates), jax.random.split(key)[0]

    scaled = optax.GradientTransformation(lambda params: jax.random.key(5), update)
    optimizer = optax.chain(scaled, optax.trace(0.9), optax.scale(-0.1))
    step = make(optimizer=optimizer, shard_update=True)
    state, _ = train(step, first(step), ROWS[:2])
    assert state.opt_state[0].shape == ()
    resumed, _ = step(jax.tree.map(jnp.copy, state), ROWS[2])
    state, _ = step(state, ROWS[2])
    assert mt.fingerprint(resumed) == mt.fingerprint(state)
    key = jax.random.split(jax.random.split(jax.random.split(jax.random.key(5))[0])[0])[0]
    np.testing.assert_array_equal(*map(jax.random.key_data, (state.opt_state[0], key)))
    whole, _ = train(step := make(1, optimizer), first(step))
    np.testing.assert_allclose(state.params["in"], whole.params["in"], rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_state_of_another_optimizer_is_refused():
    # The lie: leaves are taken in their order, so the mean gradient of "a" becomes that of "b".
    def frozen(name):
        labels = {"a": "trained", "b": "trained", name: "frozen"}
        kinds = {"trained": optax.adam(0.1), "frozen": optax.set_to_zero()}
        return optax.multi_transform(kinds, labels)

    losses = lambda p, x: (x @ p["a"] + x @ p["b"] - 1) ** 2
    weights = {"a": np.ones(3, np.float32), "b": np.ones(3, np.float32)}
    options = {"towers": 2, "devices": 2, "shard_update": True}
    first, second = (mt.train_step(losses, frozen(name), **options) for name in "ba")
    state, _ = first(first.init(weights), np.ones((8, 3), np.float32))
    with pytest.raises(mt.StateError, match=r"mu\['b'\] is missing"):
        second(state, np.ones((8, 3), np.float32))
    state = state.replace(opt_state=frozen("a").init(state.params))
    state, _ = second(state, np.ones((8, 3), np.float32))
    assert int(state.step) == 2


def test_options_that_exclude_each_other():
    with pytest.raises(
        mt.ArgumentError,
        match=r"as skip_nonfinite \(on_nonfinite='skip' of a Trainer\) would: leave that out",
    ):
        make(shard_update=True, skip_nonfinite=True)


@pytest.mark.slow
def test_nothing_compiles_after_the_second_step():
    compiled = []

    def listen(name, duration, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    step = make(2, shard_update=True)
    state, _ = train(step, first(step), FULL[:2])
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        train(step, state, ROWS[2:])  # a loss per row: the ragged batch fits the same programs
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled


def test_a_trainer_never_joins_the_state(monkeypatch):
    # The lie: a look at the shapes of the parameters puts all of the state on every device.
    monkeypatch.setattr(BlockState, "_join", lambda *_: pytest.fail("joined the whole state"))
    options = {"towers": 2, "devices": 2, "shard_update": True, "hooks": []}
    trainer = mt.Trainer(lambda w, x: (w - x) ** 2, optax.sgd(0.1), **options)
    state = trainer.fit(np.float32(0), lambda first: iter(FULL[0][None, :2, 0][first:]), steps=1)
    assert int(state.step) == 1

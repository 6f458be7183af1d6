"""Asynchronous updates in a fixed rotation: who computes with what is fixed by the rotation.

The lies to catch: a gradient on the newest parameters where a stale one is due, a version that an
update has overwritten, an order that the clock decides, a resume that forgets who has seen what.
"""

import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import ArgumentError
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.rotation.turns import Turns
from multitower.towers.placement import contiguous
from rotations import W, X, Y, batch_of, losses, make, train
from tower_keys import tower_key

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")


def replayed(rotation, num_groups, scale=lambda staleness: 1.0):
    """The rotation in float64, written down from the definition."""
    newest, trace = W.astype(np.float64), np.zeros(3)
    versions = [newest] * num_groups
    made = [0] * num_groups
    rows = []
    for k in range(len(X)):
        group = rotation[k % len(rotation)]
        x, y, version = X[k].astype(np.float64), Y[k].astype(np.float64), versions[group]
        error = x @ version - y
        gradient = 2 * x.T @ error / len(y)
        trace = gradient + 0.9 * trace
        staleness = k - made[group]
        newest = newest - scale(staleness) * 0.05 * trace
        versions[group], made[group] = newest, k + 1
        rows.append(((error**2).mean(), staleness))
    return newest, versions, made, rows


@pytest.mark.parametrize(
    ("towers", "options"),
    [
        (3, {}),
        (4, {"max_staleness": 1}),
        (3, {"rotation": (0, 1, 0, 2)}),
        (2, {"stale_scale": lambda staleness: 1 / (1 + staleness)}),
    ],
    ids=["each", "groups", "more turns for one", "scaled"],
)
def test_equals_a_numpy_replay_of_the_rotation(towers, options):
    num_groups = options.get("max_staleness", towers - 1) + 1
    rotation = options.get("rotation", range(num_groups))
    scale = options.get("stale_scale", lambda staleness: 1.0)
    newest, versions, made, rows = replayed(rotation, num_groups, scale)
    step = make(towers=towers, devices=2 if towers == 4 else 1, **options)
    state, seen = train(step, step.init({"w": W}), range(12))
    np.testing.assert_allclose(state.params["w"], newest, rtol=2e-5)
    np.testing.assert_allclose(state.local["params"]["w"], versions, rtol=2e-5)
    assert list(state.local["step"]) == made
    with pytest.raises(ValueError, match="read-only"):
        state.local["step"][0] = 9
    assert int(state.step) == 12
    for metrics, (loss, staleness) in zip(seen, rows, strict=True):
        np.testing.assert_allclose(metrics["loss"], loss, rtol=2e-5)
        assert metrics["staleness"].dtype == np.int32
        assert int(metrics["staleness"]) == staleness


@pytest.mark.slow
def test_no_staleness_is_synchronous_training():
    # The lies: the key of one tower for all of a group; the sum over towers for their mean.
    def loss(params, batch, *, rng):
        drawn = jax.random.uniform(rng)
        return batch["scale"] * drawn * losses(params, batch), {"drawn": drawn}

    step = make(loss, towers=4, max_staleness=0, ema_decay=0.5)
    plain = mt.train_step(loss, optax.sgd(0.05, momentum=0.9), towers=4, devices=1, ema_decay=0.5)
    found = []
    for one in (step, plain):
        state = one.init({"w": W}, rng=jax.random.key(0))
        found.append(train(one, state, range(3), scale=np.float32(0.9)))
    (state, seen), (expected, wanted) = found
    with pytest.raises(ValueError, match="read-only"):
        state.local["params"]["w"][0] = 0  # it would be lost
    assert mt.fingerprint(state.replace(local=None)) == mt.fingerprint(expected)
    for metrics in seen:
        assert int(metrics.pop("staleness")) == 0
    assert mt.fingerprint(seen) == mt.fingerprint(wanted)


def rich_loss(params, batch, *, rng, model_state):
    """Dropout, statistics like BatchNorm's, a ratio and a mean among the metrics."""
    kept = batch["x"] * jax.random.bernoulli(rng, 0.8, batch["x"].shape)
    mean = kept.mean(0)
    each = ((kept - model_state["mean"]) @ params["w"] - batch["y"]) ** 2
    new = {"mean": 0.9 * model_state["mean"] + 0.1 * mean, "calls": model_state["calls"] + 1}
    metrics = {"weighted": mt.ratio(each * batch["y"] ** 2, batch["y"] ** 2)}
    return mt.ratio(each, jnp.ones_like(each)), metrics, new


def rich_run(devices, towers, max_staleness):
    step = make(
        rich_loss,
        optax.adam(0.1),
        towers=towers,
        max_staleness=max_staleness,
        devices=devices,
        ema_decay=0.9,
        clip_norm=1.0,
        global_batch=8,
    )
    first = {"mean": np.zeros(3, np.float32), "calls": np.int32(0)}
    state = step.init({"w": W}, model_state=first, rng=jax.random.key(1))
    state, seen = train(step, state, range(6))
    state, metrics = step(state, jax.tree.map(lambda rows: rows[:5], batch_of(6)))  # ragged
    return state, [*seen, metrics]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("towers", "max_staleness", "devices"),
    [(4, 1, (1, 3)), (8, 3, (1, 2, 3, 8)), (8, 7, (1, 2, 3, 8))],
)
def test_same_bits_on_any_number_of_devices(towers, max_staleness, devices):
    # On 3 devices a group spans two of them; on 8 groups of two towers all do.
    found = {n: mt.fingerprint(rich_run(n, towers, max_staleness)) for n in devices}
    assert len(set(found.values())) == 1, found


@pytest.mark.slow
def test_devices_that_slow_down_at_random_change_nothing():
    """The lie: an order that the clock decides."""
    devices = mt.devices(4)
    busy = jax.jit(lambda x, n: jax.lax.fori_loop(0, n, lambda _, x: jnp.sin(x), x))
    rows = [jax.device_put(np.ones(10_000, np.float32), device) for device in devices]
    jax.block_until_ready([busy(x, 1) for x in rows])

    def run(seed):
        draw = np.random.default_rng(seed)
        step = make(rich_loss, optax.adam(0.1), towers=8, devices=4, ema_decay=0.9)
        first = {"mean": np.zeros(3, np.float32), "calls": np.int32(0)}
        state = step.init({"w": W}, model_state=first, rng=jax.random.key(1))
        for number in range(100):
            if seed:  # what a device has to do before the tower whose turn it is
                busy(rows[draw.integers(4)], int(draw.integers(300)))
            state, _ = step(state, batch_of(number % 12))
        return mt.fingerprint(state)

    assert run(1) == run(2) == run(0)


@pytest.mark.slow
@pytest.mark.parametrize("make_key", [jax.random.key, jax.random.PRNGKey])
def test_law_l6_keys_in_the_model_state_differ_in_every_tower(make_key):
    # The lie: T towers that each begin with the same key, and T updates with the same mask.
    def loss(w, x, *, model_state):
        key, own = jax.random.split(model_state["key"])
        drawn = jax.random.uniform(own), jax.random.uniform(model_state["fixed"])
        return w * x.sum(1), dict(zip(("drawn", "fixed"), drawn, strict=True)), {
            **model_state, "key": key,
        }  # fmt: skip

    first = {"key": make_key(0), "fixed": make_key(1)}
    step = make(loss, towers=4, max_staleness=1, devices=2)
    state, found, expected = step.init(jnp.float32(1), model_state=first), [], []
    keys = [tower_key(first["key"], group) for group in (0, 2)]  # of the first tower of each
    for number in range(6):
        state, metrics = step(state, X[number])
        found.append((metrics["drawn"], metrics["fixed"]))
        group = number % 2
        fixed = tower_key(first["fixed"], 2 * group)
        draws = [  # of both towers, whose mean the metric is
            (jax.random.uniform(jax.random.split(tower_key(keys[group], t))[1]),
             jax.random.uniform(tower_key(fixed, t)))
            for t in range(2)
        ]  # fmt: skip
        keys[group] = jax.random.split(keys[group])[0]
        expected.append(np.mean(draws, axis=0))
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    assert len({float(drawn) for drawn, _ in found}) == 6
    restored = state.replace(params=jnp.float32(2))
    assert mt.fingerprint(restored.local["model_state"]) == mt.fingerprint(
        {"key": jnp.stack(keys), "fixed": jnp.stack([tower_key(first["fixed"], n) for n in (0, 2)])}
    )


@pytest.mark.slow
def test_every_update_draws_its_own_random_numbers():
    def loss(w, x, *, rng):
        return w * x.sum(1), {"drawn": jax.random.uniform(rng)}

    step = make(loss, towers=2)
    state, drawn = step.init(jnp.float32(1), rng=jax.random.key(0)), []
    for number in range(4):
        state, metrics = step(state, X[number])
        drawn.append(float(metrics["drawn"]))
    key = jax.random.key(0)
    expected = [float(jax.random.uniform(jax.random.fold_in(key, k))) for k in range(4)]
    np.testing.assert_allclose(drawn, expected, rtol=1e-6)


def keeps_parameters():
    """An optimizer whose state is parameters: those that it was given last."""

    def update(gradients, state, params):
        return jax.tree.map(lambda g, old: -0.1 * (g + old), gradients, state), params

    return optax.GradientTransformation(lambda params: params, update)


@pytest.mark.parametrize("devices", [1, 3])
def test_no_update_overwrites_a_version(devices):
    # Trap: on one device all versions, the newest parameters and an optimizer's copy of them may
    # be one array, and a program that reuses its memory ends them all.
    step = make(optimizer=keeps_parameters(), devices=devices)
    state, _ = train(step, step.init({"w": W}), range(7))
    newest, last, versions = W.astype(np.float64), W.astype(np.float64), [W.astype(np.float64)] * 3
    for k in range(7):
        x, y = X[k].astype(np.float64), Y[k].astype(np.float64)
        gradient = 2 * x.T @ (x @ versions[k % 3] - y) / 8
        newest, last = newest - 0.1 * (gradient + last), newest
        versions[k % 3] = newest
    np.testing.assert_allclose(state.params["w"], newest, rtol=1e-4)
    np.testing.assert_allclose(state.local["params"]["w"], versions, rtol=1e-4)


def test_the_optimizer_and_the_newest_parameters_are_on_one_device():
    step = make(towers=3, devices=3, ema_decay=0.9)
    state, _ = train(step, step.init({"w": W}), range(4))
    home, *others = mt.devices(3)
    parts = state.kept.parts()
    assert {d for leaf in jax.tree.leaves(parts.home) for d in leaf.devices()} == {home}
    for device, version in zip([home, *others], parts.versions, strict=True):
        assert {d for leaf in jax.tree.leaves(version.copies) for d in leaf.devices()} == {device}


def test_an_update_sends_one_gradient_and_one_copy_of_the_parameters(monkeypatch):
    # The lie: versions that are sent to everybody, or an optimizer's state that travels.
    params = np.ones((3, 500), np.float32)
    step = make(lambda w, x: (x @ w).sum(1), towers=2, devices=2, ema_decay=0.9)
    state = step.init(params)
    for number in range(2):
        state, _ = step(state, X[number])
    sent, there = [], jax.device_put

    def counted(tree, target=None, **more):
        leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, jax.Array)]
        sent.extend(leaf.nbytes for leaf in leaves if leaf.devices() != {target})
        return there(tree, target, **more)

    monkeypatch.setattr(jax, "device_put", counted)
    for expected in (0, 2 * params.nbytes):  # at home, and from the other device and back
        state, _ = step(state, X[2])
        assert 0 <= sum(sent) - expected <= 16
        sent.clear()


def test_groups_are_neighbours_on_their_own_devices():
    turns = Turns.of(RotationOptions(3, None, None), contiguous(mt.devices(3), 8))
    devices = mt.devices(3)
    assert [one.devices for one in turns.groups] == [
        (devices[0],), (devices[1],), (devices[1], devices[2]), (devices[2],),
    ]  # fmt: skip
    assert [one.owners for one in turns.groups] == [(0, 0), (0, 0), (0, 1), (0, 0)]
    assert [turns.group_at(count) for count in range(5)] == [0, 1, 2, 3, 0]


@pytest.mark.slow
def test_a_held_up_tower_holds_up_neither_the_host_nor_the_next_tower():
    # The lie: "asynchronous" updates that are started one after the other has ended.
    go, ran = threading.Event(), []

    def wait(x):
        assert go.wait(60)
        return x

    def held(x):
        return x * jax.pure_callback(wait, jax.ShapeDtypeStruct((), np.float32), jnp.float32(1))

    # On two devices: XLA's CPU client runs a callback on one device in the caller's thread.
    hold = mt.make_parallel(held, devices=2)

    def loss(w, x, *, rng):  # the key depends on the number of updates, which the host knows
        jax.debug.callback(lambda tag: ran.append(int(tag)), x[0, 0])
        return x @ w + jax.random.uniform(rng)

    step = make(loss, optax.adam(0.1), towers=2, devices=2, global_batch=8, ema_decay=0.9)
    tagged = lambda tag: np.full((8, 3), tag, np.float32)
    go.set()
    state = step.init(W, rng=jax.random.key(0))
    for tag in (0, 1):
        state, metrics = step(state, tagged(tag))
    jax.block_until_ready([state.kept.parts(), hold(np.ones((16, 3), np.float32)), metrics])
    go.clear()
    late = hold(np.full((16, 3), 2, np.float32)).addressable_shards[0].data  # of group 0
    made, ended = [state], threading.Event()

    def go_on():
        for batch in (late, tagged(3)):
            made[0], _ = step(made[0], batch)
        ended.set()

    threading.Thread(target=go_on, daemon=True).start()
    is_started = ended.wait(20)
    deadline = time.monotonic() + 5
    while 3 not in ran and time.monotonic() < deadline:
        time.sleep(0.01)
    seen = list(ran)
    go.set()
    assert is_started  # the host has started both updates
    assert 3 in seen  # the next tower has its gradient
    assert 2 not in seen  # before the tower before it
    assert np.isfinite(made[0].params).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"updates": "async"}, "say 'synchronous' or 'asynchronous'"),
        ({"updates": "synchronous", "max_staleness": 1}, "max_staleness= is for asynchronous"),
        ({"updates": "synchronous", "max_staleness": 0}, "max_staleness= is for asynchronous"),
        ({"updates": "synchronous", "rotation": (0,)}, "rotation= is for asynchronous"),
        ({"updates": "synchronous", "stale_scale": abs}, "stale_scale= is for asynchronous"),
        ({"max_staleness": 2}, "4 towers do not divide into 3 groups.*=0, 1 or 3, or another"),
        ({"max_staleness": -1}, "a whole number, 0 or more"),
        ({"max_staleness": True}, "a whole number, 0 or more"),
        ({"rotation": 3}, r"such as \(0, 1, 0, 2\)"),
        ({"rotation": (0, 1)}, "name each of the 4 groups, 0 to 3, at least once"),
        ({"rotation": (0, 1, 2, 3, 4)}, "name each of the 4 groups"),
        ({"stale_scale": 0.5}, "a function of the staleness"),
        ({"momentum_correction": 0.9}, "momentum_correction=0.9: say True or False"),
        (
            {"updates": "synchronous", "momentum_correction": True},
            "momentum_correction= is for asynchronous",
        ),
        ({"shard_update": True}, "shard_update= exclude each other"),
        ({"stages": 2}, "stages= exclude each other"),
        ({"towers": None, "shard_params": True}, "shard_params= exclude each other"),
        ({"towers": None, "steps_per_call": 2}, "steps_per_call= exclude each other"),
    ],
    ids=str,
)
def test_options_that_make_no_sense(options, message):
    given = {"updates": "asynchronous", "towers": 4, **options}
    with pytest.raises(ArgumentError, match=message):
        mt.train_step(losses, optax.sgd(0.1), **given)


def test_groups_of_devices_are_checked_where_the_devices_are_known():
    with pytest.raises(ArgumentError, match="3 towers do not divide into 2 groups"):
        make(towers=None, devices=3, max_staleness=1)


def test_several_processes_are_refused(monkeypatch):
    monkeypatch.setattr("multitower.steps.rotation.options.are_several", lambda: True)
    with pytest.raises(ArgumentError, match="runs in one process"):
        make()


def test_towers_that_meet_are_refused():
    step = make(lambda w, x: (w * x - jax.lax.pmean(x.mean(), "towers")).sum(1), max_staleness=0)
    with pytest.raises(ArgumentError, match="a tower does not wait for others"):
        step(step.init(jnp.float32(1)), X[0][:6])

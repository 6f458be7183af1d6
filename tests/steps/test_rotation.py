"""Asynchronous updates in a fixed rotation: who computes with what is fixed by the rotation.

The lies to catch: a gradient on the newest parameters where a stale one is due, a version that an
update has overwritten, an order that the clock decides, a resume that forgets who has seen what.
"""

import itertools
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.errors import ArgumentError, CheckpointError, NonFiniteError, RunError, StateError
from multitower.steps.optimizing.optimizer import call_update
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.rotation.stale import for_stale_gradients
from multitower.steps.rotation.turns import Turns
from multitower.steps.step import TrainStep
from multitower.towers.placement import contiguous
from tower_keys import tower_key

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 8, 3)).astype(np.float32)
Y = RNG.normal(size=(12, 8)).astype(np.float32)
W = RNG.normal(size=3).astype(np.float32)


def losses(params, batch):
    return (batch["x"] @ params["w"] - batch["y"]) ** 2


def batch_of(number):
    return {"x": X[number], "y": Y[number]}


def make(loss=losses, optimizer=None, towers=3, devices=1, **options):
    return mt.train_step(
        loss,
        optimizer or optax.sgd(0.05, momentum=0.9),
        towers=towers,
        devices=devices,
        updates="asynchronous",
        **options,
    )


def train(step, state, numbers, **more):
    """Trains on these batches; returns the state and the metrics of every update."""
    seen = []
    for number in numbers:
        state, metrics = step(state, {**batch_of(number), **more})
        seen.append(metrics)
    return state, seen


# ---------------------------------------------------------------- the mathematics


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


def lowered(momentum, staleness):
    return max(momentum - staleness / (1 + staleness), 0)


def replayed_with_less_momentum(update):
    """Parameters after twelve updates of groups 0, 1, 0, 2, whose staleness is 0 to 3."""
    newest = W.astype(np.float64)
    versions, made = [newest] * 3, [0] * 3
    for k in range(len(X)):
        group = (0, 1, 0, 2)[k % 4]
        x, y = X[k].astype(np.float64), Y[k].astype(np.float64)
        gradient = 2 * x.T @ (x @ versions[group] - y) / len(y)
        newest = newest + update(k, gradient, lowered(0.9 if k < 6 else 0.6, k - made[group]))
        versions[group], made[group] = newest, k + 1
    return newest


def sgd_in_numpy():
    trace = np.zeros(3)

    def update(k, gradient, momentum):
        nonlocal trace
        trace = gradient + momentum * trace
        return -0.05 * trace

    return update


def adam_in_numpy():
    first, second = np.zeros(3), np.zeros(3)

    def update(k, gradient, b1):
        nonlocal first, second
        first = b1 * first + (1 - b1) * gradient
        second = 0.999 * second + 0.001 * gradient**2
        mean, square = first / (1 - b1 ** (k + 1)), second / (1 - 0.999 ** (k + 1))
        return -0.05 * mean / (np.sqrt(square) + 1e-8)

    return update


@pytest.mark.parametrize(
    ("optimizer", "in_numpy", "name"),
    [
        (optax.inject_hyperparams(optax.sgd)(0.05, momentum=0.9), sgd_in_numpy, "momentum"),
        (
            optax.chain(optax.identity(), optax.inject_hyperparams(optax.adam)(0.05)),
            adam_in_numpy,
            "b1",
        ),
    ],
    ids=["sgd", "adam in a chain"],
)
def test_momentum_correction_equals_a_numpy_replay(optimizer, in_numpy, name):
    # The lies: momentum that is lowered once more in every update, or for another staleness.
    step = make(optimizer=optimizer, rotation=(0, 1, 0, 2), momentum_correction=True)
    state, _ = train(step, step.init({"w": W}), range(6))
    kept = (state.opt_state if name == "momentum" else state.opt_state[1]).hyperparams
    assert kept[name] == np.float32(0.9)
    kept[name] = np.float32(0.6)  # what a user writes there is lowered too
    state, _ = train(step, state, range(6, 12))
    expected = replayed_with_less_momentum(in_numpy())
    np.testing.assert_allclose(state.params["w"], expected, rtol=2e-5)


def test_the_momentum_of_an_optimizer_inside_of_another_is_lowered():
    inner = optax.inject_hyperparams(optax.sgd)(0.05, momentum=0.9)
    outer = optax.inject_hyperparams(lambda rate: optax.chain(inner, optax.scale(rate)))(rate=2.0)
    options = RotationOptions(None, None, None, momentum_correction=True)
    optimizer = for_stale_gradients(outer, options, jnp.int32(1))
    state = optimizer.init(jnp.float32(0))
    _, state = optimizer.update(jnp.float32(1), state)
    update, state = optimizer.update(jnp.float32(1), state)
    assert float(update) == pytest.approx(-2 * 0.05 * (1 + 0.9 - 1 / 2))
    assert state.inner_state[0].hyperparams["momentum"] == np.float32(0.9)


def test_the_rules_for_stale_gradients_keep_short_floats():
    # The lies: updates and momenta that are float32 because the staleness is; a user's strict mode.
    options = RotationOptions(None, None, lambda staleness: 1 / (1 + staleness), True)
    optimizer = optax.inject_hyperparams(optax.sgd)(0.5, momentum=0.75)
    optimizer = for_stale_gradients(optimizer, options, jnp.int32(1))
    one = jnp.ones((), jnp.bfloat16)
    with jax.numpy_dtype_promotion("strict"):
        state = optimizer.init(one)
        _, state = optimizer.update(one, state)
        update, state = optimizer.update(one, state)
    assert update.dtype == state.inner_state[0].trace.dtype == jnp.bfloat16
    assert float(update) == -0.5 * (1 + 0.25) / 2


def test_an_optimizer_that_needs_the_loss_gets_it_with_the_rules_too():
    needs_it = lambda gradient, state, params=None, *, value: (gradient * value, state)
    optimizer = optax.GradientTransformationExtraArgs(lambda params: (), needs_it)
    options = RotationOptions(None, None, lambda staleness: staleness / 2, False)
    optimizer = for_stale_gradients(optimizer, options, np.float32(1))
    update, _ = call_update(optimizer, np.float32(3), (), None, loss=np.float32(5))
    assert float(update) == 7.5


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optax.sgd(0.1, momentum=0.9), "does not hold its momentum: make it with optax.inject"),
        (optax.inject_hyperparams(optax.sgd)(0.1), "does not hold its momentum"),
        (
            optax.inject_hyperparams(optax.sgd)(0.1, momentum=optax.linear_schedule(0, 1, 9)),
            "momentum is a schedule",
        ),
    ],
    ids=["plain", "without momentum", "schedule"],
)
def test_momentum_that_is_not_known_is_refused(optimizer, message):
    step = make(optimizer=optimizer, momentum_correction=True)
    with pytest.raises(ArgumentError, match=message):
        step.init({"w": W})


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


def test_model_state_goes_with_the_group():
    def loss(params, batch, *, model_state):
        return losses(params, batch), {}, {"calls": model_state["calls"] + 1}

    step = make(loss, towers=2)
    state = step.init({"w": W}, model_state={"calls": np.int32(0)})
    state, _ = train(step, state, range(3))
    assert int(state.model_state["calls"]) == 2  # group 0's, which made updates 0 and 2
    assert list(state.local["model_state"]["calls"]) == [2, 1]


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


# ---------------------------------------------------------------- versions and memory


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
    step = make(optimizer=optax.adam(0.1), towers=3, devices=3, ema_decay=0.9)
    state, _ = train(step, step.init({"w": W}), range(4))
    home, *others = mt.devices(3)
    parts = state.kept.parts()
    assert {d for leaf in jax.tree.leaves(parts.home) for d in leaf.devices()} == {home}
    for device, version in zip([home, *others], parts.versions, strict=True):
        assert {d for leaf in jax.tree.leaves(version.copies) for d in leaf.devices()} == {device}


def test_an_update_sends_one_gradient_and_one_copy_of_the_parameters(monkeypatch):
    # The lie: versions that are sent to everybody, or an optimizer's state that travels.
    params = np.ones((3, 500), np.float32)
    step = make(lambda w, x: (x @ w).sum(1), optax.adam(0.1), 2, devices=2, ema_decay=0.9)
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


# ---------------------------------------------------------------- states


def test_a_state_goes_on_from_any_moment_on_other_devices():
    # The lie (law L4): a version that is the newest after a resume, or another group's turn.
    whole, expected = train(step := make(devices=2), step.init({"w": W}), range(8))
    for moment in (1, 3, 5):
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


@pytest.mark.parametrize("max_staleness", [None, pytest.param(1, marks=pytest.mark.slow), 0])
def test_batches_from_the_host_and_from_prefetch_have_the_same_bits(max_staleness):
    # The lie: the 8 rows of an update are 8 from the host and, since they do not fill 6 towers, 12
    # from prefetch; a tower's own statistics then count some rows twice.
    def loss(params, batch, *, model_state):
        return losses(params, batch), {}, 0.9 * model_state + batch["x"].mean(0)

    def fingerprint(batches):
        step = make(loss, towers=6, devices=2, max_staleness=max_staleness)
        state = step.init({"w": W}, model_state=jnp.zeros(3))
        for batch in batches:
            state, _ = step(state, batch)
        return mt.fingerprint(state)

    numbers = range(7)
    from_host = fingerprint(map(batch_of, numbers))
    assert fingerprint(mt.prefetch(map(batch_of, numbers), towers=6, devices=2)) == from_host
    sharded = (mt.shard(batch_of(number), towers=6, devices=2) for number in numbers)
    assert fingerprint(sharded) == from_host


def test_batches_from_prefetch_are_taken():
    step = make(devices=2)
    state, _ = train(step, step.init({"w": W}), range(3))
    expected = mt.fingerprint(state)
    for options in ({}, {"devices": 1}, {"devices": 1, "towers": 1}, {"devices": 2, "towers": 2}):
        state = step.init({"w": W})
        for batch in mt.prefetch(map(batch_of, range(3)), **options):
            state, _ = step(state, batch)
        assert mt.fingerprint(state) == expected, options


def test_without_towers_every_device_is_one():
    step = make(towers=None, devices=2)
    state, seen = train(step, step.init({"w": W}), range(3))
    assert [int(metrics["staleness"]) for metrics in seen] == [0, 1, 1]
    expected, _ = train(same := make(towers=2), same.init({"w": W}), range(3))
    assert mt.fingerprint(state) == mt.fingerprint(expected)


# ---------------------------------------------------------------- what is refused


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


# ---------------------------------------------------------------- whole runs


def batches(first):
    for number in itertools.count(first):
        yield batch_of(number % 12)


def trainer(directory=None, devices=1, **options):
    given = {"towers": 3, "global_batch": 8, "updates": "asynchronous", **options}
    return mt.Trainer(
        losses,
        optax.sgd(0.05, momentum=0.9),
        run_dir=directory,
        devices=devices,
        **given,
    )


@pytest.mark.parametrize(
    "moment", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3, 4, 5))]
)
def test_a_run_resumes_between_any_two_updates_on_other_devices(tmp_path, moment):
    # The lie (law L4): checkpoints that keep the newest parameters alone.
    state, _ = train(step := make(), step.init({"w": W}), range(6))
    trainer(tmp_path, devices=1 + moment % 2).fit({"w": W}, batches, steps=moment)
    found = trainer(tmp_path, devices=3).fit({"w": W}, batches, steps=6, resume=True)
    assert mt.fingerprint(found) == mt.fingerprint(state)


def test_another_rotation_is_another_run(tmp_path):
    trainer(tmp_path, rotation=(0, 1, 2)).fit({"w": W}, batches, steps=1)
    assert trainer(momentum_correction=True)._settings["momentum_correction"]
    other = trainer(tmp_path, rotation=(0, 2, 1))
    with pytest.raises(RunError, match="another rotation"):
        other.fit({"w": W}, batches, steps=2, resume=True)
    plain = trainer(tmp_path, updates="synchronous")
    with pytest.raises(CheckpointError, match=r"\.local.*updates='asynchronous'"):
        plain.fit({"w": W}, batches, steps=2, resume=True)


def test_a_run_hears_of_every_update_and_stops_at_a_nan():
    seen = []
    hooks = [lambda progress: seen.append((progress.step, progress.metrics["staleness"]))]
    trainer(hooks=hooks, rotation=(0, 1, 0, 2)).fit({"w": W}, batches, steps=6)
    assert seen == [(1, 0), (2, 1), (3, 1), (4, 3), (5, 1), (6, 3)]

    def bad(first):
        for number in itertools.count(first):
            yield {"x": X[number] * (np.nan if number == 3 else 1), "y": Y[number]}

    with pytest.raises(NonFiniteError, match="step 4 of 9"):
        trainer().fit({"w": W}, bad, steps=9)
    skipping = trainer(on_nonfinite="skip").fit({"w": W}, bad, steps=9)
    assert np.isfinite(skipping.params["w"]).all()
    assert int(skipping.step) == 9


def test_a_run_reads_what_it_hears_so_late_that_all_groups_compute(monkeypatch):
    # The lie: a loop that waits for every update, so that one tower computes at a time.
    started, heard = [], []
    there = TrainStep.__call__
    monkeypatch.setattr(TrainStep, "__call__", lambda *args: (started.append(1), there(*args))[1])
    hooks = [lambda progress: heard.append((progress.step, len(started)))]
    trainer(hooks=hooks, rotation=(0, 1, 0, 2)).fit({"w": W}, batches, steps=7)
    assert heard == [(1, 5), (2, 6), (3, 7), (4, 7), (5, 7), (6, 7), (7, 7)]

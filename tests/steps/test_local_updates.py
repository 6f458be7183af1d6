"""sync_every: every tower updates parameters of its own, and the towers meet after every H steps.

The lies: towers that are averaged in every step after all, or never; an outer optimizer without its
state; a checkpoint with one tower's state for all; bits that depend on the devices; a tower that
goes on from another one's memory; metrics of one tower.
"""

import functools
import itertools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
import trees
from multitower.steps.state.leaves import leaf_like, named_leaves, on_host
from multitower.steps.state.replicas import check_replicas
from multitower.testing import assert_same_bits

# Towers are partly full, and copies of rows count in the state: with the same bits everywhere.
pytestmark = pytest.mark.filterwarnings("ignore:the batch has .* rows, and a tower takes")

DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=3).astype(np.float32), "b": np.float32(0.5)}


def batch(number, rows=8):
    draw = np.random.default_rng(number)
    x = draw.normal(size=(rows, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1) + draw.normal(size=rows).astype(np.float32)}


def losses(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def slope_losses(w, batch):
    """One leaf, where more would only compile longer."""
    return (batch["x"] @ w - batch["y"]) ** 2


def make(optimizer=None, loss=losses, *, towers=2, devices=1, sync_every=2, **options):
    # One device for two towers, as it is the same algorithm; law L3 is about the devices.
    optimizer = optimizer or optax.sgd(0.05, momentum=0.9)
    where = {"towers": towers, "devices": devices}
    return mt.train_step(loss, optimizer, sync_every=sync_every, **where, **options)


def train(step, state, batches):
    history = []
    for rows in batches:
        state, metrics = step(state, rows)
        history.append(jax.device_get(metrics))
    return state, history


assert_close = functools.partial(trees.assert_close, rtol=2e-5)


# ---------------------------------------------------------------- against NumPy, in float64


def replay(batches, *, sync_every, rate, clip_norm, towers=2, tower_rows=4, outer=(0.7, 0.9)):
    """The same in float64: parameters as one vector, momenta by hand. Written from the paper."""
    anchor = np.append(PARAMS["b"], PARAMS["w"]).astype(np.float64)  # jax sorts by name
    own, momentum = [anchor.copy() for _ in range(towers)], np.zeros((towers, 4))
    outer_momentum, seen, told, average = np.zeros(4), np.zeros(towers), [], anchor
    for number, rows in enumerate(batches, 1):
        X = np.column_stack([np.ones(len(rows["x"])), rows["x"]]).astype(np.float64)
        total = 0.0
        for tower in range(towers):
            place = slice(tower * tower_rows, (tower + 1) * tower_rows)
            errors = X[place] @ own[tower] - rows["y"][place]
            total += (errors**2).sum()
            if errors.size == 0:
                continue
            gradient = 2 * X[place].T @ errors / errors.size
            gradient *= min(1, clip_norm / np.linalg.norm(gradient))
            momentum[tower] = gradient + 0.9 * momentum[tower]
            own[tower] = own[tower] - rate * momentum[tower]
            seen[tower] += errors.size
        told.append(total / len(X))
        if number % sync_every == 0:
            moved = sum(n * (anchor - one) for n, one in zip(seen, own, strict=True)) / seen.sum()
            outer_momentum = moved + outer[1] * outer_momentum
            anchor = anchor - outer[0] * (moved + outer[1] * outer_momentum)
            own, seen = [anchor.copy() for _ in range(towers)], np.zeros(towers)
            decay = (number // sync_every) / (1 + number // sync_every)
            average = decay * average + (1 - decay) * anchor
    return anchor, np.array(own), momentum, outer_momentum, average, told


def flat(params):
    return np.concatenate([np.asarray(params["b"])[..., None], np.asarray(params["w"])], axis=-1)


@pytest.mark.parametrize(
    ("rows", "rate", "clip_norm"),
    [
        pytest.param([8] * 7, 0.05, np.inf, marks=pytest.mark.slow),
        ([8, 8, 5, 8, 3, 8, 8], 2.0, 0.05),
    ],
    ids=["full", "ragged and clipped"],
)
def test_it_is_the_algorithm_of_the_paper(rows, rate, clip_norm):
    # The lies: the mean of anchors, plain momentum outside, momenta that start again, a meeting
    # one step late, towers without rows that move, towers with few rows that count as much,
    # clipping of the outer gradient, an average that counts steps.
    batches = [batch(number, n) for number, n in enumerate(rows)]
    options = {"sync_every": 3, "ema_decay": lambda meeting: meeting / (meeting + 1)}
    if clip_norm < np.inf:
        options["clip_norm"] = clip_norm
    # The first case is the one on two devices.
    step = make(optax.sgd(rate, momentum=0.9), devices=1 if clip_norm < np.inf else 2, **options)
    state, history = train(step, step.init(PARAMS), batches)
    found = replay(batches, sync_every=3, rate=rate, clip_norm=clip_norm)
    anchor, own, momentum, outer_momentum, average, told = found
    assert int(state.step) == 7
    assert_close(flat(state.params), anchor)
    assert_close(flat(state.ema_params), average)
    assert_close(flat(state.opt_state[0].trace), outer_momentum)
    assert_close(flat(state.local.params), own)
    assert_close(flat(state.local.opt_state[0].trace), momentum)
    assert state.local.num_rows.tolist() == [4, 4]
    assert_close(np.array([metrics["loss"] for metrics in history]), np.array(told))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reduction", "source"),
    [pytest.param("mean", "mean", marks=pytest.mark.slow), ("sum", "first")],
)
def test_a_meeting_in_every_step_is_synchronous_training(reduction, source):
    # Law L2, ragged rows included. The lies: a mean of towers' means; a tower's sum for all.
    def loss(params, batch, *, model_state):
        found = losses(params, batch) * batch["scale"] + 0.1 * model_state["mean"]
        mean = 0.5 * (model_state["mean"] + batch["x"].mean())
        return found, {"size": jnp.abs(batch["y"])}, {"mean": mean, "n": model_state["n"] + 1}

    options = {"reduction": reduction, "ema_decay": lambda n: 1 - 1 / (n + 1)}
    options |= {"model_state_from": source, "global_batch": 8}
    outcomes = []
    for extra in ({}, {"sync_every": 1, "outer_optimizer": optax.sgd(1.0)}):
        where = {"towers": 3, "devices": 1}
        step = mt.train_step(loss, optax.sgd(0.01), **where, **options, **extra)
        model_state = {"mean": np.float32(1), "n": np.int32(0)}
        state = step.init(PARAMS, model_state=model_state)
        rows = [batch(0, 8), batch(1, 7 if source == "mean" else 4)]
        state, history = train(step, state, [{**one, "scale": np.float32(0.9)} for one in rows])
        outcomes.append([state.params, state.ema_params, state.model_state, history])
    assert_close(outcomes[1], outcomes[0])


@pytest.mark.slow
def test_a_ratio_is_the_towers_own():
    # The lie: weights of all towers, which nobody has sent.
    def loss(w, batch):
        return mt.ratio((w * batch["x"]).sum(1) * batch["mask"], batch["mask"])

    step = make(optax.sgd(0.1), loss, outer_optimizer=optax.sgd(1.0), diagnostics=True)
    x = np.arange(12.0, dtype=np.float32).reshape(4, 3)
    masks = [[1, 0, 1, 1], [0, 0, 1, 0]]
    state = step.init(np.ones(3, np.float32))
    for mask in masks:
        state, metrics = step(state, {"x": x, "mask": np.float32(mask)})
    own = [1 - 0.1 * x[0], 1 - 0.1 * (x[2] + x[3]) / 2 - 0.1 * x[2]]
    assert_close(np.asarray(state.params), (own[0] + own[1]) / 2)
    before = 1 - 0.1 * (x[2] + x[3]) / 2  # the second step's loss, of tower 1 alone
    assert float(metrics["loss"]) == pytest.approx(float((before * x[2]).sum()), rel=1e-5)
    assert metrics["tower_losses"].tolist() == pytest.approx([0, float((before * x[2]).sum())])


@pytest.mark.slow
def test_a_penalty_beside_a_ratio_is_whole_in_every_tower():
    # The lie: each of the towers has its share of the penalty, and makes an update with that.
    def loss(w, x):
        return mt.ratio((w * x - 1) ** 2, jnp.ones_like(x)) + 0.5 * w**2

    options = {"outer_optimizer": optax.sgd(1.0), "sync_every": 1, "diagnostics": True}
    step = make(optax.sgd(0.1), loss, **options)
    state, metrics = step(step.init(np.float32(2)), np.ones(4, np.float32))
    assert float(state.params) == pytest.approx(2 - 0.1 * (2 + 2))
    assert metrics["tower_losses"].tolist() == [3, 3]


@pytest.mark.slow
def test_states_of_inner_optimizers_are_kept_or_averaged():
    momenta = {}
    for local_state in ("keep", "average"):
        step = make(optax.adam(0.1), local_state=local_state)
        state, _ = train(step, step.init(PARAMS), [batch(0), batch(1)])
        momenta[local_state] = jax.device_get(state.local.opt_state[0])
        assert_close(state.local.params, jax.tree.map(lambda x: np.stack([x, x]), state.params))
    kept, averaged = momenta["keep"], momenta["average"]
    assert not np.allclose(kept.mu["w"][0], kept.mu["w"][1])
    mean = jax.tree.map(lambda x: np.broadcast_to(x.mean(0), x.shape), (kept.mu, kept.nu))
    assert_close((averaged.mu, averaged.nu), mean)
    assert averaged.count.tolist() == kept.count.tolist() == [2, 2]


@pytest.mark.slow
def test_a_meeting_leaves_every_tower_its_own_counts():
    # The lie: all towers go on with tower 0's, so that a schedule falls for updates that a tower
    # has not made, or not for those that it has.
    step = make(optax.sgd(lambda count: 0.1), slope_losses, local_state="average")
    rows = batch(0)
    few = jax.tree.map(lambda x: x[: len(x) // 2], rows)  # tower 1 has none of them
    state, _ = train(step, step.init(PARAMS["w"]), [rows, few])
    assert np.asarray(state.local.opt_state[1].count).tolist() == [2, 1]


# ---------------------------------------------------------------- law L3


def noisy(params, batch, *, rng, model_state):
    x = jnp.where(jax.random.bernoulli(rng, 0.8, batch["x"].shape), batch["x"], 0)
    mean = 0.9 * model_state["mean"] + 0.1 * x.mean(0)
    error = ((x - mean) @ params["w"] + params["b"] - batch["y"]) ** 2
    return (
        error,
        {"absolute": jnp.sqrt(error)},
        {"mean": mean, "key": jax.random.split(model_state["key"])[0]},
    )


def leftovers(devices, towers=8, sync_every=2, **options):
    """Fingerprint of all that five steps leave behind, one of them after the last meeting.

    On one device the state goes to the host and back between two meetings, as a checkpoint does.
    """
    options = {"ema_decay": 0.9, "clip_norm": 1.0, "diagnostics": True, **options}
    step = make(
        optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9), noisy,
        towers=towers, devices=devices, sync_every=sync_every, **options,
    )  # fmt: skip
    statistics = {"mean": np.zeros(3, np.float32), "key": jax.random.key(3)}
    state = step.init(PARAMS, model_state=statistics, rng=jax.random.key(7))
    rows = [batch(0, 16), batch(1, 16), batch(2, 5), batch(3, 16), batch(4, 16)]
    state, history = train(step, state, rows[:3])
    if devices == 1:
        copies = [leaf_like(on_host(leaf), leaf) for _, leaf in named_leaves(state)]
        state = jax.tree.unflatten(jax.tree.structure(state), copies)
    state, more = train(step, state, rows[3:])
    check_replicas(state)
    return mt.fingerprint((state, history, more))


@pytest.mark.slow
def test_law_l3_the_same_bits_on_any_number_of_devices():
    # The second device has two towers of three, and no whole subtree: order decides.
    found = [leftovers(devices, towers=3) for devices in (1, 2)]
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("local_state", "device_counts"), [("keep", (1, 2, 3, 4, 8)), ("average", (1, 3))]
)
def test_law_l3_the_same_bits_on_one_to_eight_devices(local_state, device_counts):
    found = [leftovers(devices, local_state=local_state) for devices in device_counts]
    assert len(set(found)) == 1


@pytest.mark.slow
def test_it_can_be_verified_as_any_step():
    assert_same_bits(
        losses, optax.sgd(0.1), PARAMS, [batch(0), batch(1)], towers=2, devices=(1, 2), sync_every=2
    )


@pytest.mark.slow
def test_metrics_are_added_along_the_tree():
    # The lie: another order of towers, which float32 tells: (1e8 + 1) - 1e8 is 0.
    step = make(loss=lambda w, x: x + 0 * w, towers=3)
    _, metrics = step(step.init(np.float32(0)), np.float32([1e8, -1e8, 1]))
    assert float(metrics["loss"]) == np.float32(1) / np.float32(3)


@pytest.mark.slow
def test_without_towers_there_is_one_for_each_device():
    found = []
    for towers in (None, 2):
        step = make(optax.sgd(0.1), slope_losses, towers=towers, devices=2)
        state = step.init(PARAMS["w"])
        for rows in mt.prefetch([batch(0), batch(1)], devices=2, towers=towers):
            state, _ = step(state, rows)
        found.append(mt.fingerprint(state))
    assert found[0] == found[1]


def test_between_meetings_no_program_spans_devices(monkeypatch):
    step = make(optax.sgd(0.1), slope_losses, sync_every=2, devices=2)
    state = step.init(PARAMS["w"])
    state, _ = step(state, batch(0))
    (runner,) = step._makers.newest.runners.values()
    meeting = runner._meeting
    calls, reduced = [], meeting.totals._reduced
    monkeypatch.setattr(meeting.totals, "_reduced", lambda *args: calls.append(1) or reduced(*args))
    met = []
    for number in (1, 2, 3):
        state, _ = step(state, batch(number))
        met.append(len(calls))
    assert met == [1, 1, 2]
    # What is left are programs for one device each, and copies of metrics to the first one.
    assert runner.totals._reduce is None
    compiled = [*runner._compiled.values(), *meeting._compiled.values()]
    executables = [x for x in jax.tree.leaves(compiled) if isinstance(x, jax.stages.Compiled)]
    assert len(executables) == 2 + 1 + 1 + 4 * 2  # tower, add, finish; moved, add, meet, go_on
    for one in executables:
        homes = jax.tree.leaves(one.input_shardings)
        assert all(len(home.device_set) == 1 for home in homes)


def test_a_tower_alone_has_a_state_of_its_own():
    statistics = {"mean": np.zeros(3, np.float32), "key": jax.random.key(3)}
    begin = {"model_state": statistics, "rng": jax.random.key(7)}
    own = make(loss=noisy, towers=1).init(PARAMS, **begin).local
    assert (own.params["w"].shape, own.model_state["key"].shape) == ((1, 3), (1,))
    with pytest.raises(ValueError, match="read-only"):
        own.params["w"][0] = 0  # it would be lost


@pytest.mark.slow
def test_every_tower_has_memory_of_its_own():
    step = make(towers=4, devices=1)
    state = step.init({"w": np.ones(300, np.float32), "b": np.float32(0)})
    rows = {"x": np.ones((4, 300), np.float32), "y": np.ones(4, np.float32)}
    for _ in range(3):
        parts = state.kept.parts()
        owners = [*parts.towers.values(), *(x._replace(local=None) for x in parts.replicas)]
        leaves = [leaf for one in owners for leaf in jax.tree.leaves(one)]
        places = [leaf.unsafe_buffer_pointer() for leaf in leaves]
        assert len(set(places)) == len(places)
        state, _ = step(state, rows)


# ---------------------------------------------------------------- states


@pytest.mark.slow
def test_what_is_not_finite_stays_in_its_tower():
    bad = batch(1)
    bad["x"] = bad["x"].copy()
    bad["x"][0] = np.nan  # a row of tower 0
    rows = [batch(0), bad, batch(2), batch(3)]
    step = make(optax.adam(0.1), skip_nonfinite=True, diagnostics=True)
    state, history = train(step, step.init(PARAMS), rows)
    assert [metrics["skipped"] for metrics in history] == [0, 1, 0, 0]
    assert not history[1]["finite_params"].all()
    assert history[2]["finite_params"].all()
    assert state.local.opt_state[0].count.tolist() == [3, 4]
    assert np.isfinite(flat(state.params)).all()
    # A meeting whose update is not finite: all go back to the last one.
    step = make(outer_optimizer=optax.sgd(np.inf), skip_nonfinite=True, diagnostics=True)
    state, history = train(step, step.init(PARAMS), rows[:1] * 2)
    assert [metrics["skipped"] for metrics in history] == [0, 2]
    assert not history[1]["finite_params"].all()
    assert_close(flat(state.params), np.append(PARAMS["b"], PARAMS["w"]))
    assert_close(flat(state.local.params), np.stack([flat(state.params)] * 2))


@pytest.mark.slow
def test_a_tower_without_rows_skips_no_step():
    """Lie: copies of a bad row, which only fill that tower up, count as a step of its own."""
    bad = batch(1, 3)
    bad["x"][0] = np.nan
    step = make(optax.sgd(0.1), slope_losses, skip_nonfinite=True)
    _, history = train(step, step.init(PARAMS["w"]), [batch(0), bad])
    assert [metrics["skipped"] for metrics in history] == [0, 1]


@pytest.mark.slow
def test_models_of_other_shapes_meet_in_turn():
    """Lie: the programs of a meeting are those of the model that came first."""
    loss = lambda w, x: (x[:, : len(w)] @ w - 1) ** 2
    step = make(optax.sgd(0.1), loss, sync_every=1, outer_optimizer=optax.sgd(1.0))
    x = batch(0)["x"]
    for size in (3, 2):
        w = np.ones(size, np.float32)
        state, _ = step(step.init(w), x)
        errors = x[:, :size].sum(1) - 1
        assert_close(state.params, w - 0.1 * 2 * errors @ x[:, :size] / len(x))


@pytest.mark.slow
def test_a_key_that_a_loss_leaves_as_it_is_stays_as_it_was():
    """Lie: the key that a tower draws with, its own, is the next step's key of all towers."""

    def loss(w, x, *, model_state):
        return x @ w * jax.random.uniform(model_state["key"], (len(x),)), {}, model_state

    step, key = make(loss=loss), jax.random.key(3)
    state = step.init(np.ones(3, np.float32), model_state={"key": key})
    state, _ = step(state, batch(0)["x"])
    kept = jax.random.key_data(state.local.model_state["key"])
    np.testing.assert_array_equal(kept, [jax.random.key_data(key)] * 2)


@pytest.mark.slow
def test_what_is_written_into_a_state_is_used():
    hyper = optax.inject_hyperparams(optax.sgd)
    optimizers = {
        "optimizer": hyper(learning_rate=0.1),
        "outer_optimizer": hyper(learning_rate=1.0),
    }
    step = make(**optimizers, ema_decay=0.5)
    state = step.init(PARAMS)
    state, _ = step(state, batch(0))
    state.ema_params["w"] = np.float32([3, 2, 1])
    state.params["w"] = np.float32([1, 2, 3])
    state.local.opt_state.hyperparams["learning_rate"] = np.float32([0.0, 0.5])
    state.opt_state.hyperparams["learning_rate"] = 0.25
    before = flat(state.local.params)
    new, _ = step(state, batch(1))
    # The new w is that of every tower; tower 0 stands still, and tower 1 moves.
    errors = losses({"w": np.float32([1, 2, 3]), "b": before[1, 0]}, {**batch(1)})[4:]
    signed = np.sqrt(errors) * np.sign(
        batch(1)["x"][4:] @ [1, 2, 3] + before[1, 0] - batch(1)["y"][4:]
    )
    moved = 0.5 * 2 * batch(1)["x"][4:].T @ signed / 4
    assert_close(np.asarray(new.params["w"]), np.float32([1, 2, 3]) - 0.25 * moved / 2, rtol=1e-4)
    assert_close(new.ema_params["w"], (np.float32([3, 2, 1]) + new.params["w"]) / 2)
    state = new
    state.params["w"] = np.ones(4, np.float32)
    with pytest.raises(mt.StateError, match="same shape"):
        step(state, batch(1))


@pytest.mark.slow
@pytest.mark.parametrize("loops", [False, True])
def test_what_replaces_the_parameters_reaches_every_tower(loops):
    # Lie: clipped weights, or a new target network, stay in the state and no tower trains on them.
    def with_target(params, batch, *, model_state):
        return losses(params, batch), {"target": model_state.sum()}, model_state

    options = {"towers": None, "devices": 2, "steps_per_call": 2} if loops else {}
    step = make(loss=with_target, **options)
    state = step.init(PARAMS, model_state=np.zeros(2, np.float32))
    state, _ = step(state, [batch(0)] if loops else batch(0))
    own = state.local
    clipped = {**state.params, "w": np.clip(state.params["w"], -0.1, 0.1)}
    state = state.replace(params=clipped, model_state=np.ones(2, np.float32))
    assert_close(state.local.params["w"], np.stack([clipped["w"]] * 2))
    assert_close(state.local.params["b"], own.params["b"])  # that one is not new
    assert_close(state.replace(local=own).local.params["w"], own.params["w"])
    state.params["w"] = w = np.float32([1, 2, 3])  # written before something else is replaced
    state = state.replace(rng=None)
    _, metrics = step(state, [batch(1)] if loops else batch(1))
    each = [losses({"w": w, "b": b}, batch(1)) for b in np.asarray(own.params["b"])]
    assert_close(metrics["loss"].sum(), np.append(each[0][:4], each[1][4:]).mean())
    assert metrics["target"] == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "leave",
    [
        lambda state: pickle.loads(pickle.dumps(state)),
        lambda state: jax.tree.map(jnp.copy, state),
        lambda state: state,
    ],
    ids=["pickle", "jax.tree.map", "another step"],
)
def test_what_is_written_reaches_every_tower_of_a_state_that_goes_on_elsewhere(leave):
    # Lie: towers train on without what was written, if a checkpoint was made in between.
    found = []
    for is_left in (False, True):
        step = make(sync_every=3)
        state, _ = step(step.init(PARAMS), batch(0))
        state.params["w"] = [1, 2, 3] * np.ones(3)  # in float64
        state.local.params["b"] = np.float32([4, 5])
        if is_left:
            step, state = make(sync_every=3), leave(state)
        found.append(mt.fingerprint(step(state, batch(1))))
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize("is_written", [False, True])
def test_parameters_that_are_changed_inside_jit_reach_every_tower(is_written):
    # Lie: a program that clips the weights of a state fails, or no tower trains on them.
    def clip(state):
        clipped = jax.tree.map(lambda x: jnp.clip(x, -0.1, 0.1), state.params)
        if not is_written:
            return state.replace(params=clipped)
        state.params.update(clipped)
        return state

    found = []
    for change in (clip, jax.jit(clip)):
        step = make(sync_every=3)
        state, _ = step(step.init(PARAMS), batch(0))
        found.append(mt.fingerprint(step(change(state), batch(1))))
    assert found[0] == found[1]


@pytest.mark.slow
def test_a_state_goes_on_elsewhere():
    rows = [batch(number, 12) for number in range(7)]
    on_one, on_two = (
        make(loss=slope_losses, sync_every=3, towers=3, devices=devices) for devices in (1, 2)
    )
    wanted, _ = train(on_one, on_one.init(PARAMS["w"]), rows)
    state, _ = train(on_two, on_two.init(PARAMS["w"]), rows[:4])  # between two meetings
    copy = pickle.loads(pickle.dumps(state))
    for begun, step in ((copy, on_two), (state, on_one)):
        found, _ = train(step, begun, rows[4:])
        assert mt.fingerprint(found) == mt.fingerprint(wanted)
        check_replicas(found)  # of a state that somebody has read


@pytest.mark.slow
def test_from_synchronous_steps_and_not_back():
    whole = mt.train_step(losses, optax.adam(0.1), towers=2, devices=1)
    step = make(optax.adam(0.1), outer_optimizer=optax.sgd(1.0))
    state, _ = whole(whole.init(PARAMS), batch(0))
    momentum = jax.device_get(state.opt_state[0].mu)
    state, _ = step(state, batch(1))  # step 2: towers meet
    assert int(state.step) == 2
    assert state.local.opt_state[0].count.tolist() == [2, 2]
    assert not np.allclose(momentum["w"], state.local.opt_state[0].mu["w"][0])
    with pytest.raises(mt.StateError, match=r"what towers keep of their own \(state.local\)"):
        whole(state, batch(2))
    with pytest.raises(mt.StateError, match=r"each of 2 towers .* use towers=2"):
        make(optax.adam(0.1), towers=4)(state, batch(2))
    with pytest.raises(mt.StateError, match="not of the optimizer"):
        make(optax.sgd(0.1))(whole.init(PARAMS), batch(2))


# ---------------------------------------------------------------- runs


def batches(first):
    for number in itertools.count(first):
        yield batch(number, 12)


def trainer(run_dir, devices, sync_every=3, rate=0.7, **options):
    outer = optax.sgd(rate, momentum=0.9, nesterov=True)
    local = {"sync_every": sync_every, "outer_optimizer": outer} if sync_every else {}
    where = {"towers": 3, "devices": devices, "global_batch": 12}
    kept = {} if run_dir is None else {"run_dir": run_dir, "checkpoint_every": 4}
    inner = optax.sgd(0.05, momentum=0.9)
    return mt.Trainer(slope_losses, inner, **kept, **where, **local, **options)


def test_law_l4_a_run_goes_on_between_two_meetings(tmp_path):
    wanted = trainer(None, 1).fit(PARAMS["w"], batches, steps=6)
    with pytest.warns(mt.MultitowerWarning, match=r"the last 1 steps .* Make 6 steps"):
        state = trainer(tmp_path, 2).fit(PARAMS["w"], batches, steps=4)
    assert state.local.num_rows.tolist() == [4, 4, 4]
    again = {"steps": 6, "resume": True}
    with pytest.raises(
        mt.RunError, match="another sync_every: the run there has 3, this one has 2"
    ):
        trainer(tmp_path, 1, sync_every=2).fit(PARAMS["w"], batches, **again)
    with pytest.raises(mt.RunError, match=r"another outer_optimizer: .* 0.7, this one has 0.5"):
        trainer(tmp_path, 1, rate=0.5).fit(PARAMS["w"], batches, **again)
    with pytest.raises(mt.CheckpointError, match="what towers keep of their own"):
        trainer(tmp_path, 1, sync_every=None).fit(PARAMS["w"], batches, **again)
    found = trainer(tmp_path, 1).fit(PARAMS["w"], batches, **again)
    assert mt.fingerprint(found) == mt.fingerprint(wanted)


@pytest.mark.slow
def test_a_run_stops_where_a_meeting_is_not_finite(tmp_path):
    job = trainer(tmp_path, 2, sync_every=2, rate=np.inf)
    with pytest.raises(mt.NonFiniteError, match=r"step 2 of 4: .* not finite after it"):
        job.fit(PARAMS["w"], batches, steps=4)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sync_every": 0}, "sync_every=0: it must be a whole number"),
        ({"sync_every": True}, "whole number"),
        ({"sync_every": 2.0}, "whole number"),
        ({"local_state": "first"}, "say 'keep' or 'average'"),
        ({"sync_every": None, "local_state": "average"}, "sync_every= is missing"),
        ({"sync_every": None, "outer_optimizer": optax.sgd(1.0)}, "sync_every= is missing"),
        ({"outer_optimizer": 0.7}, "outer_optimizer=0.7: give an optax optimizer"),
        ({"shard_update": True}, "sync_every= and shard_update= exclude each other"),
        ({"shard_params": True, "towers": None}, "sync_every= and shard_params="),
        ({"stages": 2}, "sync_every= and stages="),
        ({"steps_per_call": 0}, "steps_per_call=0: it must be a whole number"),
        (
            {"sync_every": None, "steps_per_call": 2},
            "steps_per_call= and towers= exclude each other",
        ),
    ],
)
def test_options_that_exclude_each_other(options, said):
    with pytest.raises(mt.ArgumentError, match=said):
        make(**options)


def test_losses_and_optimizers_that_local_updates_cannot_have():
    def meets(params, batch):
        return losses(params, batch) - jax.lax.pmean(batch["y"].mean(), "towers")

    def numbered(params, batch):
        return losses(params, batch) * (1 + mt.row_index(batch["x"]))

    for loss, does in ((meets, r"exchanges .*psum at .*py"), (numbered, "asks .* mt.row_index")):
        step = make(loss=loss)
        said = f"the loss {does}.*with sync_every= towers exchange nothing"
        with pytest.raises(mt.ArgumentError, match=said):
            step(step.init(PARAMS), batch(0))
    step = make(outer_optimizer=optax.polyak_sgd())
    with pytest.raises(mt.ArgumentError, match="does not look at the loss"):
        step(step.init(PARAMS), batch(0))
    step = make(loss=lambda params, batch: losses(params, batch).mean())
    with pytest.raises(mt.OutputError, match="do not fill 2 towers evenly"):
        step(step.init(PARAMS), batch(0, 7))

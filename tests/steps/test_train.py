"""train_step: equal to a plain loop on one device, compiled once, in both ways to run."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.step import _widened
from same_bits_program import MODELS
from tower_keys import tower_key
from trees import Pair, assert_close

both_ways = pytest.mark.parametrize("towers", [None, 4], ids=["fast", "same bits"])
slowly = functools.partial(pytest.param, marks=pytest.mark.slow)
fast_every_day = pytest.mark.parametrize("towers", [None, slowly(4)], ids=["fast", "same bits"])
same_bits_every_day = pytest.mark.parametrize(
    "towers", [slowly(None), 4], ids=["fast", "same bits"]
)


def where(towers):
    """Two devices for the fast way; towers are the same mathematics on one, for less compiling."""
    return {"towers": towers, "devices": 1 if towers else 2}


def losses(params, batch):
    return (batch["x"] @ params["w"] + params["b"] - batch["y"]) ** 2


def params_of():
    return {"w": np.arange(3, dtype=np.float32), "b": np.float32(0.5)}


def batch_of(num_rows, seed=0):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def train(step, state, batches):
    history = []
    for batch in batches:
        state, metrics = step(state, batch)
        history.append(float(metrics["loss"]))
    return state, history


RAGGED = [batch_of(n, seed) for seed, n in enumerate((12, 12, 7, 1, 12))]


@both_ways
@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_equals_sgd_with_momentum_in_numpy(num_devices, towers):
    """Lie: right by comparison with JAX only; here every number is worked out in float64."""
    w, b = params_of()["w"].astype(float), 0.5
    trace_w, trace_b, expected = 0.0, 0.0, []
    for batch in RAGGED:
        x, y = batch["x"].astype(float), batch["y"].astype(float)
        wrong = x @ w + b - y
        expected.append(np.mean(wrong**2))
        trace_w = 0.9 * trace_w + 2 * x.T @ wrong / len(y)
        trace_b = 0.9 * trace_b + 2 * wrong.mean()
        w, b = w - 0.05 * trace_w, b - 0.05 * trace_b

    optimizer = optax.sgd(0.05, momentum=0.9)
    step = mt.train_step(losses, optimizer, devices=num_devices, towers=towers)
    state, history = train(step, step.init(params_of()), RAGGED)
    assert_close((state.params, history), ({"b": b, "w": w}, expected))
    assert int(state.step) == len(RAGGED)


@functools.cache
def plain_loop(model_name):
    """A loss, an optimizer, parameters, batches; and what they come to without this library."""
    if model_name == "transformer":  # without its dropout: one device has only one mask
        model = MODELS["transformer"](np.random.default_rng(0), dropout=0.0)
        loss_fn = lambda params, batch: model.loss(params, batch, rng=jax.random.key(0))
    else:
        model = MODELS["mlp"](np.random.default_rng(0))
        loss_fn = model.loss
    schedule = optax.warmup_cosine_decay_schedule(0, 1e-2, 2, 4)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(schedule))
    batches = [model.batch(np.random.default_rng(s), n) for s, n in enumerate((8, 8, 5))]

    @jax.jit
    def plain(params, opt_state, batch):
        mean = lambda params: loss_fn(params, batch)[0].mean()
        value, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, opt_state, losses = model.params, optimizer.init(model.params), []
    for batch in batches:
        params, opt_state, value = plain(params, opt_state, batch)
        losses.append(float(value))
    return loss_fn, optimizer, model.params, batches, params, losses


@pytest.mark.filterwarnings("ignore:random numbers")  # a dropout rate of 0, drawn all the same
@fast_every_day
@pytest.mark.parametrize("model_name", [pytest.param("transformer", marks=pytest.mark.slow), "mlp"])
def test_equals_a_plain_optax_loop(model_name, towers):
    """Lie: clipping, schedules or weight decay see another gradient than on one device."""
    loss_fn, optimizer, first, batches, params, expected = plain_loop(model_name)
    step = mt.train_step(loss_fn, optimizer, **where(towers))
    state, history = train(step, step.init(first), batches)
    # Adam divides by the square root of squares: rounding near zero grows.
    assert_close((state.params, history), (params, expected), rtol=1e-3, atol=1e-4)


@same_bits_every_day
def test_trap_a_second_compilation_on_step_two(towers):
    """Counters on one device, weak types, a ragged last batch: one compilation for the run."""
    traces, compilations = [], []

    def loss(params, batch, *, rng, model_state):
        traces.append(batch["x"].shape)
        noise = jax.random.normal(rng, batch["y"].shape)
        return losses(params, batch) + noise, {"y": batch["y"]}, {"n": model_state["n"] + 1.0}

    optimizer = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.linear_schedule(0.1, 0, 9))
    )
    step = mt.train_step(loss, optimizer, devices=2, towers=towers, ema_decay=0.9)
    # Weak types and Python numbers on purpose.
    state = step.init({"w": jnp.zeros(3), "b": 0.5}, rng=jax.random.key(0), model_state={"n": 0.0})
    state, _ = step(state, RAGGED[0])
    before = len(traces)

    def listen(name, duration, **_):
        if name.endswith("backend_compile_duration"):
            compilations.append(name)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for batch in RAGGED[1:3]:
            state, metrics = step(state, batch)
        compilations.clear()  # device_put of a new shape and the like; no program of ours
        for batch in RAGGED:
            state, metrics = step(state, batch)
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert len(traces) == before
    assert not compilations
    assert np.isfinite(float(metrics["loss"]))


@both_ways
def test_trap_mean_of_means(towers):
    """transformers#34191; law L7 on ten rows for four towers of three."""

    def loss(params, batch):
        return losses(params, batch), {"y": batch["y"], "two": {"y": 2 * batch["y"]}}

    step = mt.train_step(loss, optax.sgd(0.0), **where(towers), global_batch=12)
    for num_rows in (10, 1, 12):
        batch = batch_of(num_rows, seed=num_rows)
        _, metrics = step(step.init(params_of()), batch)
        assert_close(metrics["loss"], losses(params_of(), batch).mean())
        assert_close(metrics["y"], batch["y"].mean())
        assert_close(metrics["two"]["y"], 2 * batch["y"].mean())
        assert all(m.dtype == jnp.float32 and m.shape == () for m in jax.tree.leaves(metrics))


@both_ways
def test_trap_the_log_shows_only_the_last_towers_loss(towers):
    """tensorflow#2994."""
    step = mt.train_step(lambda w, x: w * x, optax.sgd(0.0), **where(towers), diagnostics=True)
    rows = np.repeat(np.arange(4, dtype=np.float32), 2)  # the last tower's loss is 3
    _, metrics = step(step.init(np.float32(1)), rows)
    assert float(metrics["loss"]) == 1.5


@both_ways
def test_trap_a_schedule_that_runs_n_times_too_fast(towers):
    """tensorflow/benchmarks#155, accelerate#2926; law L8."""
    counts = []

    def schedule(count):
        return jnp.where(count == 0, 1.0, 0.0)  # only the first update counts

    step = mt.train_step(losses, optax.sgd(schedule), **where(towers))
    state = step.init(params_of())
    for number, batch in enumerate(RAGGED[:3]):
        state, _ = step(state, batch)
        counts += [int(c) for c in jax.tree.leaves(state.opt_state) if c.dtype == jnp.int32]
        if number == 0:
            after_one = jax.tree.map(np.asarray, state.params)
    assert counts == [1, 2, 3]
    assert_close(state.params, after_one)


@both_ways
@pytest.mark.parametrize(
    "decay", [0.8, lambda count: count / (count + 1.0)], ids=["0.8", "n/(n+1)"]
)
def test_ema(decay, towers):
    """Lie: the average lags by a step, starts at zero, or is rounded away."""
    step = mt.train_step(losses, optax.sgd(0.05), **where(towers), ema_decay=decay)
    state = step.init(params_of())
    ema = {k: np.asarray(v, float) for k, v in params_of().items()}
    for count, batch in enumerate(RAGGED, start=1):
        state, _ = step(state, batch)
        d = decay(count) if callable(decay) else decay
        ema = {k: d * ema[k] + (1 - d) * np.asarray(state.params[k], float) for k in ema}
    assert_close(state.ema_params, ema)


def test_ema_of_16_bit_parameters_is_kept_in_32():
    step = mt.train_step(losses, optax.sgd(0.05), devices=1, towers=1, ema_decay=0.999)
    state = step.init(jax.tree.map(lambda p: np.asarray(p, jnp.bfloat16), params_of()))
    state, _ = step(state, RAGGED[0])
    assert state.params["w"].dtype == jnp.bfloat16
    assert state.ema_params["w"].dtype == jnp.float32
    assert (np.asarray(state.ema_params["w"]) != np.asarray(state.params["w"], np.float32)).any()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"clip_norm": 2.0, "ema_decay": 0.9},
        {"shard_update": True},
        {"stages": 1},
        {"sync_every": 2},
    ],
)
def test_parameters_and_metrics_of_eight_bits(options):
    # The lie: they work in a plain step, and with these options a TypePromotionError of JAX comes
    # out of the library, because 8-bit floats have no common dtype with float32.
    def loss(params, x):
        small = params["small"].astype(jnp.float32)
        return (x @ params["w"] + small) ** 2, {"first": x[:, 0].astype(jnp.float8_e5m2)}

    first = {"w": jnp.ones(3), "small": jnp.float32(1).astype(jnp.float8_e4m3fn)}
    rows = np.full((7, 3), 0.5, np.float32)
    prints = set[str]()
    for devices in (1, 2):
        step = mt.train_step(loss, optax.sgd(0.1), towers=2, devices=devices, **options)
        state = step.init(first)
        for _ in range(2):
            state, metrics = step(state, rows)
        assert state.params["small"].dtype == jnp.float8_e4m3fn
        assert float(state.params["small"]) < 1
        assert float(metrics["first"]) == 0.5
        prints.add(mt.fingerprint((state, metrics)))
    assert len(prints) == 1


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


@pytest.mark.parametrize("towers", [4, None])
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
@both_ways
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


@same_bits_every_day
def test_trap_the_same_dropout_mask_on_every_tower_or_step(towers):
    """accelerate#114; law L6. And another start draws the same again."""

    def loss(params, batch, *, rng):
        draws = jax.random.uniform(rng, batch["y"].shape)
        return losses(params, batch), {"draw": draws, "square": draws**2}

    step = mt.train_step(loss, optax.sgd(0.1), devices=1 if towers else 4, towers=towers)

    def draws():
        state = step.init(params_of(), rng=jax.random.key(0))
        found = []
        for _ in range(2):
            state, metrics = step(state, batch_of(4))
            found.append((float(metrics["draw"]), float(metrics["square"])))
        return found

    first = draws()
    assert first[0] != first[1]
    assert all(square - draw**2 > 1e-4 for draw, square in first)  # not the same on every tower
    assert draws() == first


def test_trap_the_regulariser_counted_once_per_tower():
    """Or only on the first one."""

    def loss(params, batch):
        return 0 * batch["y"] + (params["w"] ** 2).sum()

    for towers in (None, 4):
        step = mt.train_step(loss, optax.sgd(0.5), **where(towers))
        state, metrics = step(step.init(params_of()), batch_of(8))
        assert_close(metrics["loss"], 5.0)
        assert_close(state.params["w"], 0 * params_of()["w"])


@both_ways
def test_what_is_given_to_init_is_never_overwritten(towers):
    """Lie: the first step deletes the user's own parameters."""
    step = mt.train_step(losses, optax.adam(0.1), devices=1, towers=towers and 1, ema_decay=0.9)
    params = jax.tree.map(jnp.asarray, params_of())
    for _ in range(2):
        state = step.init(params)
        state, _ = step(state, RAGGED[0])
    assert_close(params, params_of())
    np.testing.assert_array_equal(params["w"], params_of()["w"])


def test_trap_parameters_that_change_right_after_init():
    """JAX copies late, and an array of JAX may lie in NumPy's memory."""
    for _ in range(8):
        weights = np.ones((1024, 1024), np.float32)
        params = jax.device_put(weights, may_alias=True)
        state = mt.train_step(losses, optax.sgd(0.1), devices=1).init({"w": params})
        weights[:] = 7
        assert float(state.params["w"].max()) == 1


@both_ways
def test_trap_a_batch_that_changes_after_shard(towers):
    """JAX goes on reading the host's memory; see test_feeding."""
    batch = batch_of(8)
    expected = batch["x"].copy()
    placed = mt.shard(batch, devices=2, towers=towers)
    for leaf in batch.values():
        leaf[:] = np.nan
    np.testing.assert_array_equal(np.asarray(placed["x"]), expected)


@both_ways
def test_trap_a_host_batch_that_changes_right_after_the_step(towers):
    """Steps are asynchronous; a loader that reuses its buffer would corrupt them."""
    step = mt.train_step(losses, optax.sgd(0.01), **where(towers))
    buffer = batch_of(400)
    state = step.init(params_of())
    found = []
    for seed in range(3):
        for name, rows in batch_of(400, seed).items():
            buffer[name][:] = rows
        state, metrics = step(state, buffer)
        for rows in buffer.values():
            rows[:] = np.nan
        found.append(metrics["loss"])
    assert np.isfinite([float(value) for value in found]).all()


@both_ways
def test_sharded_batches_give_the_same_as_host_batches(towers):
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=towers, global_batch=12)

    def run(prepare):
        state, history = train(step, step.init(params_of()), map(prepare, RAGGED))
        return mt.fingerprint((state, history))

    options = dict(devices=2, towers=towers, global_batch=12)
    plain = run(lambda batch: batch)
    assert run(lambda batch: mt.shard(batch, **options)) == plain
    ready = iter(mt.prefetch(RAGGED, **options))
    assert run(lambda batch: next(ready)) == plain


@both_ways
def test_scalar_losses_of_full_batches(towers):
    step = mt.train_step(lambda p, b: losses(p, b).mean(), optax.sgd(0.1), **where(towers))
    per_row = mt.train_step(losses, optax.sgd(0.1), **where(towers))
    batches = [RAGGED[0], RAGGED[1], batch_of(8)]
    found = train(step, step.init(params_of()), batches)
    expected = train(per_row, per_row.init(params_of()), batches)
    assert_close((found[0].params, found[1]), (expected[0].params, expected[1]))


@both_ways
def test_the_state_moves_to_another_step(towers):
    """Lie: a state fits only the devices and the program that it was made with."""
    step = mt.train_step(losses, optax.sgd(0.1), devices=2, towers=towers)
    state, _ = step(step.init(params_of()), RAGGED[0])
    kept = jax.tree.map(np.array, state)
    other = mt.train_step(losses, optax.sgd(0.1), devices=1, towers=towers)
    found, _ = other(state, RAGGED[1])
    expected, _ = step(kept, RAGGED[1])
    assert_close(found, expected)
    if towers:
        assert mt.fingerprint(found) == mt.fingerprint(expected)


@both_ways
def test_a_state_survives_jax_tree_map_and_replace(towers):
    step = mt.train_step(losses, optax.sgd(0.1), **where(towers))
    state = step.init(params_of())
    halved = state.replace(params=jax.tree.map(lambda p: p / 2, state.params))
    new, _ = step(halved, RAGGED[0])
    fresh, _ = step(step.init(jax.tree.map(lambda p: p / 2, params_of())), RAGGED[0])
    assert_close(new, fresh)


@both_ways
def test_extra_args_reach_the_optimizer(towers):
    """Lie: reduce_on_plateau and friends are refused, or see one tower's loss."""
    optimizer = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    )
    step = mt.train_step(losses, optimizer, **where(towers))
    state, history = train(step, step.init(params_of()), RAGGED[:2])
    assert_close(state.opt_state[1].best_value, min(history))


@pytest.mark.parametrize("is_plain", [False, True])
def test_extra_args_reach_an_optimizer_in_multi_steps(is_plain):
    """Lie: the loss is given to every optimizer that takes it."""
    optimizer = optax.MultiSteps(optax.contrib.reduce_on_plateau(accumulation_size=1), 1)
    if is_plain:
        optimizer = optimizer.gradient_transformation()
    step = mt.train_step(losses, optimizer, devices=1)
    state, metrics = step(step.init(params_of()), RAGGED[0])
    assert_close(state.opt_state.inner_opt_state.best_value, metrics["loss"])


@both_ways
def test_dataclasses_that_check_their_arrays(towers):
    """Lie: kinds of leaves, or shardings, are put where a user's class expects arrays."""

    def loss(params, batch, *, model_state):
        new = Pair(model_state.x + batch.x.mean(), model_state.y)
        return (params.x * batch.x - params.y * batch.y) ** 2, {}, new

    pair = lambda: Pair(jnp.float32(1), jnp.float32(2))
    rows = np.arange(8, dtype=np.float32)
    step = mt.train_step(loss, optax.sgd(0.01), devices=2, towers=towers)
    state = step.init(pair(), model_state=pair())
    state, metrics = step(state, Pair(rows, rows))
    assert_close((metrics["loss"], state.model_state.x), ((rows**2).mean(), 1 + rows.mean()))


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_rows_of_typed_keys(towers):
    """Also when they were cut for other devices."""

    def losses(w, batch):
        return w * jax.vmap(jax.random.normal)(batch["key"]) * batch["x"]

    keys = jax.random.split(jax.random.key(0), 8)
    batch = {"key": keys, "x": np.arange(1, 9, dtype=np.float32)}  # other rows' keys would show
    expected = jax.grad(lambda w: losses(w, batch).mean())(1.0)
    step = mt.train_step(losses, optax.sgd(1.0), towers=towers, devices=2)
    given = [batch]
    if towers:
        given += [mt.shard(batch, towers=towers, devices=d) for d in (1, 3)]
    for rows in given:
        state, _ = step(step.init(np.float32(1)), rows)
        np.testing.assert_allclose(state.params, 1 - expected, rtol=1e-5)


@pytest.mark.slow
def test_values_in_a_batch_that_are_no_rows():
    """Python numbers, 0-d arrays and keys in a batch: whole on every tower, keys folded.

    Lie: the number of the first step for ever, or one key for all; alike on all devices.
    """

    def loss(params, batch):
        draw = jax.random.uniform(batch["key"], ())
        return losses(params, batch) * batch["factor"] + draw, {"draw": draw * jnp.ones(4)}

    found = []
    for devices in (1, 2):
        step = mt.train_step(loss, optax.sgd(0.1), devices=devices, towers=4)
        state = step.init(params_of())
        for number in range(2):
            extra = {"factor": 0.5 + number, "key": jax.random.key(number)}
            before = jax.tree.map(np.asarray, state.params)
            state, metrics = step(state, batch_of(8) | extra)
        found.append(mt.fingerprint((state, metrics)))
    assert found[0] == found[1]
    keys = [tower_key(jax.random.key(1), tower) for tower in range(4)]
    draw = np.mean([jax.random.uniform(key, ()) for key in keys])
    assert_close(metrics["draw"], np.full(4, draw))
    assert_close(metrics["loss"], 1.5 * losses(before, batch_of(8)).mean() + draw)


def test_an_empty_parameter_tree_still_counts_the_loss():
    for towers in (None, 4):
        step = mt.train_step(lambda p, b: b["y"] ** 2, optax.sgd(0.1), **where(towers))
        state, metrics = step(step.init({}), RAGGED[0])
        assert_close(metrics["loss"], (RAGGED[0]["y"] ** 2).mean())
        assert int(state.step) == 1
    more = {"clip_norm": 1.0, "diagnostics": True, "extra_metrics": ["gradient_norm"]}  # of nothing
    step = mt.train_step(lambda p, b: b["y"] ** 2, optax.sgd(0.1), **where(4), **more)
    _, metrics = step(step.init({}), RAGGED[0])
    assert metrics["gradient_norm"] == 0
    assert metrics["finite_params"].shape == (0,)
    step = mt.train_step(lambda p, b: b["y"], optax.sgd(0.1), shard_update=True, **where(4))
    with pytest.raises(mt.ArgumentError, match=r"no numbers.*leave shard_update out"):
        step.init({})


@pytest.mark.parametrize(
    "flag", ["diagnostics", "skip_nonfinite", "shard_update", "shard_params", "interleave", "remat"]
)
def test_a_flag_is_true_or_false(flag):
    """Lie: remat="no" is remat=True, because Python takes every word for true."""
    for wrong in ("no", None, jax.checkpoint_policies.dots_saveable):
        with pytest.raises(mt.ArgumentError, match=f"{flag}=.*: say True or False"):
            mt.train_step(losses, optax.sgd(0.1), towers=4, **{flag: wrong})
    mt.train_step(losses, optax.sgd(0.1), towers=4, **{flag: np.bool_(flag == "remat")})


@pytest.mark.parametrize("num_devices", [1, 3])
def test_a_nan_of_the_other_sign_ends_as_the_one_nan_in_metrics_and_state(num_devices):
    """The lie: the sign of a NaN, which follows the order of operands, passes for the same bits."""
    step = mt.train_step(
        lambda w, x: w * x, optax.sgd(0.1), towers=6, devices=num_devices, diagnostics=True
    )
    rows = np.ones(6, np.float32)
    rows[5] = np.copysign(np.float32(np.nan), np.float32(-1))
    state, metrics = step(step.init(1.0), rows)
    for value in (state.params, metrics["loss"]):
        assert np.asarray(value).tobytes() == np.float32(np.nan).tobytes()


@pytest.mark.parametrize("towers", [None, 8])
def test_law_l7_a_metric_is_a_sum_over_a_weight_rounded_once(towers):
    """The lie: an accuracy of 0.99999994 where all answers are right."""

    def loss(w, batch):
        return (w * batch["x"]) ** 2, {"right": batch["right"]}

    step = mt.train_step(
        loss, optax.sgd(0.1), towers=towers, devices=1 if towers else None, global_batch=48
    )
    state = step.init(1.0)
    for num_rows, num_right in ((41, 41), (47, 47), (10, 5)):
        x = np.arange(num_rows, dtype=np.float32)
        state, metrics = step(state, {"x": x / num_rows, "right": x < num_right})
        assert float(metrics["right"]) == np.float32(num_right / num_rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "towers"),
    [
        ("sam", 4),
        ("polyak_sgd", None),
        pytest.param("sam", None, marks=pytest.mark.slow),
        pytest.param("polyak_sgd", 4, marks=pytest.mark.slow),
    ],
)
def test_optimizers_that_look_at_more_or_at_less(name, towers, tmp_path):
    """Lie: an optimizer that fails for an argument which it does not take, or which it misses."""
    optimizer = {
        "sam": lambda: optax.contrib.sam(
            optax.sgd(0.1), optax.chain(optax.contrib.normalize(), optax.sgd(0.05)), sync_period=2
        ),
        "polyak_sgd": lambda: optax.polyak_sgd(0.1),
    }[name]()
    rows = np.linspace(-1, 2, 8, dtype=np.float32)
    loss = lambda w, x: (w * x - 0.5) ** 2
    w, opt_state = np.float32(1), optimizer.init(np.float32(1))

    @jax.jit
    def plain(w, opt_state):
        value, gradient = jax.value_and_grad(lambda w: loss(w, rows).mean())(w)
        extras = {"value": value} if name == "polyak_sgd" else {}
        updates, opt_state = optimizer.update(gradient, opt_state, w, **extras)
        return optax.apply_updates(w, updates), opt_state

    for _ in range(4):
        w, opt_state = plain(w, opt_state)
    trainer = mt.Trainer(loss, optimizer, **where(towers), run_dir=tmp_path)
    state = trainer.fit(np.float32(1), lambda first: iter([rows] * 9), steps=4)
    np.testing.assert_allclose(state.params, w, rtol=1e-5)


@both_ways
def test_a_skipped_step_leaves_nothing_but_its_number(towers):
    """Lie: the parameters are kept, and momentum, average or statistics have seen the bad rows.

    A loss and a gradient are bad each by itself. The replay has never heard of these steps.
    """

    def loss(w, x, *, model_state):
        bad_loss = jnp.where(x == 77, jnp.nan, 0.0)
        bad_slope = jnp.sqrt(jnp.where(x == 88, 0 * w, 1.0))  # finite, and its slope is not
        return (w * x - 1) ** 2 + bad_loss + bad_slope, {}, 0.5 * model_state + x.mean()

    rows = np.random.default_rng(0).normal(size=(5, 8)).astype(np.float32)
    rows[1, 3], rows[3, 6] = 77, 88
    decay = lambda count: count / (count + 1.0)
    step = mt.train_step(
        loss, optax.sgd(0.1, momentum=0.9), **where(towers),
        ema_decay=decay, skip_nonfinite=True,
    )  # fmt: skip
    state = step.init(np.float32(1), model_state=np.float32(0))
    w, trace, average, statistics = 1.0, 0.0, 1.0, 0.0
    for number, x in enumerate(rows.astype(float), start=1):
        state, metrics = step(state, rows[number - 1])
        assert float(metrics["skipped"]) == (number in (2, 4))
        assert np.isnan(float(metrics["loss"])) == (number == 2)
        if number not in (2, 4):
            trace = 0.9 * trace + (2 * (w * x - 1) * x).mean()
            w = w - 0.1 * trace
            average = decay(number) * average + (1 - decay(number)) * w
            statistics = 0.5 * statistics + x.mean()
        expected = (w, trace, average, statistics)
        found = (state.params, state.opt_state[0].trace, state.ema_params, state.model_state)
        assert_close(found, expected)
        assert int(state.step) == number


def test_a_bad_gradient_is_not_added_up():
    """Lie: a step is good if its parameters are, and the sum of gradients is NaN for ever."""
    loss = lambda w, x: jnp.sqrt(jnp.abs(w * x))  # for x = 0 finite, and its slope is not
    optimizer = optax.MultiSteps(optax.sgd(1.0), 3)
    step = mt.train_step(loss, optimizer, devices=1, skip_nonfinite=True)
    state = step.init(np.float32(1))
    skipped: list[float] = []
    for bad in (False, True, False, False):
        state, metrics = step(state, np.array([1, 1 - bad], np.float32))
        skipped.append(float(metrics["skipped"]))
    assert (skipped, float(state.params)) == ([0, 1, 0, 0], 0.5)


def test_an_infinite_number_that_an_optimizer_begins_with_is_no_bad_step():
    """Lie: a bound of infinity in the optimizer's state, and no step is ever made."""
    bound = optax.GradientTransformation(lambda w: jnp.float32(jnp.inf), lambda g, s, w: (g, s))
    optimizer = optax.chain(bound, optax.sgd(1.0))
    step = mt.train_step(lambda w, x: w * x, optimizer, devices=1, skip_nonfinite=True)
    state, metrics = step(step.init(np.float32(1)), np.float32([0.25, 0.75]))
    assert (float(metrics["skipped"]), float(state.params)) == (0, 0.5)


@pytest.mark.parametrize(
    "options",
    [{}, {"towers": 4}, pytest.param({"towers": 4, "shard_update": True}, marks=pytest.mark.slow)],
    ids=str,
)
def test_16_bit_parameters_train_as_by_hand(options):
    """Lie: the same bits everywhere, of a gradient that lost some. (All numbers here are exact.)"""
    step = mt.train_step(
        lambda w, x: w.astype(jnp.float32) * x,
        optax.sgd(0.125),
        devices=2,
        ema_decay=0.5,
        **options,
    )
    state = step.init(jnp.bfloat16(1))
    state, _ = step(state, np.arange(8, dtype=np.float32))  # a mean of 3.5
    state, metrics = step(state, np.array([1, 2, 3, 4, 5], np.float32))  # and of 3
    assert float(metrics["loss"]) == 0.5625 * 3
    assert float(state.params) == 1 - 0.125 * 3.5 - 0.125 * 3
    assert float(state.ema_params) == 0.5 * (0.5 * 1 + 0.5 * 0.5625) + 0.5 * 0.1875
    assert (state.params.dtype, state.ema_params.dtype) == (jnp.bfloat16, jnp.float32)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{}, {"towers": 4}, {"towers": 4, "stages": 1}],
    ids=["fast", "same bits", "stages"],
)
def test_a_mean_in_float16_of_large_numbers(options):
    """Lie: the sum over towers, which float16 cannot hold, is float16 before it is a mean."""

    def loss(w, x, *, model_state):
        mean = (60000 * x).mean().astype(jnp.float16)
        return (w * x) ** 2, {"mean": mean}, mean + 0 * model_state

    step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
    state = step.init(jnp.float32(1), model_state=jnp.float16(0))
    state, metrics = step(state, np.ones(8, np.float32))
    assert state.model_state.dtype == jnp.float16
    assert (float(state.model_state), float(metrics["mean"])) == (60000, 60000)


def test_an_average_that_begins_as_16_bit_parameters_moves():
    """Lie: in bfloat16 a thousandth of the way is none, and the average stands still."""
    step = mt.train_step(lambda w, x: -w * x, optax.sgd(0.1), devices=2, ema_decay=0.999)
    state = step.init(jnp.bfloat16(1.4)).replace(ema_params=jnp.bfloat16(1.4))
    for _ in range(3):
        state, _ = step(state, np.ones(4, np.float32))
    assert state.ema_params.dtype == np.float32
    assert float(state.ema_params) > float(jnp.bfloat16(1.4))


def test_an_average_on_the_host_stays_there_until_it_is_placed():
    """Lie: widening leaves that are wide puts a model larger than a device on the first one."""
    on_host = np.ones(3, np.float32)
    assert _widened(on_host) is on_host
    assert isinstance(_widened(on_host.astype(jnp.bfloat16)), np.ndarray)

"""train_step: equal to a plain loop on one device, compiled once, in both ways to run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from linear_steps import (
    RAGGED,
    batch_of,
    both_ways,
    fast_every_day,
    losses,
    params_of,
    same_bits_every_day,
    slowly,
    train,
    where,
)
from same_bits_program import MODELS
from trees import assert_close


@pytest.mark.parametrize(
    ("num_devices", "towers"),
    [(3, None), (2, 4), *(slowly(*case) for case in ((3, 4), (1, None), (1, 4)))],
)
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
    # Every day an update of fewer kernels than Adam's.
    rate = 1.0 if model_name == "mlp" else 1e-2
    schedule = optax.warmup_cosine_decay_schedule(0, rate, 2, 4)
    decayed = optax.chain(optax.add_decayed_weights(0.1), optax.sgd(schedule, momentum=0.9))
    last = decayed if model_name == "mlp" else optax.adamw(schedule)
    optimizer = optax.chain(optax.clip_by_global_norm(0.1), last)
    batches = [model.batch(np.random.default_rng(s), n) for s, n in enumerate((8, 8, 5))]

    @jax.jit
    def plain(params, opt_state, batch):
        mean = lambda params: loss_fn(params, batch)[0].mean()
        value, grads = jax.value_and_grad(mean)(params)
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    params, opt_state, losses = model.params, jax.jit(optimizer.init)(model.params), []
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
    near = {"rtol": 1e-5, "atol": 1e-6} if model_name == "mlp" else {"rtol": 1e-3, "atol": 1e-4}
    assert_close((state.params, history), (params, expected), **near)


@same_bits_every_day
def test_trap_a_second_compilation_on_step_two(towers):
    """Counters on one device, weak types, a ragged last batch: one compilation for the run."""
    traces, compilations = [], []

    def loss(params, batch, *, rng, model_state):
        traces.append(batch["x"].shape)
        noise = jax.random.uniform(rng, batch["y"].shape)
        return losses(params, batch) + noise, {"y": batch["y"]}, {"n": model_state["n"] + 1.0}

    schedule = optax.linear_schedule(0.1, 0, 9)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))
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


@same_bits_every_day
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


@pytest.mark.parametrize(
    ("decay", "towers"),
    [
        (0.8, None),
        (lambda count: count / (count + 1.0), 4),
        slowly(0.8, 4),
        slowly(lambda count: count / (count + 1.0), None),
    ],
    ids=["0.8-fast", "n/(n+1)-same bits", "0.8-same bits", "n/(n+1)-fast"],
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


@fast_every_day
def test_scalar_losses_of_full_batches(towers):
    """Lie: a scalar loss is another program than the same loss of each row, in NumPy here."""
    step = mt.train_step(lambda p, b: losses(p, b).mean(), optax.sgd(0.1), **where(towers))
    batches = [RAGGED[0], RAGGED[1], batch_of(8)]
    state, history = train(step, step.init(params_of()), batches)
    w, b, expected = params_of()["w"].astype(float), 0.5, []
    for batch in batches:
        wrong = batch["x"] @ w + b - batch["y"]
        expected.append(np.mean(wrong**2))
        w, b = w - 0.2 * batch["x"].T @ wrong / len(wrong), b - 0.2 * wrong.mean()
    assert_close((state.params, history), ({"b": b, "w": w}, expected))


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


@fast_every_day
def test_extra_args_reach_the_optimizer(towers):
    """Lie: reduce_on_plateau and friends are refused, or see one tower's loss."""
    optimizer = optax.chain(
        optax.sgd(0.1), optax.contrib.reduce_on_plateau(factor=0.5, patience=1, accumulation_size=1)
    )
    step = mt.train_step(losses, optimizer, **where(towers))
    state, history = train(step, step.init(params_of()), RAGGED[:2])
    assert_close(state.opt_state[1].best_value, min(history))


@pytest.mark.slow
@pytest.mark.parametrize("is_plain", [False, True])
def test_extra_args_reach_an_optimizer_in_multi_steps(is_plain):
    """Lie: the loss is given to every optimizer that takes it."""
    optimizer = optax.MultiSteps(optax.contrib.reduce_on_plateau(accumulation_size=1), 1)
    if is_plain:
        optimizer = optimizer.gradient_transformation()
    step = mt.train_step(losses, optimizer, devices=1)
    state, metrics = step(step.init(params_of()), RAGGED[0])
    assert_close(state.opt_state.inner_opt_state.best_value, metrics["loss"])


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
@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("name", ["sam", "polyak_sgd"])
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

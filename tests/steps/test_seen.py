"""Kinds of batches that a step has seen: they run without being looked at again, and alike."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt

WAYS = [{}, {"towers": 2, "devices": 1}, {"towers": 2, "shard_update": True}]
DRAW = np.random.default_rng(0)


def losses(params, batch):
    return batch["scale"] * (batch["x"] @ params["w"] - batch["y"]) ** 2


def make_batch(rows, scale):
    x = DRAW.normal(size=(rows, 3)).astype(np.float32)
    return {"scale": np.float32(scale), "x": x, "y": x.sum(1)}


def make(**options):
    given = {"devices": 2, "global_batch": 8, **options}
    step = mt.train_step(losses, optax.sgd(0.1), **given)
    return step, step.init({"w": np.zeros(3, np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_a_kind_is_looked_at_once_and_runs_as_before(monkeypatch, options):
    # The lie: the numbers, rows or row count of the batch before.
    batches = [make_batch(*kind) for kind in [(8, 1), (5, 1), (8, 2), (5, 3), (8, 1)]]
    step, state = make(**options)
    for number, batch in enumerate(batches):
        w = np.asarray(state.params["w"])
        if number == 2:
            monkeypatch.setattr("multitower.steps.step.take_apart", None)
        state, metrics = step(state, batch)
        wanted = (batch["scale"] * (batch["x"] @ w - batch["y"]) ** 2).mean()
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    with pytest.raises(TypeError):  # another dtype is another kind
        step(state, {**batches[0], "y": batches[0]["y"].astype(np.int32)})
    with pytest.raises(TypeError):
        step(state, {**batches[0], "scale": 1.0})


@pytest.mark.parametrize("options", WAYS[:2], ids=str)
def test_what_is_wrong_with_a_batch_of_a_kind_is_said(options):
    step, state = make(**options)
    batch = jax.tree.map(jnp.asarray, make_batch(8, 1))
    state, _ = step(state, batch)
    batch["x"].delete()
    with pytest.raises(mt.ArgumentError, match=r"batch\['x'\] is gone"):
        step(state, batch)


def test_a_changed_state_is_taken_over_and_another_steps_state_too():
    step, state = make(towers=2, devices=1)
    batch = make_batch(8, 1)
    state, _ = step(state, batch)
    state.params["w"] = np.zeros(3, np.float32)
    state, metrics = step(state, batch)
    np.testing.assert_allclose(metrics["loss"], (batch["y"] ** 2).mean(), rtol=1e-5)
    _, other = make()
    _, metrics = step(other, batch)
    np.testing.assert_allclose(metrics["loss"], (batch["y"] ** 2).mean(), rtol=1e-5)


@pytest.mark.slow
def test_blocks_of_another_model_are_not_those_of_the_first():
    step, _ = make(towers=2, shard_update=True)
    batch = make_batch(8, 1)
    for dtype in (np.float32, np.float16, np.float32):
        state = step.init({"w": np.zeros(3, dtype)})
        for _ in range(2):
            state, _ = step(state, batch)
        assert state.params["w"].dtype == dtype


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"shard_update": True}, {"stages": 2, "devices": 1}], ids=str)
def test_models_of_other_shapes_take_turns(options):
    """Lie: the states of one model in the blocks or programs of the model that came last."""
    predict = lambda w, x: mt.cut(jnp.tanh(x @ w[0])) @ w[1]
    loss = lambda w, x: predict(w, x) ** 2
    step = mt.train_step(loss, optax.sgd(0.1), towers=2, **{"devices": 2, **options})
    x, models = (
        np.ones((4, 3), np.float32),
        [[np.ones((3, n), "f"), np.ones(n, "f")] for n in (2, 4)],
    )
    states = [step.init(model) for model in models]
    for number, model in enumerate(models):
        gradients = jax.grad(lambda w: loss(w, x).mean())(model)
        states[number], _ = step(states[number], x)
        for found, w, gradient in zip(states[number].params, model, gradients, strict=True):
            np.testing.assert_allclose(found, w - 0.1 * gradient, rtol=1e-5)


COPIES = {
    "copied": lambda state, _: jax.tree.map(jnp.copy, state),
    "replaced": lambda state, params: state.replace(params=params),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize(
    "options", [{"shard_update": True}, {}, {"stages": 1, "devices": 1}], ids=str
)
def test_a_copied_state_is_that_of_its_own_shapes(options, how):
    """Lie: a copy, which does not say whose it is, in the blocks of the model that came last."""
    loss = lambda w, x: (x[:, : len(w)] @ w - 1) ** 2
    x = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
    models = [np.ones(n, np.float32) for n in (6, 3)]
    step = mt.train_step(loss, optax.sgd(0.1), towers=2, **{"devices": 2, **options})
    long, short = map(step.init, models)
    copied = COPIES[how](long if how == "copied" else short, models[0])
    short = step.init(models[1]) if how == "replaced" else short
    for state, w in [(copied, models[0]), (short, models[1])] * 2:
        found, _ = step(jax.tree.map(jnp.copy, state), x)
        gradient = jax.grad(lambda w: loss(w, x).mean())(w)
        np.testing.assert_allclose(found.params, w - 0.1 * gradient, rtol=1e-4)
    found, _ = step(short, x)
    np.testing.assert_allclose(found.params, w - 0.1 * gradient, rtol=1e-4)


@pytest.mark.slow
def test_parameters_of_another_shape_that_replace_others_are_cut_anew():
    """Lie: their blocks are those of the parameters that the state was made with."""
    loss = lambda w, x: (x[:, : len(w)] @ w - 1) ** 2
    x = np.arange(24, dtype=np.float32).reshape(4, 6) / 10
    step = mt.train_step(loss, optax.sgd(0.1), towers=2, devices=2, shard_update=True)
    w = np.ones(6, np.float32)
    state, _ = step(step.init(w[:3]).replace(params=w), x)
    gradient = 2 * (x.sum(1) - 1) @ x / len(x)
    np.testing.assert_allclose(state.params, w - 0.1 * gradient, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"towers": 1}, {"shard_params": True}, {"towers": 1, "updates": "asynchronous"}],
    ids=str,
)
def test_model_states_of_other_kinds_take_turns(options):
    """Lie: the programs for the model state of the state that came last."""

    def loss(w, x, *, model_state):
        return x @ w, {}, {name: leaf + 1 for name, leaf in model_state.items()}

    step = mt.train_step(loss, optax.sgd(0.1), devices=1, **options)
    w, x = np.ones(3, np.float32), make_batch(4, 1)["x"]
    kinds = [("n", 2), ("n", 3), ("m", 3)]
    states = [step.init(w, model_state={n: np.zeros(size, np.float32)}) for n, size in kinds]
    for _ in range(2):
        states = [step(state, x)[0] for state in states]
    assert [state.model_state[n].tolist() for state, (n, _) in zip(states, kinds, strict=True)] == [
        [2] * size for _, size in kinds
    ]


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"updates": "asynchronous"}, marks=pytest.mark.slow)], ids=str
)
def test_numbers_and_rows_of_other_dtypes_take_turns(options):
    """Lie: the program for the numbers or the rows of the batch that came first."""
    step, state = make(towers=1, devices=1, **options)
    kinds = [("f", np.float32(2))] * 2 + [("f", np.int32(3))] * 2 + [("f", 2.5), ("e", 2.5)]
    for dtype, scale in kinds:
        batch = {**make_batch(8, 1), "scale": scale}
        batch["x"] = batch["x"].astype(dtype)
        w = np.asarray(state.params["w"])
        state, metrics = step(state, batch)
        wanted = (scale * (batch["x"] @ w - batch["y"]) ** 2).mean()
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def test_batches_of_other_names_take_turns():
    """Lie: the rows by the names that came first, and what is known of the loss of those."""
    scale = {"once": 1.0, "twice": 2.0, "mean": 3.0}

    def loss(w, batch):
        ((name, x),) = batch.items()
        found = scale[name] * (x @ w)
        return found.mean() if name == "mean" else found

    step = mt.train_step(loss, optax.sgd(0.0), towers=2, devices=1)
    state, x = step.init(np.ones(3, np.float32)), DRAW.normal(size=(8, 3)).astype(np.float32)
    for name, factor in scale.items():
        state, metrics = step(state, {name: x})
        np.testing.assert_allclose(metrics["loss"], factor * x.sum(1).mean(), rtol=1e-4)
    with pytest.raises(mt.OutputError, match="scalar loss"):
        step(state, {"mean": x[:5]})


@pytest.mark.slow
def test_a_kind_fills_the_towers_as_in_the_run_that_it_is_of():
    """Lie: the towers of an earlier `fit` with smaller batches, and so other random numbers."""

    def noise(w, batch, *, rng):
        return batch @ w + jax.random.uniform(rng, (len(batch),))

    def loss_after(*sizes):
        step = mt.train_step(noise, optax.sgd(0.1), towers=2, devices=1)
        for size in sizes:
            step.expect(size)
            state = step.init(np.ones(3, np.float32), rng=jax.random.key(0))
            _, metrics = step(state, np.ones((4, 3), np.float32))
        return float(metrics["loss"])

    assert loss_after(4, 8) == loss_after(8) != loss_after(4)


@pytest.mark.slow
def test_programs_of_another_state_or_setting_are_not_those_of_the_first():
    # The lie: a state that a step has made has the shapes of all states that it makes.
    step, state = make(towers=1, devices=1)
    batch = make_batch(8, 1)
    other = step.init({"w": np.zeros(3, np.float16)})
    for _ in range(3):
        state, _ = step(state, batch)
        other, _ = step(other, batch)
        assert (state.params["w"].dtype, other.params["w"].dtype) == (np.float32, np.float16)
    (runner,) = state.kept.maker.runners.values()
    assert len(runner._engine._compiled) == 1
    with jax.default_matmul_precision("highest"):
        step(state, batch)
    assert len(runner._engine._compiled) == 2


@pytest.mark.slow
def test_stages_draw_as_the_settings_say_now():
    """Lie: the programs of the first step, whatever setting of JAX a `with` block changes."""

    def noise(params, batch):
        drawn = jax.random.uniform(jax.random.key(0), (8,))
        return (batch["x"] @ params["w"]) * 0 + drawn.mean()

    step = mt.train_step(noise, optax.sgd(0.1), towers=1, stages=1, devices=1)
    state, batch = step.init({"w": np.zeros(3, np.float32)}), {"x": np.ones((8, 3), np.float32)}
    for partitionable in (True, False, True):
        with jax.threefry_partitionable(partitionable):
            state, metrics = step(state, batch)
            wanted = jax.random.uniform(jax.random.key(0), (8,)).mean()
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-6)


@pytest.mark.parametrize("options", [{}, {"towers": 2}, {"shard_params": True}], ids=str)
def test_a_later_step_inside_jit_is_refused_as_the_first_one_is(options):
    # The lie: one update, traced once, and then the same loss for ever.
    step, state = make(**options)
    batch = make_batch(8, 1)
    state, _ = step(state, batch)
    inside = jax.jit(lambda: step(state, batch)[1]["loss"])
    with pytest.raises(mt.ArgumentError, match=r"called inside jax.jit"):
        inside()
    _, metrics = step(state, batch)  # nothing is lost
    assert np.isfinite(metrics["loss"])


@pytest.mark.slow
def test_a_number_that_adapts_to_others_is_a_kind_of_its_own():
    # The lie, with stages: the dtype, and so the bits, of the batch that came first.
    def loss(params, batch):
        hidden = mt.cut(batch["x"] * params["a"])
        return (hidden * params["b"] * batch["scale"]).astype(jnp.float32)

    params = {"a": jnp.bfloat16(0.3), "b": jnp.bfloat16(0.7)}
    x = jnp.asarray(DRAW.normal(size=4), jnp.bfloat16)
    weak, strong = ({"x": x, "scale": jnp.asarray(1.2345, of)} for of in (None, jnp.float32))
    assert weak["scale"].weak_type
    found = {}
    for order in ((weak, strong), (strong, weak)):
        step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=1, stages=2)
        for batch in order:
            _, metrics = step(step.init(params), batch)
            found.setdefault(id(batch), set()).add(float(metrics["loss"]))
    assert all(len(values) == 1 for values in found.values())
    assert found[id(weak)] != found[id(strong)]


@pytest.mark.parametrize(("options", "most"), [({}, 40), ({"towers": 2}, 90)], ids=str)
def test_python_calls_of_a_step(options, most):
    """How much of this library's Python runs in a step of a kind that has been seen."""
    step, state = make(**options)
    batch = mt.shard(make_batch(8, 1), devices=2, **options)
    state, _ = step(state, batch)
    count = 0

    def note(frame, event, _):
        nonlocal count
        count += event == "call" and "multitower" in frame.f_code.co_filename

    sys.setprofile(note)
    step(state, batch)
    sys.setprofile(None)
    if sys.version_info < (3, 12):
        most *= 1.3  # there a comprehension is a call
    assert 5 < count <= most

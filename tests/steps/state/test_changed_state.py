"""What a user writes into a state is what the next step starts from, in every way to run.

The lie: a value that is read back and not used, because a step goes on with its own copies.
"""

import copy
import functools
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from tower_keys import tower_key

WAYS = {
    "fast": {},
    "same bits": {"towers": 4},
    "shard_update": {"towers": 4, "shard_update": True},
}
every_way = pytest.mark.parametrize("way", WAYS)
OPTIMIZER = optax.inject_hyperparams(optax.sgd)(learning_rate=0.1, momentum=0.9)
ROWS = np.random.default_rng(0).normal(size=(3, 8, 5)).astype(np.float32)


def losses(params, x, *, model_state):
    loss = (x @ params["w"] + params["b"]) ** 2
    return loss, {}, {"seen": model_state["seen"] + 1.0}


@functools.cache
def step_of(way):
    return mt.train_step(losses, OPTIMIZER, devices=2, ema_decay=0.5, **WAYS[way])


def make(way):
    step = step_of(way)
    params = {"w": np.arange(5, dtype=np.float32), "b": np.float32(1)}
    return step, step.init(params, model_state={"seen": jnp.float32(0)})


def numpy_steps(changes, num_steps):
    """SGD with momentum in float64; `changes` are called before the steps."""
    p = {"w": np.arange(5.0), "b": 1.0, "lr": 0.1, "tw": np.zeros(5), "tb": 0.0}
    for number in range(num_steps):
        changes.get(number, lambda p: None)(p)
        x = ROWS[number % 3].astype(float)
        wrong = 2 * (x @ p["w"] + p["b"])
        p["tw"] = 0.9 * p["tw"] + (wrong[:, None] * x).mean(0)
        p["tb"] = 0.9 * p["tb"] + wrong.mean()
        p["w"], p["b"] = p["w"] - p["lr"] * p["tw"], p["b"] - p["lr"] * p["tb"]
    return p


def train(step, state, changes, num_steps):
    for number in range(num_steps):
        changes.get(number, lambda state: None)(state)
        state, _ = step(state, ROWS[number % 3])
    return state


RATES = [(0, np.float64(0.01)), (2, 0.0), (2, jnp.float32(0.01))]


# Every day each rate in one way, and each way with one rate.
@pytest.mark.parametrize(
    ("when", "rate", "way"),
    [
        pytest.param(*case, way, marks=[] if place == number else [pytest.mark.slow])
        for place, way in enumerate(WAYS)
        for number, case in enumerate(RATES)
    ],
)
def test_a_learning_rate(way, when, rate):
    def change(state):
        state.opt_state.hyperparams["learning_rate"] = rate

    step, state = make(way)
    state = train(step, state, {when: change}, 4)
    expected = numpy_steps({when: lambda p: p.update(lr=float(rate))}, 4)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["b"], expected["b"], rtol=2e-5, atol=1e-6)
    assert float(state.opt_state.hyperparams["learning_rate"]) == pytest.approx(float(rate))


@every_way
def test_parameters_averages_momenta_and_model_state(way):
    new, average, momentum = np.random.default_rng(1).normal(size=(3, 5)).astype(np.float32)

    def change(state):
        state.params["w"] = new
        state.ema_params.update(w=average, b=jnp.float32(7))
        state.opt_state.inner_state[0].trace["w"] = momentum
        state.model_state["seen"] = 10

    step, state = make(way)
    state = train(step, state, {1: change}, 2)
    expected = numpy_steps({1: lambda p: p.update(w=new, tw=momentum)}, 2)
    moved = (average + expected["w"]) / 2
    np.testing.assert_allclose(state.ema_params["w"], moved, rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=2e-5, atol=1e-6)
    np.testing.assert_allclose(state.ema_params["b"], (7 + expected["b"]) / 2, rtol=2e-5, atol=1e-6)
    assert float(state.model_state["seen"]) == 11
    for leaf in (state.params["w"], state.model_state["seen"]):
        assert leaf.is_fully_replicated
        assert leaf.sharding.device_set == set(mt.devices(2))


@pytest.mark.slow
def test_a_key_in_the_model_state():
    def draws(w, x, *, model_state):
        key = model_state["key"]
        return w * jax.random.uniform(key, (len(x),)), {}, {"key": jax.random.fold_in(key, 1)}

    step = mt.train_step(draws, optax.sgd(1.0), devices=1, towers=2)
    keys = [jax.random.key(n) for n in (0, 5)]
    state, _ = step(step.init(np.float32(0), model_state={"key": keys[0]}), ROWS[0])
    state.model_state["key"] = keys[1]
    state, _ = step(state, ROWS[0])
    drawn = [jax.random.uniform(tower_key(key, tower), (4,)) for key in keys for tower in (0, 1)]
    np.testing.assert_allclose(state.params, -2 * np.mean(drawn), rtol=1e-5)
    assert state.model_state["key"] == jax.random.fold_in(keys[1], 1)
    for other in (jax.random.split(keys[0]), jax.random.key(0, impl="rbg"), jnp.zeros(2, int)):
        state.model_state["key"] = other
        with pytest.raises(mt.StateError, match=r"state.model_state\['key'\] is .* keep shape"):
            step(state, ROWS[0])


@every_way
def test_what_is_looked_at_later_does_not_hide_it(way):
    """Lie: a look at the optimizer's state makes the parameters anew."""

    def change(state):
        state.params["w"] = np.zeros(5, np.float32)
        assert state.opt_state is not None
        np.testing.assert_array_equal(state.params["w"], np.zeros(5))

    step, state = make(way)
    state = train(step, state, {1: change}, 2)
    expected = numpy_steps({1: lambda p: p.update(w=np.zeros(5))}, 2)
    np.testing.assert_allclose(state.params["w"], expected["w"], rtol=2e-5, atol=1e-6)


@every_way
def test_nothing_is_compiled_anew_and_the_old_state_is_spent(way):
    compiled = []

    def listen(name, duration, **_):
        if name.endswith("backend_compile_duration"):
            compiled.append(name)

    def change(state):
        state.opt_state.hyperparams["learning_rate"] = 0.05

    step, state = make(way)
    state = train(step, state, {0: change, 1: change}, 3)  # what copies a leaf is compiled too
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        change(state)
        new, _ = step(state, ROWS[0])
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert not compiled
    assert int(new.step) == 4
    with pytest.raises(mt.StateError, match="overwritten"):
        step(state, ROWS[0])


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_devices():
    def change(state):
        state.opt_state.hyperparams["learning_rate"] = 0.05
        state.params["w"] = np.ones(5, np.float32)

    for sharded in (False, True):
        found = []
        for devices in (1, 3):
            step = mt.train_step(
                losses, OPTIMIZER, devices=devices, towers=4,
                shard_update=sharded,
            )  # fmt: skip
            params = {"w": np.zeros(5, np.float32), "b": np.float32(1)}
            state = step.init(params, model_state={"seen": jnp.float32(0)})
            found.append(mt.fingerprint(train(step, state, {0: change, 2: change}, 3)))
        assert len(set(found)) == 1


LEAVE = {
    "pickle": lambda state: pickle.loads(pickle.dumps(state)),
    "copy": copy.copy,
    "jax.tree.map": lambda state: jax.tree.map(jnp.copy, state),
    "replace": lambda state: state.replace(rng=None),
    "another step": lambda state: state,
}


@pytest.mark.slow
@every_way
@pytest.mark.parametrize("how", LEAVE)
def test_what_is_written_goes_with_a_state_that_leaves_its_step(way, how):
    """Lie: a number fits where the step itself reads it, and in a copy it breaks the next step."""

    def change(state):
        state.opt_state.hyperparams["learning_rate"] = 0.01
        state.params.update(w=np.arange(5.0) / 4, b=2)

    found = []
    for leave in (lambda state: state, LEAVE[how]):
        step, state = make(way)
        state, _ = step(state, ROWS[0])
        change(state)
        state = leave(state)
        if how == "another step":
            step = mt.train_step(losses, OPTIMIZER, devices=2, ema_decay=0.5, **WAYS[way])
        found.append(mt.fingerprint(step(state, ROWS[1])[0]))
    assert found[0] == found[1]


@every_way
def test_what_does_not_fit_is_refused_and_the_state_stays(way):
    step, state = make(way)
    state, _ = step(state, ROWS[0])
    for value, message in [
        (np.zeros(3, np.float32), r"state.params\['w'\] is float32\[3\].*float32\[5\]"),
        (np.zeros(5, np.complex64), r"state.params\['w'\] is complex64"),
        ("high", r"state.params\['w'\] is 'high'"),
    ]:
        state.params["w"] = value
        with pytest.raises(mt.StateError, match=message):
            step(state, ROWS[1])
    state.params["w"] = np.zeros(5, np.float32)
    state.params["more"] = np.zeros(5, np.float32)
    with pytest.raises(mt.StateError, match=r"state.params has another structure"):
        step(state, ROWS[1])
    del state.params["more"]
    state, _ = step(state, ROWS[1])
    assert int(state.step) == 2


def test_the_joined_optimizer_state_cannot_be_written_to_in_place():
    """Lie: an assignment into the host's copy of the blocks, which nobody reads."""
    step, state = make("shard_update")
    state, _ = step(state, ROWS[0])
    for leaf in jax.tree.leaves(state.opt_state):
        with pytest.raises(ValueError, match="read-only"):
            leaf[...] = 0


@every_way
def test_python_numbers_in_replace_are_those_of_init(way):
    found = []
    for bias, start in ((0.5, 0), (np.float32(0.5), np.int32(0))):
        step, state = make(way)
        state, _ = step(state, ROWS[0])
        state = state.replace(params={**state.params, "b": bias}, step=start)
        state, metrics = step(state, ROWS[1])
        assert int(state.step) == 1
        found.append(jax.device_get((state.params, metrics["loss"])))
    jax.tree.map(np.testing.assert_array_equal, *found)


def test_a_misspelt_attribute_in_replace_is_named():
    """Lie: the words of a named tuple, "unexpected field names", for a misspelt attribute."""
    _, state = make("fast")
    with pytest.raises(mt.ArgumentError, match=r"no attribute 'param'. Did you mean 'params'"):
        state.replace(param=state.params)


def weak_optimizer():
    """Its state holds numbers that adapt to other dtypes, as Python's do: from init, and after."""

    def init(params):
        return {"count": jnp.int32(0), "rate": jnp.asarray(0.1), "next": jnp.float32(0.1)}

    def update(gradients, state, params=None):
        count = state["count"] + 1
        new = {"count": count, "rate": state["rate"], "next": count * 0.01}
        updates = lambda g: -(g * state["rate"]) - g * state["next"]
        return jax.tree.map(updates, gradients), new

    return optax.GradientTransformation(init, update)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [{}, {"towers": 4}, {"towers": 4, "shard_update": True}, {"shard_params": True}]
)
def test_law_l4_a_weak_type_in_the_optimizer_state(options):
    """Lie: bfloat16 products that are float32 ones after a resume, as JAX saves dtypes only."""
    step = mt.train_step(
        lambda w, x: (x.astype(w.dtype) @ w - 1) ** 2, weak_optimizer(), devices=2, **options
    )
    prints = []
    for is_saved in (False, True):
        state = step.init(jnp.linspace(-1, 1, 5, dtype=jnp.bfloat16))
        for number in range(3):
            if is_saved:
                state = state.replace(opt_state=jax.device_get(state.opt_state))
            state, _ = step(state, ROWS[number])
        prints.append(mt.fingerprint(state.params))
    assert prints[0] == prints[1]

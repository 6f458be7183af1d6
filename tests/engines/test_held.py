"""Large arrays that a loss closes over are arguments of its programs, on each device once."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.engines import held
from multitower.engines.executable import Holding, compile_for_each
from slow import slow_but_for

SIZE = 512  # of float32, square: as many bytes as make an array a large one
NUM_ROWS, STEPS = 8, 2

WAYS = {
    "fast": {},
    "towers": {"towers": 4, "devices": 2},
    "one device": {"towers": 4, "devices": 1},
    "shard_params": {"shard_params": True, "devices": 2},
    "blocks": {"shard_update": True, "towers": 4, "devices": 2},
    "stages": {"stages": 2, "towers": 2, "devices": 2},
    "steps_per_call": {"steps_per_call": 2, "devices": 2},
    "local": {"sync_every": 1, "outer_optimizer": optax.sgd(1.0), "towers": 2, "devices": 2},
    "local loop": {
        "sync_every": 1,
        "outer_optimizer": optax.sgd(1.0),
        "steps_per_call": 2,
        "devices": 2,
    },
}
RNG = np.random.default_rng(0)
TEACHER = (RNG.standard_normal((SIZE, SIZE)) / SIZE**0.5).astype(np.float32)
PARAMS = {"a": np.eye(SIZE, dtype=np.float32)[:, :4], "b": np.float32(0.5) * np.ones(4, np.float32)}
BATCHES = RNG.standard_normal((STEPS, NUM_ROWS, SIZE)).astype(np.float32)


def make_losses(given, cuts):
    """A loss against a teacher of two weights: of JAX in a function under jit, and of NumPy."""
    own = np.array(given)
    teacher = jnp.asarray(given)
    hidden = jax.jit(lambda x: jnp.tanh(x @ teacher))

    def losses(params, x):
        wanted = jax.lax.stop_gradient(hidden(x) @ own)
        h = x @ params["a"]
        h = mt.cut(h) if cuts else h
        return (h @ params["b"] - wanted[:, 0]) ** 2

    return losses, own, teacher


def replay():
    """Gradient descent in NumPy, float64."""
    a, b = (np.array(PARAMS[name], np.float64) for name in "ab")
    losses = []
    for x in BATCHES.astype(np.float64):
        wanted = (np.tanh(x @ TEACHER.astype(np.float64)) @ TEACHER)[:, 0]
        error = x @ a @ b - wanted
        losses.append((error**2).mean())
        of_a, of_b = np.outer(x.T @ error, b), (x @ a).T @ error
        a, b = a - 0.02 / NUM_ROWS * of_a, b - 0.02 / NUM_ROWS * of_b
    return losses, a, b


def run(losses, way, **more):
    step = mt.train_step(losses, optax.sgd(0.01), **way, **more)
    state = step.init(PARAMS)
    if "steps_per_call" in way:
        state, metrics = step(state, list(BATCHES))
        return step, state, list(np.asarray(metrics["loss"]))
    found = []
    for x in BATCHES:
        state, metrics = step(state, x)
        found.append(float(metrics["loss"]))
    return step, state, found


@pytest.fixture
def found(monkeypatch):
    """How many large arrays each program closes over, in the order in which they are compiled."""
    numbers = []
    init = held.HeldArrays.__init__

    def noted(self, closed):
        init(self, closed)
        numbers.append(len(self))

    monkeypatch.setattr(held.HeldArrays, "__init__", noted)
    return numbers


@pytest.mark.parametrize("name", slow_but_for(["fast", "towers"], WAYS))
def test_no_program_has_a_large_constant_and_numbers_are_those_of_numpy(name, found):
    # The lie: a program without the arrays, with one in the other's place, or with the array that
    # NumPy's owner has written into since.
    losses, own, teacher = make_losses(TEACHER, cuts=name == "stages")
    kept = TEACHER.copy()
    step, state, first = run(losses, WAYS[name])
    expected, a, b = replay()
    np.testing.assert_allclose(first, expected, rtol=2e-5)
    np.testing.assert_allclose(state.params["a"], a, rtol=2e-5, atol=2e-6)
    np.testing.assert_allclose(state.params["b"], b, rtol=2e-5, atol=2e-6)
    assert max(found) == 2
    own[:] = 7
    again = step.init(PARAMS)
    x = list(BATCHES) if "steps_per_call" in WAYS[name] else BATCHES[0]
    assert np.ravel(step(again, x)[1]["loss"])[0] == np.float32(first[0])
    np.testing.assert_array_equal(teacher, kept)


@pytest.mark.parametrize(
    "way", [{"devices": 2}, pytest.param({"devices": 1, "towers": 2}, marks=pytest.mark.slow)]
)
def test_weights_in_an_object_are_no_constants_of_value_and_grad(way, found):
    # The lie: other rows, or other weights in the object, find the program of the first ones.
    class Holder:
        layers: ClassVar = [{"w": jnp.asarray(TEACHER)}]

    holder = Holder()

    def losses(params, x):
        return ((x @ holder.layers[0]["w"]) @ params) ** 2

    run = mt.value_and_grad(losses, **way)
    params = np.ones(SIZE, np.float32) / SIZE
    for number in range(3):
        if number == 2:
            holder.layers[0]["w"] = jnp.asarray(TEACHER.T)
        x = BATCHES[0][: NUM_ROWS - 4 * (number == 1)]
        weights = np.asarray(holder.layers[0]["w"], np.float64)
        h = x.astype(np.float64) @ weights
        loss, gradient = run(params, x)
        np.testing.assert_allclose(loss, ((h @ params) ** 2).mean(), rtol=1e-5)
        expected = 2 * (h @ params) @ h / len(x)
        np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-6)
    assert max(found) == 1


@pytest.mark.parametrize("name", ["fast", "towers", pytest.param("stages", marks=pytest.mark.slow)])
def test_an_array_that_is_gone_is_refused_in_words(name):
    # The lie, with JAX 0.10: one device has no copy, and the others wait for it forever.
    losses, _, teacher = make_losses(TEACHER, cuts=name == "stages")
    step, state, _ = run(losses, WAYS[name])
    jax.jit(lambda x: x + 1, donate_argnums=0)(teacher)
    with pytest.raises(mt.ArgumentError, match=r"closes over an array of shape \(512, 512\) that"):
        step(state, BATCHES[0])


def test_programs_share_one_copy_on_each_device():
    # The lie: each program keeps copies of its own, or copies what is on the device already.
    devices = jax.devices()[:2]
    weights = jax.device_put(TEACHER, devices[0])
    shapes = (jax.ShapeDtypeStruct((3, SIZE), np.float32),)
    once = compile_for_each(lambda x: x @ weights, shapes, devices)
    twice = compile_for_each(lambda x: x @ weights @ weights, shapes, devices)
    assert all(isinstance(one, Holding) and len(one.arrays) == 1 for one in once + twice)
    address = lambda program: program.arrays[0].unsafe_buffer_pointer()
    assert address(once[0]) == address(twice[0]) == weights.unsafe_buffer_pointer()
    assert address(once[1]) == address(twice[1]) != address(once[0])
    x = jax.device_put(BATCHES[0, :3], devices[1])
    np.testing.assert_array_equal(once[1](x), once[0](jax.device_put(x, devices[0])))


def test_small_arrays_stay_constants():
    # The lie: every array is an argument, and the compiler does not know the numbers of a mask.
    mask = jnp.arange(SIZE)
    (program,) = compile_for_each(
        lambda x: x * mask, (jax.ShapeDtypeStruct((SIZE,), np.float32),), jax.devices()[:1]
    )
    assert not isinstance(program, Holding)


@pytest.mark.slow
def test_a_plan_counts_them():
    # The lie: frozen weights take no memory.
    with_them, _, _ = make_losses(TEACHER, cuts=True)

    def without(params, x):
        return (mt.cut(x @ params["a"]) @ params["b"]) ** 2

    shapes = jax.eval_shape(lambda: PARAMS)
    rest = [
        {str(one.options): one.memory["rest"] for one in layouts}
        for losses in (with_them, without)
        for layouts in [mt.plan(losses, optax.sgd(0.01), shapes, BATCHES[0], devices=2).layouts]
    ]
    assert rest[0].keys() == rest[1].keys()
    more = {(rest[0][name] - rest[1][name]) // TEACHER.nbytes for name in rest[0]}
    assert more == {2}  # a teacher's two weights

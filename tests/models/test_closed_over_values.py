"""Numbers and settings that a loss closes over: each has its own program, or is data."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from closing_over import X, assert_as_jax
from multitower.models.callables import as_function
from multitower.models.closures import call_opened


def test_settings_that_are_equal_and_of_other_types_are_two_programs():
    """Lie: whole numbers, because an equal record with a whole number was there before."""

    @dataclasses.dataclass(frozen=True)
    class Config:
        scale: float

    def times(config):
        return mt.make_parallel(lambda x: x * config.scale, devices=2)(np.arange(4)).dtype

    scales = 2, 2.0, np.int32(2), np.float32(2), np.float16(2)
    wanted = [np.int32, np.float32, np.int32, np.float32, np.float16]
    assert [times(Config(scale)) for scale in scales] == wanted
    inner = [Config(Config(2)), Config(Config(2.0))]
    found = [
        mt.make_parallel(lambda x, own=own: x * own.scale.scale, devices=2)(np.arange(4)).dtype
        for own in inner
    ]
    assert found == [np.int32, np.float32]


def test_the_sign_of_a_zero_that_is_closed_over():
    """Lie: the program of 0.0 for -0.0, as the two are equal."""

    def angle(zero):
        run = mt.value_and_grad(lambda w, x: w * jnp.arctan2(0 * x, zero), towers=2, devices=1)
        return run(np.float32(1), np.ones(4))[0]

    np.testing.assert_allclose(angle(0.0), 0.0)
    np.testing.assert_allclose(angle(-0.0), np.pi, rtol=1e-6)


table = {"scale": 2.0}


traced = []


def test_a_dict_of_settings_in_the_closure():
    """Lies: a compilation at every step; or settings of before, also for a batch of other rows."""

    def make_loss(config):
        loss = lambda w, x: (traced.append(1), w * x * config["scales"][0])[1]

        def rebind(new):
            nonlocal config
            config = new

        return loss, rebind

    run = lambda loss, x=X: float(mt.value_and_grad(loss, devices=1, towers=2)(1.0, x)[0])
    config = {"scales": [2.0]}
    loss, rebind = make_loss(config)
    found, count = [run(loss)], len(traced)
    rebind({"scales": [5.0]})
    found.append(run(make_loss(config)[0]))
    assert len(traced) == count
    found.append(run(make_loss(config)[0], X[:4]))
    config["scales"][0] = 3.0
    found.append(run(make_loss(config)[0]))
    assert found == [2 * X.mean(), 2 * X.mean(), 2 * X[:4].mean(), 3 * X.mean()]


def test_numbers_that_decide_are_numbers():
    """Lie: JAX's error for a float that the loss compares, or an array that NumPy gets."""

    def make_loss(scale, array):
        def loss(w, x):
            traced.append(1)
            if scale > 2:
                return w * x * scale
            return w * x * float(np.cumsum(array)[-1])

        return loss

    run = lambda *held: mt.value_and_grad(make_loss(*held), devices=2)(1.0, X)[0]
    assert [run(3.0, X), run(1.0, np.ones(2)), run(1.0, np.ones(4))] == [10.5, 7.0, 14.0]
    count = len(traced)
    assert run(3.0, X) == 10.5
    assert len(traced) == count, "it is not tried without its numbers again"


@dataclasses.dataclass(frozen=True)
class Unequal:
    """Equal to others that do something else."""

    table: object = dataclasses.field(compare=False)
    scale: dict = dataclasses.field(hash=False, default_factory=dict)


def times_all(x, held):
    return x * held.table[0] * held.scale.get("all", 1.0)


@pytest.mark.parametrize("make", [pytest.param(np.array, marks=pytest.mark.slow), jnp.array, list])
def test_what_the_equality_of_a_value_leaves_out(make):
    """Lies: the array of another value; a dict as it was before it changed."""

    def run(held):
        return mt.value_and_grad(lambda w, x: times_all(w * x, held), devices=2)(1.0, X)[0]

    first, second = Unequal(make([1.0])), Unequal(make([2.0]))
    assert (run(first), run(second)) == (3.5, 7.0)
    second.scale["all"] = 2.0
    assert (run(first), run(second)) == (3.5, 14.0)


class WithoutHash:
    def __hash__(self):
        raise RuntimeError("not hashed")


class WithoutRepr:
    def __repr__(self):
        raise RuntimeError("not shown")


def nested(depth):
    return [nested(depth - 1)] if depth else [1.0]


@pytest.mark.parametrize("held", [WithoutHash(), frozenset([WithoutRepr()]), nested(400)], ids=type)
def test_a_value_that_cannot_be_looked_into(held, monkeypatch):
    """Lie: an error about what the program does not even use."""
    monkeypatch.setitem(globals(), "table", held)
    assert mt.value_and_grad(lambda w, x: w * x if held else x, devices=2)(1.0, X)[0] == 3.5
    assert mt.value_and_grad(lambda w, x: w * x if table else x, devices=2)(1.0, X)[0] == 3.5


NUMBERS_OF_64_BITS = [
    (1e39, lambda held: held / 1e38),
    (1e-60, lambda held: held * 1e60),
    (np.float64(1e39), lambda held: held / 1e38),
    ((0.5, 1e39), lambda held: held[1] / 1e38),
    (np.array([2**33, 2**33 + 5]), lambda held: held[1] - held[0]),
    (np.int64(2**40), lambda held: held // 2**38),
]


@pytest.mark.slow
@pytest.mark.parametrize(("held", "used"), NUMBERS_OF_64_BITS)
def test_a_number_that_a_device_has_no_room_for(held, used):
    """Lie: inf, 0 or other bits, where Python and NumPy compute with 64 bits."""
    assert_as_jax(lambda w, x: w * x * used(held))


@pytest.mark.slow
def test_a_float_that_is_asked_for_its_type():
    scale = 0.5
    assert_as_jax(lambda w, x: w * x * (scale if isinstance(scale, float) else 100.0))


def test_settings_that_are_no_arrays():
    """Lies: a static argument that is traced; one partial that makes all others compile anew."""

    @functools.partial(jax.jit, static_argnames="slope")
    def act(x, slope):
        return jnp.where(x > 4, x, slope * x)

    slope = 0.1
    assert_as_jax(lambda w, x: act(w * x, slope))
    assert_as_jax(functools.partial(lambda s, w, x: act(w * x, s), 0.1))
    plain = functools.partial(lambda s, x: x * s, 2.0)
    assert call_opened(as_function(plain), (), lambda _, contents: contents.arrays) == [2.0]

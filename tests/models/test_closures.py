"""What a loss closes over: arrays, keys and functions, which are opened, closed again and freed."""

import dataclasses
import functools
import gc
import inspect
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from closing_over import X, assert_as_jax, keeps_times, timed
from multitower.models import dependencies
from multitower.models.closures import close_function, open_function

factor = 2.0


def make(array, static=1, log=None):
    def inner(x):
        return x * array * static * factor

    def outer(x, *, more=0):
        if log is not None:
            log.append(1)
        return inner(x) + more

    return outer


class Proxy:
    """Stands for an object that there is not yet, as the proxies of web frameworks do."""

    __slots__ = ("kept",)

    def __getattr__(self, name):
        raise RuntimeError(f"there is no {name} yet")


def test_an_object_that_raises_at_any_attribute():
    # The lie: to compare what a loss closes over, all of it must be there.
    config = types.SimpleNamespace(scale=2.0, request=Proxy())
    losses = lambda w, x: (getattr(config, "scale") * w * x) ** 2  # noqa: B009 (so all of it counts)
    value = mt.value_and_grad(losses, devices=2)
    assert float(value(1.0, X)[0]) == float(np.mean(4 * X**2))
    assert float(jax.jit(value)(1.0, X)[0]) == float(np.mean(4 * X**2))


def test_opened_and_closed_it_is_the_same_function():
    opened, contents = open_function(make(jnp.float32(3)), ())
    assert [float(array) for array in contents.arrays] == [3.0]
    five = contents._replace(arrays=[jnp.float32(5)])
    assert close_function(opened, five)(1.0, more=2) == 12.0


def test_what_makes_two_functions_one_program(monkeypatch):
    """Lie: a stale program; or a program for every step."""
    opened = lambda fun: open_function(fun, ())[0]
    same = lambda one, other: opened(one) == opened(other)
    hash(opened(make(jnp.float32(1))))
    assert same(make(jnp.float32(1)), make(jnp.float32(2)))
    assert not same(make(jnp.float32(1)), make(jnp.float32(1), static=2))
    assert not same(make(jnp.float32(1), static=True), make(jnp.float32(1), static=1))
    log = []
    assert not same(make(jnp.float32(1), log=log), make(jnp.float32(1), log=log))
    before = opened(make(jnp.float32(1)))
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert before != opened(make(jnp.float32(1)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Record:
    array: jax.Array
    step: int


def test_a_number_beside_arrays_is_data_in_a_record_and_a_setting_elsewhere():
    """Lies: a program for every step of a TrainState; a program that no setting reaches."""
    opened = lambda held: open_function(make(jnp.float32(1), static=held), ())[0]
    assert opened(Record(jnp.ones(2), 2)) == opened(Record(jnp.zeros(2), 3))
    for held in (lambda number: {"a": jnp.ones(2), "n": number}, lambda n: [jnp.ones(2), n]):
        assert opened(held(2)) == opened(held(2))
        assert opened(held(2)) != opened(held(3))


@pytest.mark.parametrize(
    ("make_key", "towers"),
    [
        (jax.random.key, 4),
        pytest.param(jax.random.PRNGKey, None, marks=pytest.mark.slow),
        pytest.param(jax.random.key, None, marks=pytest.mark.slow),
        pytest.param(jax.random.PRNGKey, 4, marks=pytest.mark.slow),
    ],
)
def test_law_l6_a_key_that_is_closed_over(make_key, towers):
    """Lie: every tower draws the same numbers, because the key is no argument."""
    for seed in (0, 1):
        key = make_key(seed)

        def loss(w, x):
            return w * x, jax.random.normal(key, x.shape)  # noqa: B023 (what is tested)

        run = mt.value_and_grad(loss, has_aux=True, devices=1 if towers else 2, towers=towers)
        (_, noise), _ = run(1.0, X)
        noise = np.asarray(noise)
        assert len(set(noise.tolist())) == 8
        first = np.asarray(jax.random.normal(key, (8 // (towers or 2),)))
        assert noise[0] == first[0]  # tower 0 has the key as it is


def test_a_list_that_the_loss_writes_into():
    seen = []

    def loss(w, x):
        seen.append(x.shape)
        return w * x

    mt.grad(loss, devices=2)(1.0, X)
    assert (4,) in seen


def test_an_error_of_the_users_is_the_users():
    def loss(w, x, scale=2.0):
        return w.nothing * x * scale

    with pytest.raises(AttributeError, match="nothing"):
        mt.grad(loss, devices=2)(1.0, X)


def test_a_variable_that_the_loss_counts_in():
    calls = 0

    def loss(w, x):
        nonlocal calls
        calls += 1
        return w * x

    mt.grad(loss, devices=2)(1.0, X)
    assert calls


def test_a_function_that_wraps_another_one_keeps_its_name_and_signature():
    """Lies: one of two metrics, both by the name of the decorator's function; no `slope`."""

    @keeps_times
    def squared(x):
        return x**2

    @functools.wraps(linear := lambda x, slope: x * slope)
    def sloped(*arguments):
        return linear(*arguments)

    def loss(w, x):
        (_, name) = inspect.signature(sloped).parameters
        return sloped(w * x, 2.0), {one.__name__: one(x) for one in (squared, timed)} | {name: x}

    (_, aux), _ = mt.value_and_grad(loss, has_aux=True, devices=2)(1.0, X)
    assert sorted(aux) == ["slope", "squared", "timed"]

    def named(name):
        def act(x):
            return x

        act.__name__ = name
        return lambda w, x: act(w * x) * (2 if act.__name__ == "double" else 1)

    for name, value in (("once", 3.5), ("double", 7.0)):
        assert mt.value_and_grad(named(name), devices=2)(1.0, X)[0] == value


@pytest.mark.slow
def test_a_function_that_closes_over_itself_has_the_new_contents():
    """Lie: the first call has the new ones, and the calls inside of it those of before."""
    weight = jnp.float32(1)

    def odd(x, n):
        return x if n == 0 else even(x * weight, n - 1)

    def even(x, n):
        return x if n == 0 else odd(x + weight, n - 1)

    def power(x, n):
        return x if n == 0 else power(x * weight, n - 1)

    run = mt.make_parallel(lambda x: power(x, 3), devices=2)
    for value in (1, 2, 3):
        weight = jnp.float32(value)
        np.testing.assert_allclose(run(X), X * value**3)
        assert_as_jax(lambda w, x: odd(w * x, 3))


def test_an_object_whose_loss_counts_its_calls_is_freed():
    class Counts:
        def __init__(self):
            self.calls = 0

            def loss(w, x):
                self.calls += 1
                return w * x

            self.loss = loss

    def forgotten():
        own = Counts()
        open_function(own.loss, ())
        return weakref.ref(own)

    gone = forgotten()
    gc.collect()
    assert gone() is None


def test_objects_that_hold_the_loss_which_uses_them_are_freed(monkeypatch):
    """Lie: each trainer of a sweep stays, with its arrays."""
    monkeypatch.setattr(dependencies, "_MOST", 2)

    class Trainer:
        scale = 2.0

    def forgotten():
        own = Trainer()
        own.loss = lambda w, x: w * x * getattr(own, "scale")  # noqa: B009 (it may read all of it)
        open_function(own.loss, ())
        return weakref.ref(own)

    gone = [forgotten() for _ in range(6)]
    gc.collect()
    assert [one() is None for one in gone[:4]] == [True] * 4
    monkeypatch.setattr(dependencies, "_MOST", len(dependencies._SEEN) + 6)
    kept = [lambda x, number=number: x * number for number in range(6)]
    for one in kept:
        open_function(one, ())
    assert all(one in dependencies._SEEN for one in kept)  # read once for each

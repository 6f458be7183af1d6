"""Arguments that are no data: flags, strings, functions and settings are handed on as they are."""

import dataclasses
import enum
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import multitower as mt
from two_layers import assert_close, batch_of


def settings_loss(w, x, training, name="square", rest=None, *, act=None, names=("a", 1)):
    assert type(training) is bool
    assert names == ("a", 1)
    assert rest is None
    return act(x @ w) ** (2 if training and name == "square" else 1)


@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_flags_strings_and_functions_are_handed_on(towers):
    """Published Keras, Flax and Equinox losses take them. Lie: a traced flag, or an error."""
    w, x = np.ones(3, np.float32), batch_of(4)["x"]
    for training in (True, False):  # the second must not get the first one's program
        args, kwargs = (w, x, training, "square", None), {"act": jnp.tanh}
        out, power = np.tanh(x @ w), 2 if training else 1
        slope = power * out ** (power - 1) * (1 - out**2)
        expected = (out**power).mean(), slope @ x / len(x)
        run = mt.value_and_grad(settings_loss, devices=2, towers=towers)
        assert_close(run(*args, **kwargs), expected)
        assert_close(
            jax.jit(run, static_argnames=("training", "name", "act"))(*args, **kwargs), expected
        )
        rows = mt.make_parallel(settings_loss, (None, 0, 0, 0, 0), devices=2, towers=towers)
        assert_close(rows(*args, **kwargs), out**power)


@pytest.mark.slow
def test_flags_strings_and_functions_are_handed_on_to_what_tries_a_loss():
    w, x = np.ones(3, np.float32), batch_of(4)["x"]
    for training in (True, False):
        args, kwargs = (w, x, training, "square", None), {"act": jnp.tanh}
        assert mt.check_parallel(settings_loss, *args, **kwargs)
    wrong = mt.check_parallel(
        lambda x, *, training: x - x.mean() if training else x, x, training=True
    )
    assert "x.mean()" in str(wrong)  # the program is read with the flag as it is


class Kind(enum.Enum):
    SQUARE = 2
    CUBE = 3


@dataclasses.dataclass(frozen=True)
class Settings:
    power: int
    shape: tuple = (2, None, "valid")
    act: object = jax.nn.relu


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Settings
    signed: float = 0.0


@pytest.mark.parametrize(
    ("two", "power"),
    [
        ((Kind.SQUARE, Kind.CUBE), lambda kind: kind.value),
        ((Settings(2), Settings(3)), lambda settings: settings.power),
        ((Outer(Settings(2)), Outer(Settings(3))), lambda outer: outer.inner.power),
        ((Outer(1, 0.0), Outer(1, -0.0)), lambda outer: 2 + np.signbit(outer.signed)),
        ((Outer(1), Outer(True)), lambda outer: 2 + isinstance(outer.inner, bool)),
        ((np.dtype("int16"), np.dtype("int32")), lambda dtype: dtype.itemsize),
    ],
    ids=["enum", "frozen dataclass", "nested", "sign", "type", "dtype"],
)
def test_settings_are_handed_on(two, power):
    """Lie: the program of the other settings; or that they must be arrays."""
    w, x = np.ones(3, np.float32), batch_of(10)["x"]
    loss = lambda w, x, settings: (x @ w) ** power(settings)
    run = mt.value_and_grad(loss, devices=2)
    out = x.astype(float) @ w
    for own in two:
        of = power(own)
        expected = (out**of).mean(), of * out ** (of - 1) @ x / len(x)
        assert_close(run(w, x, own), expected)


class Hashed:
    """An array of another library, which has a hash, as PyTorch's have."""

    def __hash__(self):
        return 1

    def __array__(self, *_, **__):
        return np.zeros(8, np.float32)


@dataclasses.dataclass
class Loose:
    power: int


@dataclasses.dataclass(frozen=True)
class Batch:
    x: object = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Source:
    """A data set that reads rows when it is asked."""

    path: str

    def __getitem__(self, place):
        return 0.0


class More(Settings):
    """It has more than its base class, which `==` does not see."""


@pytest.mark.parametrize(
    ("given", "advice"),
    [
        (range(8), "settings, close over it with functools.partial; else .* numpy.asarray"),
        (Hashed(), r"a Hashed of .*Pass numpy.asarray\(...\) of it"),
        (Loose(2), "holds settings and no arrays, close over it with functools.partial"),
        (Batch(np.zeros(8)), "Register its class once"),
        (Batch(jnp.asarray(np.float32(1))), "Register its class once"),
        (Batch((1, object())), "Register its class once"),
        (Batch(nnx.Dropout(0.5)), "Register its class once"),
        (More(2), "Register its class once"),
        (Source("rows.npy"), "Register its class once"),
        (Fraction(1, 2), "towers take arrays and numbers"),
        (object(), "settings, close over it with functools.partial"),
    ],
    ids=[
        "range",
        "array",
        "dataclass",
        "rows",
        "number",
        "inside",
        "module",
        "more",
        "source",
        "fraction",
        "object",
    ],
)
def test_what_may_be_rows_is_no_setting(given, advice):
    """Lie: rows in a form that JAX does not know, which every tower gets whole."""
    run = mt.value_and_grad(lambda w, x, more: (x @ w) ** 2, devices=2)
    with pytest.raises(mt.ArgumentError, match=advice):
        run(np.ones(3, np.float32), batch_of(8)["x"], given)


def test_a_traced_flag_stays_an_array():
    loss = lambda w, x, training: jnp.where(training, w * x, 2 * w * x)
    run = jax.jit(mt.grad(loss, devices=2))
    assert [float(run(1.0, np.ones(4, np.float32), flag)) for flag in (True, False)] == [1, 2]


class Scale:
    """A function object that is equal to others and has no hash."""

    __hash__ = None

    def __init__(self, by):
        self.by = by

    def __call__(self, x):
        return self.by * x

    def __eq__(self, other):
        return True


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_a_function_as_argument_compiles_once(towers):
    """Lie: a program for every step; or one program for two functions."""
    traces = []

    def loss(w, x, act):
        traces.append(1)
        return act(w * x)

    run = mt.value_and_grad(loss, devices=1 if towers else 2, towers=towers)
    x = np.ones(4, np.float32)
    counts = []
    for _ in range(3):
        run(1.0, x, jnp.tanh)
        counts.append(len(traces))
    assert counts == counts[:1] * 3
    scales = [Scale(by) for by in (2, 3)]
    assert [float(run(1.0, x, scale)[0]) for scale in scales] == [2, 3]
    assert [float(run(1.0, x, lambda x, by=by: by * x)[0]) for by in (4, 5)] == [4, 5]

"""Functions that are held by values: in frozen dataclasses, modules and static fields.

Such a value may be equal to itself, and stay so, while the function that it holds calls a helper or
reads a global that has changed. A loss that is defined anew must see that, as under `jax.jit`.
"""

import dataclasses
import functools
import os
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import flax.linen as nn
import flax.struct
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import multitower as mt
from first_weights import filled

X, ONE = np.arange(4, dtype=np.float32), np.float32(1)
scale = 1.0
traced: list[Any] = []
held, call = None, lambda held, x: x


def act(x):
    traced.append(1)
    return scale * x


@dataclasses.dataclass(frozen=True)
class Config:
    act: Any


class Slots:
    __slots__ = ("act",)

    def __init__(self, act):
        self.act = act

    def __eq__(self, other):
        return type(other) is Slots and other.act is self.act

    def __hash__(self):
        return hash(self.act)


class Pair(NamedTuple):
    act: Any
    other: Any = None


class Linen(nn.Module):
    act: Callable

    @nn.compact
    def __call__(self, x):
        return self.act(x)


class LinenOfGlobal(nn.Module):
    @nn.compact
    def __call__(self, x):
        return act(x)


class LinenOfTheEnvironment(nn.Module):
    """One of its methods reads what cannot be compared."""

    @nn.compact
    def __call__(self, x):
        return x if "OF_NO_PROGRAM" in os.environ else act(x)


class Nnx(nnx.Module):
    def __init__(self, act):
        self.weight = nnx.Param(ONE)
        self.act = act

    def __call__(self, x):
        return self.act(x) * self.weight[...]


class NnxOfConfig(nnx.Module):
    def __init__(self, config):
        self.weight = nnx.Param(ONE)
        self.config = config

    def __call__(self, x):
        return self.config.act(x) * self.weight[...]


class Equinox(eqx.Module):
    weight: jax.Array
    config: Any = eqx.field(static=True)

    def __call__(self, x):
        return self.config.act(x) * self.weight


class Checkpointed(eqx.Module):
    weight: jax.Array

    @eqx.filter_checkpoint
    def __call__(self, x):
        return act(x) * self.weight


@flax.struct.dataclass
class Struct:
    weight: Any
    act: Callable = flax.struct.field(pytree_node=False)

    @property
    def config(self):
        return self.act


def train_state(model):
    return TrainState.create(apply_fn=model.apply, params={"w": ONE}, tx=optax.sgd(1.0))


of_act = lambda held, x: held.act(x)
of_module = lambda held, x: held(x)
of_linen = lambda held, x: held.apply({}, x)
of_state = lambda held, x: held.apply_fn({}, x)
TOO = ("config in NNX", "Equinox's checkpoint", "Linen's remat")  # found as others are
HELD = {
    "function": (act, of_module),
    "partial": (functools.partial(act), of_module),
    "dataclass": (Config(act), of_act),
    "tuple in a dataclass": (Config((act,)), lambda held, x: held.act[0](x)),
    "dataclass in a dataclass": (Config(Config(act)), lambda held, x: held.act.act(x)),
    "method of a value": (Config(act).__getattribute__, lambda held, x: held("act")(x)),
    "slots": (Slots(act), of_act),
    "frozenset": (frozenset([act]), lambda held, x: next(iter(held))(x)),
    "namedtuple": (Pair(act), of_act),
    "namespace": (SimpleNamespace(act=act), of_act),
    "function of a library": (jax.vmap(act), of_module),
    "Linen": (Linen(act), of_linen),
    "Linen's remat": (nn.remat(LinenOfGlobal)(), of_linen),
    "Linen of the environment": (LinenOfTheEnvironment(), of_linen),
    "Linen's Sequential": (nn.Sequential([act]), of_linen),
    "Haiku": (hk.without_apply_rng(hk.transform(act)), of_linen),
    "NNX": (Nnx(act), of_module),
    "config in NNX": (NnxOfConfig(Config(act)), of_module),
    "Equinox": (Equinox(ONE, Config(act)), of_module),
    "Equinox's MLP": (
        filled(
            eqx.filter_eval_shape(
                lambda: eqx.nn.MLP(1, 1, 1, 1, activation=act, key=jax.random.key(0))
            )
        ),
        lambda held, x: held.activation(x),
    ),
    "Equinox's checkpoint": (Checkpointed(ONE), of_module),
    "struct": (Struct(ONE, act), of_act),
    "train state": (train_state(LinenOfGlobal()), of_state),
    "train state of a module with a function": (train_state(Linen(act)), of_state),
}
ARGUMENTS = ("NNX", "Equinox", "Equinox's MLP", "struct", "train state")


def closed_over(own):
    def loss(w, x):
        return call(own, w * x)

    return float(mt.value_and_grad(loss, devices=2)(ONE, X)[0])


def of_a_global(_own):
    def loss(w, x):
        return call(held, w * x)

    return float(mt.value_and_grad(loss, devices=2)(ONE, X)[0])


def of_a_default(own):
    def loss(w, x, own=own):
        return call(own, w * x)

    return float(mt.value_and_grad(loss, devices=2)(ONE, X)[0])


def an_argument(own):
    def loss(w, x, own):
        return call(own, w * x)

    return float(mt.value_and_grad(loss, devices=2, in_axes=(None, 0, None))(ONE, X, own)[0])


def in_parallel(own):
    return float(mt.make_parallel(lambda x: call(own, x), devices=2)(X).mean())


@pytest.mark.parametrize(
    ("name", "way"),
    [
        *(
            pytest.param(name, of_a_global, marks=[pytest.mark.slow] if name in TOO else [])
            for name in HELD
        ),
        *(pytest.param(name, closed_over, marks=pytest.mark.slow) for name in HELD),
        *((name, an_argument) for name in ARGUMENTS),
        *((name, way) for name in ("Linen", "train state") for way in (of_a_default, in_parallel)),
    ],
)
def test_what_a_held_function_reads(name, way, monkeypatch):
    """Lies: the numbers of a global of before; or a compilation where nothing has changed."""
    own, of_own = HELD[name]
    monkeypatch.setitem(globals(), "held", own)
    monkeypatch.setitem(globals(), "call", of_own)
    assert way(own) == X.mean()
    count = len(traced)
    assert way(own) == X.mean()
    assert len(traced) == count
    monkeypatch.setitem(globals(), "scale", 10.0)
    assert way(own) == 10 * X.mean()


def factor_of(config):
    return config.get("factor") if isinstance(config, dict) else config[0]


def times_a_setting(model):
    def loss(w, x):
        traced.append(1)
        return w * x * model.weight * factor_of(model.config)

    return float(mt.value_and_grad(loss, devices=2)(ONE, X)[0])


def set_factor(config, factor):
    config["factor" if isinstance(config, dict) else 0] = factor


@pytest.mark.parametrize(
    ("kind", "make"),
    [
        (Equinox, lambda: {"factor": 1.0}),
        (Struct, lambda: [1.0]),
        (Struct, lambda: np.ones(1)),
    ],
    ids=["dict", "list", "array"],
)
def test_settings_in_a_static_field_that_change(kind, make):
    """Lie: the numbers of before, since a dict is equal to itself; or a compilation for nothing."""
    config = make()
    model = kind(jnp.asarray(ONE), config)
    assert times_a_setting(model) == X.mean()
    count = len(traced)
    again = jax.tree.map(lambda leaf: leaf + 0, model)  # as an update makes it
    assert times_a_setting(again) == X.mean()
    assert len(traced) == count
    set_factor(config, 10.0)
    assert times_a_setting(again) == 10 * X.mean()
    assert times_a_setting(kind(ONE, make())) == X.mean()


@pytest.mark.parametrize(("one", "other"), [(1, True), (2, 2.0), (0.0, -0.0), ((0,), (False,))])
def test_numbers_in_a_static_field_are_those_of_their_type(one, other):
    """Lie: 1 is True, since they are equal."""

    def run(model):
        def loss(w, x):
            traced.append(model.config)
            return w * x * model.weight

        mt.value_and_grad(loss, devices=2)(ONE, X)

    run(Equinox(ONE, one))
    assert repr(traced[-1]) == repr(one)
    run(Equinox(ONE, other))
    assert repr(traced[-1]) == repr(other)


def of_the_environment(x):
    return x * float(os.environ["OF_THE_LOSS"])


class CallsOfTheEnvironment(nn.Module):
    def __call__(self, x):
        return of_the_environment(x)


def test_what_cannot_be_compared_in_a_class_and_outside(monkeypatch):
    """Lie: seen in a class, where it counts by its identity, it is known in the loss itself too."""
    for number in (1.0, 2.0, 3.0):
        monkeypatch.setenv("OF_THE_LOSS", str(number))
        model = CallsOfTheEnvironment()
        loss = lambda w, x, model=model: of_the_environment(model.apply({}, w * x))
        assert mt.value_and_grad(loss, devices=2)(ONE, X)[0] == number**2 * X.mean()


def test_a_new_state_after_every_step():
    """Lie: a compilation at every step of a loop whose loss is defined anew around a state."""
    state = train_state(LinenOfGlobal())
    counts, scope = [], {}
    for _ in range(3):
        scope["state"] = state
        exec("def loss(w, x):\n    return state.apply_fn({}, w['w'] * x)", scope)
        _, gradients = mt.value_and_grad(scope["loss"], devices=2)(state.params, X)
        state = state.apply_gradients(grads=gradients)
        counts.append(len(traced))
    assert counts == counts[:1] * 3
    assert float(state.params["w"]) == 1 - 3 * X.mean()

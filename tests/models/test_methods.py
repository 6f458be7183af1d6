"""Losses that are methods, or call some: they are compared by what they use of their object."""

import dataclasses
import enum
from typing import NamedTuple

import equinox as eqx
import jax
import numpy as np
import pytest
from flax import linen, nnx

import multitower as mt
from closing_over import Namespace, X

factor = 2.0


class Slots:
    __slots__ = ("scale",)

    def __call__(self, x):
        return x * self.scale


class MoreThanSlots(Slots):
    """Has a `__dict__` too."""


class Table(dict):
    def __call__(self, x):
        return x * self.scale


class Calls:
    def __call__(self, x):
        return x * factor


class Row(NamedTuple):
    weight: float = 1.0

    __call__ = Calls.__call__


class Linen(linen.Module):
    __call__ = Calls.__call__


class Nnx(nnx.Module):
    __call__ = Calls.__call__


class Equinox(eqx.Module):
    weight: jax.Array

    __call__ = Calls.__call__


class Named(str):
    __slots__ = ()
    __call__ = Calls.__call__


class Kind(enum.Enum):
    ONLY = 1

    __call__ = Calls.__call__


@dataclasses.dataclass(frozen=True)
class Frozen:
    __call__ = Calls.__call__


traced = []
OF_CLASSES = {
    "slots": MoreThanSlots(),
    "a dict": Table(),
    "a named tuple": Row(),
    "a Linen module": Linen(),
    "an NNX module": Nnx(),
    "an Equinox module": Equinox(np.ones((), np.float32)),
    "a string": Named("name"),
    "an enum": Kind.ONLY,
    "a frozen dataclass": Frozen(),
}
current = None


def closed_over(one):
    return lambda w, x: one(w * x)


def in_a_global(one):
    return lambda w, x: current(w * x)


def its_method(one):
    call = one.__call__
    return lambda w, x: call(w * x)


WAYS = (closed_over, in_a_global, its_method)


# Every day each kind in one of the ways, and each way with some kinds.
@pytest.mark.parametrize(
    ("kind", "ways"),
    [
        *((kind, [WAYS[number % 3]]) for number, kind in enumerate(OF_CLASSES)),
        *(pytest.param(kind, WAYS, marks=pytest.mark.slow) for kind in OF_CLASSES),
    ],
    ids=[*OF_CLASSES, *(f"{kind}, in every way" for kind in OF_CLASSES)],
)
def test_what_a_method_uses_is_seen_by_a_function_made_anew(kind, ways, monkeypatch):
    """Lie: what has a value, or holds arrays, is compared by these, and not by what it does."""
    one = OF_CLASSES[kind]
    monkeypatch.setitem(globals(), "current", one)

    def run(scale):
        monkeypatch.setitem(globals(), "factor", scale)
        if isinstance(one, Table | Slots):
            one.scale = scale
        made = [make_loss(one) for make_loss in ways]
        return [float(mt.value_and_grad(fun, towers=2, devices=1)(1.0, X)[0]) for fun in made]

    assert run(2.0) == [7.0] * len(ways)
    assert run(3.0) == [10.5] * len(ways)


class Agent:
    """Holds much that its loss does not use: it changes all the time, or cannot be compared."""

    def __init__(self):
        self.config, self.target = Namespace(scale=2.0), [np.float32(0)]
        self.calls, self.replay = 0, np.zeros(2**20 + 1, np.uint8)

    def loss(self, w, x):
        traced.append(1)
        self.calls += 1
        self.latest = "loss"
        return self.scaled(w * x) - self.target[0] * self.half

    def scaled(self, x):
        return sum(self.config.scale * x for _ in range(2)) / 2

    @property
    def half(self):
        return self.config.scale / self.config.scale / 2

    __call__ = loss


class WholeAgent(Agent):
    def loss(self, w, x):
        return super().loss(w, x)

    def __call__(self, w, x):
        return self.scaled(w * x) - vars(self)["target"][0] / 2


@pytest.mark.parametrize("of", ["loss", "scaled by hand", "__call__"])
@pytest.mark.parametrize("towers", [None, pytest.param(2, marks=pytest.mark.slow)])
def test_trap_an_agent_whose_loss_is_a_method(of, towers):
    """Its attributes change between calls, as the target network of Q-learning does."""
    one = Agent()
    by_hand = lambda w, x: one.scaled(w * x) - one.target[0] / 2
    fun = {"loss": one.loss, "scaled by hand": by_hand, "__call__": one}[of]
    run = lambda fun: float(mt.value_and_grad(fun, towers=towers, devices=2)(1.0, X)[0])
    assert run(fun) == 7.0
    known = len(traced)
    one.replay[0] += 1
    assert (run(fun), len(traced)) == (7.0, known)
    one.target = [np.float32(2)]
    assert run(fun) == 6.0
    one.config.scale = 3.0
    assert run(fun) == 9.5


def test_trap_an_attribute_that_lies_on_several_devices():
    """JAX says that meshes should be equal, which is of no help."""
    one = Agent()
    one.target = [mt.grad(lambda w, x: w * x, devices=2)(1.0, X)]  # on both
    with pytest.raises(mt.ArgumentError, match=r"of shape \(\) that lies on 2 devices, and is no"):
        mt.grad(one.loss, devices=2)(1.0, X)
    assert np.isfinite(mt.grad(one.loss, devices=1, towers=2)(1.0, X))


@pytest.mark.parametrize("towers", [None, 2])
def test_an_attribute_on_a_mesh_with_explicit_axes(towers):
    """JAX says which meshes differ, and not what to write."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    one = Agent()
    one.target = [jax.device_put(X, jax.NamedSharding(mesh, jax.P()))]

    def loss(w, x):
        return w * x * one.target[0].sum()

    run = mt.grad(loss, devices=2, towers=towers)
    with pytest.raises(mt.ArgumentError, match=r"mesh with explicit axes.*keep jax\.device_get"):
        run(1.0, X)
    one.target = [jax.device_get(one.target[0])]
    np.testing.assert_allclose(run(1.0, X), np.mean(X) * np.sum(X), rtol=1e-6)


@pytest.mark.parametrize("transform", [jax.jit, jax.grad])
def test_an_attribute_that_is_traced(transform):
    one = Agent()

    def loss_for(target):
        one.target = [target]
        return mt.value_and_grad(one.loss, devices=2)(1.0, X)[0]

    expected = {jax.jit: [6.0, 5.0], jax.grad: [-0.5, -0.5]}[transform]
    assert [float(transform(loss_for)(value)) for value in (2.0, 4.0)] == expected


class HandedOn(Agent):
    """A function gets all of it, and may use any of that."""

    def loss(self, w, x):
        traced.append(1)
        self.calls += 1
        self.latest = (w * x).mean()
        return scaled_by(self, w * x)


def scaled_by(one, x):
    return one.config.scale * x - one.target[0] / 2


def test_what_a_method_writes_into_its_object_is_not_what_it_uses():
    # The lie: a loss that counts its calls, or keeps its latest value, compiles at every call.
    one = HandedOn()
    one.replay = None
    run = lambda: float(mt.value_and_grad(one.loss, devices=2)(1.0, X)[0])
    assert run() == 7.0
    known = len(traced)
    assert (run(), len(traced)) == (7.0, known)
    one.config.scale = 3.0
    assert run() == 10.5


def test_a_method_that_may_use_all_of_its_object():
    one = WholeAgent()
    one.replay = None
    for fun in (one.loss, one):
        run = lambda fun=fun: float(mt.value_and_grad(fun, devices=2)(1.0, X)[0])
        one.target = [np.float32(0)]
        assert run() == 7.0
        one.target = [np.float32(2)]
        assert run() == 6.0


@pytest.mark.parametrize("kind", ["a named tuple", "an NNX module", "an Equinox module"])
def test_what_a_method_of_an_argument_uses_is_seen(kind, monkeypatch):
    def run(scale):
        monkeypatch.setitem(globals(), "factor", scale)
        fun = lambda w, x, one: one(w * x)
        grads = mt.value_and_grad(fun, in_axes=(None, 0, None), towers=2, devices=1)
        found = mt.make_parallel(fun, in_axes=(None, 0, None), devices=2)(1.0, X, OF_CLASSES[kind])
        return float(grads(1.0, X, OF_CLASSES[kind])[0]), float(found.mean())

    assert [run(2.0), run(3.0)] == [(7.0, 7.0), (10.5, 10.5)]

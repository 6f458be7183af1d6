"""What the losses of several test files close over, and plain JAX beside them."""

import functools
import types

import jax
import numpy as np

import multitower as mt

X = np.arange(8, dtype=np.float32)


class Namespace:
    def __init__(self, **held):
        self.__dict__.update(held)


settings = Namespace(scale=2.0)
own_module = types.ModuleType("own_module")
own_module.scale, own_module.half = 2.0, 0.5


def keeps_times(fun):
    """A decorator whose function changes, when it is called, in a way that nothing reads."""

    @functools.wraps(fun)
    def timed(*arguments):
        timed.times.append(1.0)
        timed.calls += 1
        return fun(*arguments)

    timed.times, timed.calls, timed.original = [], 0, fun
    return timed


@keeps_times
def timed(x):
    return x


def assert_as_jax(loss):
    """One device of plain JAX, without towers and with."""
    expected = jax.jit(jax.value_and_grad(lambda w, x: loss(w, x).mean()))(1.0, X)
    for options in ({"devices": 2}, {"devices": 1, "towers": 4}):
        found = mt.value_and_grad(loss, **options)(1.0, X)
        np.testing.assert_allclose(found, expected, rtol=1e-6)

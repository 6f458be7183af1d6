"""Never needless: a function that is made anew with other values has the program of before."""

import dataclasses
import functools
import logging
import sys
import threading

import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen

import multitower as mt
from closing_over import X, keeps_times, own_module, settings, timed

factor = 2.0


class Traces:
    number = 0


def test_a_step_without_jit_compiles_once():
    """Lie: right, and as slow as a compiler. The loss is another function at every step."""

    def step(w, shift):
        def loss(w, x):
            Traces.number += 1
            return w * x + shift

        return mt.value_and_grad(loss, devices=2, towers=2)(w, X)

    numbers = []
    for number in range(4):
        value, _ = step(1.0, jnp.float32(number))
        assert value == X.mean() + number
        numbers.append(Traces.number)
    assert numbers == numbers[:1] * 4


bias = jnp.float32(1)
traced = []
seen = []
log_of_calls = logging.getLogger(__name__)


class Logs(linen.Module):
    """Uses what cannot be compared: a logger has locks."""

    def __call__(self, x):
        log_of_calls.debug("called")
        return x * factor


def of_a_model_that_logs(scale):
    one = Logs()
    return lambda w, x: (traced.append(1), one(w * x))[1]


def of_a_global_lambda(scale):
    return eval("lambda w, x: (traced.append(1), w * x * factor)[1]", globals())


def of_a_partial(scale):
    return functools.partial(lambda scale, w, x: (traced.append(1), w * x * scale)[1], scale)


def of_a_keyword_partial(scale):
    return functools.partial(lambda w, x, scale: (traced.append(1), w * x * scale)[1], scale=scale)


def of_a_float(scale):
    return lambda w, x: (traced.append(1), w * x * scale)[1]


def of_a_numpy_array(scale):
    array = np.full(3, scale)
    return lambda w, x: (traced.append(1), w * x * array.sum())[1]


def of_settings(scale):
    return lambda w, x: (traced.append(1), w * x * settings.scale)[1]


def of_a_count(scale):
    def loss(w, x):
        settings.calls += 1
        seen.append(settings.calls)
        return (traced.append(1), w * x * scale)[1]

    return loss


def of_an_imported_module(scale):
    def loss(w, x):
        import own_module
        import own_module as also

        return (traced.append(1), w * x * scale * own_module.half * also.half * 4)[1]

    return loss


def of_a_module_in_the_closure(scale):
    own = own_module
    return lambda w, x: (traced.append(1), w * x * scale * own.half * 2)[1]


def of_timed_functions(scale):
    @keeps_times
    def inner(x):
        return timed(x) * scale

    @keeps_times
    def loss(w, x):
        return (traced.append(1), inner(w * x))[1]

    return loss


class Compares:
    """A setting made anew in every step, with a `==` of its own: the usual static argument."""

    def __init__(self, array):
        self.array = array

    def __eq__(self, other):
        return np.array_equal(self.array, other.array)

    def __hash__(self):
        return hash(self.array.tobytes())


@dataclasses.dataclass(frozen=True)
class Remembers:
    compares: Compares
    memory: dict = dataclasses.field(default_factory=dict, compare=False)
    table: np.ndarray = dataclasses.field(default_factory=lambda: np.ones(2), compare=False)


def times_compared(x, held):
    return x * held.compares.array[0]


def of_settings_made_anew(scale):
    held = Remembers(Compares(np.ones(1)))
    return lambda w, x: (traced.append(1), times_compared(w * x, held) * scale)[1]


class Notes:
    """Has a lock, and changes whenever it is asked."""

    def __init__(self):
        self.lock, self.notes = threading.Lock(), []

    def note(self):
        with self.lock:
            self.notes.append(1)


notes = Notes()


class TakesNotes(linen.Module):
    def __call__(self, x):
        notes.note()
        return x


def of_a_model_that_takes_notes(scale):
    one = TakesNotes()
    return lambda w, x: (traced.append(1), one(w * x) * scale)[1]


OF_GLOBALS = (of_a_global_lambda, of_a_model_that_logs, of_settings)  # these do without `scale`


def of_a_global_array(scale):
    globals()["bias"] = jnp.float32(scale)
    return lambda w, x: (traced.append(1), w * x * bias)[1]


@pytest.mark.parametrize(
    ("make_loss", "of", "towers"),
    [
        (of_a_global_lambda, "value_and_grad", 2),
        (of_a_global_lambda, "make_parallel", None),
        (of_a_partial, "value_and_grad", None),
        (of_a_partial, "make_parallel", 2),
        (of_a_keyword_partial, "value_and_grad", 2),
        (of_a_keyword_partial, "evaluate", None),
        (of_a_float, "value_and_grad", None),
        (of_a_float, "evaluate", 2),
        (of_a_numpy_array, "value_and_grad", 2),
        (of_a_numpy_array, "make_parallel", None),
        (of_settings, "value_and_grad", None),
        (of_settings, "evaluate", 2),
        (of_a_count, "value_and_grad", 2),
        (of_an_imported_module, "value_and_grad", 2),
        (of_a_module_in_the_closure, "make_parallel", 2),
        (of_a_global_array, "make_parallel", 2),
        (of_a_global_array, "evaluate", None),
        (of_a_model_that_logs, "value_and_grad", 2),
        (of_a_model_that_takes_notes, "value_and_grad", None),
        (of_settings_made_anew, "value_and_grad", None),
        (of_timed_functions, "value_and_grad", None),
    ],
)
def test_other_values_need_no_other_program(make_loss, of, towers, monkeypatch):
    """Lie: a compilation at every step, because the function is made anew at every step."""
    monkeypatch.setitem(sys.modules, "own_module", own_module)
    monkeypatch.setattr(settings, "calls", 0, raising=False)

    def run(scale):
        fun, where = make_loss(scale), {"devices": 2, "towers": towers}
        if of == "value_and_grad":
            return mt.value_and_grad(fun, **where)(1.0, X)[0]
        if of == "make_parallel":
            return mt.make_parallel(fun, in_axes=(None, 0), **where)(1.0, X).mean()
        metrics = lambda w, x: {"score": fun(w, x)}
        return mt.evaluate(metrics, 1.0, X, global_batch=8, **where)["score"]

    found, counts = [], []
    for scale in (2.0, 3.0, 4.0):
        found.append(float(run(scale)))
        counts.append(len(traced))
    assert counts == counts[:1] * 3
    times = {of_a_numpy_array: 3, **dict.fromkeys(OF_GLOBALS, 0)}.get(make_loss, 1)
    assert found == [X.mean() * (times * scale or 2.0) for scale in (2.0, 3.0, 4.0)]

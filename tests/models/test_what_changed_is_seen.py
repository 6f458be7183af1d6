"""Never stale: what changed since the last call is seen by a function that is made anew."""

import functools
import sys

import jax
import jax.numpy as jnp
import pytest

import multitower as mt
from closing_over import Namespace, X, own_module, settings

factor = 2.0


class Settings:
    scale = 2.0


table = {"scale": 2.0}
log = Namespace()


def helper(x):
    return x * factor


def outer_helper(x):
    return helper(x)


def inner_lambda():
    def loss(w, x):
        return jax.tree.map(lambda y: y * factor, w * x)

    return loss


def through_helpers():
    return lambda w, x: outer_helper(w * x)


def class_attribute():
    return lambda w, x: w * x * Settings.scale


def attribute_of_an_object():
    return lambda w, x: w * x * settings.scale


def entry_of_a_dict():
    return lambda w, x: w * x * table["scale"]


def object_in_the_closure():
    own = settings
    return lambda w, x: w * x * own.scale


class Rule:
    def __init__(self, scale):
        self.scale = scale

    def update(self, x):
        return x * self.scale


rule = Rule(2.0)


def method_of_the_name_of_a_lists():
    return lambda w, x: rule.update(w * x)


def list_that_it_fills():
    return lambda w, x: (table.setdefault("more", 0), w * x * table["scale"])[1]


def attribute_of_a_name_that_it_assigns_to_elsewhere():
    def loss(w, x):
        log.scale = 0.0
        return w * x * settings.scale

    return loss


def import_in_it():
    def loss(w, x):
        import own_module

        return w * x * own_module.scale

    return loss


def import_of_a_name_in_it():
    def loss(w, x):
        from own_module import scale as times

        return w * x * times

    return loss


def one_of_two_imports():
    def loss(w, x):
        if factor:
            import own_module as own
        else:
            import math as own

        return jnp.tanh(0 * w) + w * x * own.scale

    return loss


def module_handed_on():
    return lambda w, x: w * x * getattr(own_module, "scale")  # noqa: B009 (that is the point)


def module_found_by_name():
    return lambda w, x: w * x * sys.modules["own_module"].scale


def class_body_that_looks_at_the_closure():
    own = own_module

    def loss(w, x):
        class Own:
            times = own.scale

        return w * x * Own.times

    return loss


def class_body():
    def loss(w, x):
        class Own:
            times = factor

        return w * x * Own.times

    return loss


def globals_by_hand():
    return lambda w, x: w * x * globals()["factor"]


def module_in_the_closure():
    own = own_module
    return lambda w, x: w * x * own.scale


def class_in_the_closure():
    own = Settings
    return lambda w, x: w * x * own.scale


def bound_method():
    class Model(Namespace):
        def loss(self, w, x):
            return w * x * settings.scale

    return Model().loss


def partial_of_a_helper():
    return functools.partial(lambda scale, w, x: w * x * settings.scale, None)


@pytest.mark.parametrize(
    "make_loss",
    [
        inner_lambda,
        through_helpers,
        class_attribute,
        attribute_of_an_object,
        entry_of_a_dict,
        object_in_the_closure,
        method_of_the_name_of_a_lists,
        list_that_it_fills,
        attribute_of_a_name_that_it_assigns_to_elsewhere,
        import_in_it,
        import_of_a_name_in_it,
        one_of_two_imports,
        module_handed_on,
        module_found_by_name,
        class_body_that_looks_at_the_closure,
        class_body,
        globals_by_hand,
        module_in_the_closure,
        class_in_the_closure,
        bound_method,
        partial_of_a_helper,
    ],
)
def test_what_changed_is_seen_by_a_function_made_anew(make_loss, monkeypatch):
    """Lie: the program of another value, where jax.jit of the same function has the new one."""
    monkeypatch.setitem(sys.modules, "own_module", own_module)
    run = lambda: float(mt.value_and_grad(make_loss(), devices=1)(1.0, X)[0])
    assert run() == 7.0
    monkeypatch.setitem(globals(), "factor", 3.0)
    monkeypatch.setitem(globals(), "rule", Rule(3.0))
    monkeypatch.setattr(own_module, "scale", 3.0)
    monkeypatch.setattr(Settings, "scale", 3.0)
    monkeypatch.setattr(settings, "scale", 3.0)
    monkeypatch.setitem(table, "scale", 3.0)
    assert run() == 10.5


traced = []


def test_a_program_made_again_is_of_the_function_that_is_called():
    """Lie: other shapes are traced with the closure that another function has had."""

    def make(times):
        def loss(w, x):
            return w * x * times

        def set_times(new):
            nonlocal times
            times = new

        return loss, set_times

    first, set_first = make(1)
    mt.value_and_grad(first, devices=2)(1.0, X)
    set_first(5)
    second, _ = make(1)
    assert mt.value_and_grad(second, devices=2)(1.0, X[:4])[0] == 1.5


def test_a_program_made_again_is_of_the_globals_of_the_function_that_is_called():
    """Lie: other shapes are traced with the globals of another copy of the module."""
    source = compile("times = 1\ndef loss(w, x):\n    return w * x * times", "<module>", "exec")
    first, second = {}, {}
    for scope in (first, second):
        exec(source, scope)
        assert mt.value_and_grad(scope["loss"], devices=2)(1.0, X)[0] == 3.5
    first["times"] = 5
    assert mt.value_and_grad(second["loss"], devices=2)(1.0, X[:4])[0] == 1.5


def times_of(helper, x):
    return helper(x) * (helper.times or helper.table[0])


def test_what_is_stored_on_a_function():
    """Lies: a function without it, or with that of another function; a program at every step."""

    def run(times):
        def helper(x):
            return x * helper.times

        def counted(*arguments):
            counted.calls += 1
            return helper(*arguments)

        def loss(w, x):
            traced.append(1)
            return counted(w * x) * helper.times

        counted.calls, helper.times = 0, times
        return float(mt.value_and_grad(loss, devices=2)(1.0, X)[0]), counted.calls

    value, calls = run(2.0)
    assert value == 14
    assert calls
    count = len(traced)
    assert run(2.0)[0] == 14
    assert len(traced) == count
    assert run(1.0)[0] == 3.5

    def handed_on(times, table=None):
        def helper(x):
            return x

        helper.times, helper.table = times, table
        return lambda w, x: times_of(helper, w * x)

    for times in (2.0, 3.0):
        assert mt.value_and_grad(handed_on(times), devices=2)(1.0, X)[0] == 3.5 * times
    with pytest.raises(AttributeError, match="table"):  # rather than that of another function
        mt.value_and_grad(handed_on(None, [1.0]), devices=2)(1.0, X)

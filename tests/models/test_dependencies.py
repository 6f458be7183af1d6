"""What a function uses besides its arguments: what is compared, and what is not looked into.

The lies: a stale program, because a change was not seen; or a program for every step, because
something was looked at that changes all the time, or that cannot be compared.
"""

import contextlib
import contextvars
import dataclasses
import functools
import inspect
import math
import operator
import os
import random
import re
import sysconfig
import types
import weakref
from pathlib import Path

import jax
import numpy as np
import pytest

import multitower as mt
from multitower.models.closures import open_function
from multitower.models.dependencies import content_of, dependencies_of
from multitower.models.values import UnknownDependencyError, is_installed, is_value

factor = 2.0


class Namespace:
    def __init__(self, **held):
        self.__dict__.update(held)


tally = Namespace(calls=0, scale=2.0, rest=np.zeros(2**20 + 1, np.uint8))


@contextlib.contextmanager
def of_a_decorator():
    yield factor


class OfAMethod:
    def times(self, x):
        return x * factor


class OfAProperty:
    __slots__ = ("_own",)

    @property
    def scale(self):
        return factor


class OfACachedProperty:
    @functools.cached_property
    def scale(self):
        return factor


class Scale:
    def __get__(self, one, cls=None):
        return factor


class OfADescriptor:
    scale = Scale()


@dataclasses.dataclass
class OfADataclass:
    scale: float = 2.0

    def times(self, x: float) -> float:
        return x * factor * self.scale


@pytest.mark.parametrize(
    "value",
    [
        of_a_decorator,
        OfAMethod(),
        OfAProperty,
        OfACachedProperty(),
        OfADescriptor(),
        OfADataclass(),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_a_global_is_seen_through(value, monkeypatch):
    before = content_of(value)
    inspect.get_annotations(type(value))  # kept in the class, from Python 3.14 on
    assert content_of(value) == before
    monkeypatch.setitem(globals(), "factor", 3.0)
    assert content_of(value) != before


def read_scale(one):
    return one.scale


class Reads:
    """Ways to read an attribute of an object in its methods."""

    base = 1.0

    def __init__(self):
        self.scale, self.config, self.unused = 2.0, Namespace(owner=self), 0

    def plainly(self):
        return self.scale + self.base

    def by_another_method(self):
        return self.plainly()

    def by_itself(self, n=2):
        return self.by_itself(n - 1) if n else self.scale

    def by_a_property(self):
        return self.own_scale

    @property
    def own_scale(self):
        return self.scale

    def by_a_static_method(self):
        return self.read(self)

    read = staticmethod(read_scale)

    def in_a_function(self):
        inner = lambda: [self.scale for _ in range(2)]
        return inner()

    def in_a_class(self):
        class Inner:
            scale = self.scale

        return Inner.scale

    def by_a_default(self):
        def inner(one=self):
            return one.scale

        return inner()

    def under_another_name(self):
        one, _ = self, 1
        return one.scale

    def after_it_was_rebound(self, other=None):
        self = other or self  # noqa: PLW0642
        return self.scale

    def by_a_pattern(self):
        match self:
            case Reads(scale=found):
                return found

    def by_its_name(self):
        return getattr(self, "scale") + self.__dict__["scale"]  # noqa: B009

    def by_all_variables(self):
        return locals()["self"].scale

    def by_a_helper(self):
        return read_scale(self)

    def by_its_parts(self):
        return self.config.owner.scale

    def in_a_block(self):
        with contextlib.nullcontext(self) as one:
            return one.scale

    def by_what_its_class_has(self):
        return type(self).base * self.__class__.base

    def by_the_parent(self):
        return super().__getattribute__("scale")


WAYS = [name for name in vars(Reads) if re.match("(plainly|by|in|under|after)_?", name)]
NARROW = {
    "plainly",
    "by_another_method",
    "by_itself",
    "by_a_property",
    "in_a_function",
    "in_a_class",
}


@pytest.mark.parametrize("way", WAYS)
def test_what_a_method_reads_of_its_object(way, monkeypatch):
    """Lies: a change that it would read is not seen; all of the object counts, always."""
    one = Reads()
    before = content_of(getattr(one, way))
    one.unused += 1
    assert (content_of(getattr(one, way)) == before) or way not in NARROW
    one.unused -= 1
    assert content_of(getattr(one, way)) == before
    one.scale = 3.0
    monkeypatch.setattr(Reads, "base", 2.0)
    assert content_of(getattr(one, way)) != before


def test_arrays_are_compared_up_to_a_mebibyte():
    array = np.zeros(2**20, np.uint8)
    before = content_of(array)
    array[-1] = 1
    assert content_of(array) != before
    with pytest.raises(UnknownDependencyError):
        content_of(np.zeros(2**20 + 1, np.uint8))


def test_of_an_object_only_the_attribute_that_is_used():
    make = lambda: lambda w: w * tally.scale
    assert dependencies_of(make()) == dependencies_of(make())
    with pytest.raises(UnknownDependencyError):
        dependencies_of(lambda w: w * tally.rest)


def counted(x):
    tally.calls += 1
    return x * vars(tally).get("scale")


def test_what_a_helper_counts_in_is_not_what_it_depends_on(monkeypatch):
    monkeypatch.delattr(tally, "rest")
    make = lambda: lambda w: 2 * counted(w)
    before = dependencies_of(make())
    counted(1.0)
    assert dependencies_of(make()) == before
    monkeypatch.setattr(tally, "scale", 3.0)
    assert dependencies_of(make()) != before


def doubled(given):
    return 2 * given.scale


class Doubled:
    def __init__(self):
        self.scale = doubled(tally)


def loss_with_a_record(w):
    found = Namespace()
    found.scale = doubled(tally)
    return w * found.scale


@pytest.mark.parametrize(
    "make",
    [lambda: lambda w: w * Doubled().scale, lambda: lambda w: -loss_with_a_record(w)],
    ids=["of a new object", "of a record"],
)
def test_that_an_attribute_of_this_name_is_written_elsewhere_hides_no_change(make, monkeypatch):
    """Lie: the first of two settings, because something else is kept under that name."""
    monkeypatch.delattr(tally, "rest")
    before = dependencies_of(make())
    assert dependencies_of(make()) == before
    monkeypatch.setattr(tally, "scale", 3.0)
    assert dependencies_of(make()) != before


@pytest.mark.parametrize("name", ["get", "__getitem__", "__len__"])
def test_what_a_built_in_method_is_of(name):
    """Lies: `scale_of = settings.get` never changes; each new one needs a program of its own."""
    settings = {"scale": 2.0}

    def look():
        scale_of = getattr(settings, name)
        return content_of(scale_of), open_function(lambda w: w * scale_of("scale"), ())[0]

    before = look()
    assert look() == before
    settings["shift"] = 1.0
    assert not any(map(operator.eq, look(), before))


generator = random.Random(0)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w: w + np.random.normal(),
        lambda w: w + random.random(),
        lambda w: w + random.uniform(0.0, 1.0),
        lambda w: w + generator.random(),
    ],
    ids=["NumPy", "Python", "a method of Python", "a generator"],
)
def test_random_numbers_of_the_host_are_drawn_anew(fun):
    """Lie: a loss without `jax.jit` gets the noise of its first step at every step."""
    with pytest.raises(UnknownDependencyError):
        dependencies_of(fun)


scale_here = contextvars.ContextVar("scale_here", default=2.0)
held_elsewhere = weakref.ref(tally)


@pytest.mark.parametrize(
    "fun",
    [
        lambda w: w * scale_here.get(),
        lambda w: w * held_elsewhere().scale,
        lambda w: w * float(os.environ["SCALE"]),
        lambda w: w * float(os.getenv("SCALE", "2")),
    ],
    ids=["context", "weak reference", "environment", "getenv"],
)
def test_what_is_kept_elsewhere_is_read_anew(fun):
    """Lie: a loss made anew that gets the setting of the first one."""
    with pytest.raises(UnknownDependencyError):
        dependencies_of(fun)


@pytest.mark.parametrize("held", [scale_here, held_elsewhere])
def test_what_is_kept_elsewhere_and_closed_over(held):
    make = lambda: lambda w: w * held
    assert open_function(make(), ())[0] != open_function(make(), ())[0]


def test_what_draws_nothing_shares_a_program():
    make = lambda: lambda w: w + np.random.default_rng(0).normal() + np.mean([math.sin(1.0)])
    assert dependencies_of(make()) == dependencies_of(make())


lazy = types.ModuleType("lazy")
lazy.__file__ = str(Path(sysconfig.get_path("purelib"), "lazy.py"))
lazy.__getattr__ = lambda name: 2.0


def test_an_installed_module_is_not_looked_into():
    """Some make their attributes when they are asked for."""
    make = lambda: lambda w: w * lazy.scale
    assert dependencies_of(make()) == dependencies_of(make())


def test_a_setting_of_an_installed_package(monkeypatch):
    """Lie: the first value of `package.config.scale`, because a package stays what it is."""
    monkeypatch.setattr(lazy, "config", Namespace(scale=2.0, calls=0), raising=False)
    make = lambda: lambda w: w * lazy.config.scale
    before = dependencies_of(make())
    monkeypatch.setattr(lazy.config, "calls", 1)
    assert dependencies_of(make()) == before
    monkeypatch.setattr(lazy.config, "scale", 3.0)
    assert dependencies_of(make()) != before


def test_what_is_installed_and_what_is_the_same_for_good():
    assert all(map(is_installed, (int, math, np, np.ndarray, lazy, contextlib.contextmanager)))
    assert not any(map(is_installed, (Namespace, counted, types.ModuleType("mine"), tally)))
    beside = compile("def train(): 1", f"{Path(mt.__file__).parent}_demo/train.py", "exec")
    assert not is_installed(types.FunctionType(beside.co_consts[0], {}))
    assert all(map(is_value, (Namespace, types.ModuleType("mine"), len, jax.jit(counted), "a", 1)))
    assert not any(map(is_value, (tally, [], OfAMethod().times)))

"""What a loss closes over: arrays, keys, and things that may change unseen."""

import collections
import dataclasses
import enum
import functools
import gc
import inspect
import logging
import sys
import threading
import types
import weakref
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import multitower as mt
from multitower.models import dependencies
from multitower.models.callables import as_function
from multitower.models.closures import call_opened, close_function, open_function

X = np.arange(8, dtype=np.float32)
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


def test_a_number_beside_arrays_is_data_in_a_record_and_a_setting_elsewhere():
    """Lies: a program for every step of a TrainState; a program that no setting reaches."""
    opened = lambda held: open_function(make(jnp.float32(1), static=held), ())[0]
    assert opened(Record(jnp.ones(2), 2)) == opened(Record(jnp.zeros(2), 3))
    for held in (lambda number: {"a": jnp.ones(2), "n": number}, lambda n: [jnp.ones(2), n]):
        assert opened(held(2)) == opened(held(2))
        assert opened(held(2)) != opened(held(3))


class Traces:
    number = 0


def test_the_sign_of_a_zero_that_is_closed_over():
    """Lie: the program of 0.0 for -0.0, as the two are equal."""

    def angle(zero):
        run = mt.value_and_grad(lambda w, x: w * jnp.arctan2(0 * x, zero), towers=2, devices=2)
        return run(np.float32(1), np.ones(4))[0]

    np.testing.assert_allclose(angle(0.0), 0.0)
    np.testing.assert_allclose(angle(-0.0), np.pi, rtol=1e-6)


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


@pytest.mark.parametrize(
    ("make_key", "towers"),
    [
        (jax.random.key, 4),
        (jax.random.PRNGKey, None),
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

        (_, noise), _ = mt.value_and_grad(loss, has_aux=True, devices=2, towers=towers)(1.0, X)
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


@pytest.mark.parametrize("towers", [None, 3])
def test_a_loss_that_closes_over_its_batch(towers):
    """Flax Linen's documents write it so. Lie: every tower has the whole batch."""

    def step(w, batch, sizes):
        shift = batch["shift"]

        def predict(w):
            return w * batch["x"]  # closes over the batch alone, as loss has done already

        def loss(w):
            sizes.append(batch["x"].shape)
            return (predict(w) + shift - y) ** 2

        y = np.sin(batch["x"])
        return mt.value_and_grad(loss, in_axes={"batch": 0, "y": 0}, devices=3, towers=towers)(w)

    sizes = []
    value, gradient = step(2.0, {"x": X, "shift": jnp.float32(1)}, sizes)
    wrong = 2 * X + 1 - np.sin(X)
    np.testing.assert_allclose(value, np.mean(wrong**2), rtol=1e-5)
    np.testing.assert_allclose(gradient, np.mean(2 * wrong * X), rtol=1e-5)
    # Eight rows on three towers; four to see what grows; and a first look at 211 made-up ones.
    assert set(sizes) <= {(3,), (4,), (211,)}


def test_a_jitted_loss_that_closes_over_its_batch():
    """Optax's documents write it so. Lie: in_axes names a variable, and there is none."""

    def make(x):
        @jax.jit
        def squared(w):
            return (w * x) ** 2

        return squared

    squared = make(X)
    for loss in (squared, jax.jit(lambda w: squared(w).mean())):  # directly, and one jit deeper
        value, gradient = mt.value_and_grad(loss, in_axes={"x": 0}, devices=2)(3.0)
        np.testing.assert_allclose((value, gradient), (9 * (X**2).mean(), 6 * (X**2).mean()))


@pytest.mark.parametrize("name", ["values", "names", "inner", "method", "first"])
def test_rows_by_any_name_in_a_partial(name):
    """Lie: the variables of this library's own functions are taken for the user's rows."""
    loss = functools.partial(lambda w, *, scale, **rows: w * rows[name] * scale, scale=0.5)
    found = mt.value_and_grad(
        functools.partial(loss, **{name: X}), in_axes={name: 0}, devices=2, towers=4
    )(1.0)
    np.testing.assert_allclose(found[0], 0.5 * X.mean(), rtol=1e-6)


def test_names_that_the_loss_does_not_close_over():
    x = jnp.asarray(X)
    with pytest.raises(mt.BatchError, match=r"closes over its batch.*in_axes=\{'batch': 0\}"):
        mt.grad(lambda w: (w * x).mean())(1.0)
    run = mt.grad(lambda w: (w * x).mean(), in_axes={"y": 0})
    with pytest.raises(mt.ArgumentError, match=r"names 'y', and the function closes over x\. Name"):
        run(1.0)


def test_rows_that_are_an_attribute_are_told_of_without_our_own_names():
    class Loss:
        batch = X

        def of(self, w):
            return (w * self.batch).mean()

        __call__ = of

    for loss in (Loss().of, Loss()):
        with pytest.raises(
            mt.ArgumentError, match=r"closes over nothing.*jax.jit.*self\.batch, is no variab"
        ):
            mt.grad(loss, in_axes={"batch": 0})(1.0)
    partial = functools.partial(lambda w, x: (w * x).mean(), x=X)
    with pytest.raises(mt.ArgumentError, match=r"names 'y', and the function closes over x\. Name"):
        mt.grad(partial, in_axes={"x": 0, "y": 0})(1.0)


# ---------------------------------------------------------------- never stale, never needless


class Settings:
    scale = 2.0


class Namespace:
    def __init__(self, **held):
        self.__dict__.update(held)


settings, table, bias = Namespace(scale=2.0), {"scale": 2.0}, jnp.float32(1)
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


rule, own_module = Rule(2.0), types.ModuleType("own_module")
own_module.scale, own_module.half = 2.0, 0.5


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


traced, seen = [], []
OF_CLASSES = {
    "slots": MoreThanSlots(),
    "a dict": Table(),
    "a named tuple": Row(),
    "a Linen module": Linen(),
    "an NNX module": Nnx(),
    "an Equinox module": Equinox(jnp.ones(())),
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


@pytest.mark.parametrize("kind", OF_CLASSES)
def test_what_a_method_uses_is_seen_by_a_function_made_anew(kind, monkeypatch):
    """Lie: what has a value, or holds arrays, is compared by these, and not by what it does."""
    one = OF_CLASSES[kind]
    monkeypatch.setitem(globals(), "current", one)

    def run(scale):
        monkeypatch.setitem(globals(), "factor", scale)
        if isinstance(one, Table | Slots):
            one.scale = scale
        made = [make_loss(one) for make_loss in (closed_over, in_a_global, its_method)]
        return [float(mt.value_and_grad(fun, towers=2, devices=2)(1.0, X)[0]) for fun in made]

    assert run(2.0) == [7.0] * 3
    assert run(3.0) == [10.5] * 3


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
    assert np.isfinite(mt.grad(one.loss, devices=2, towers=2)(1.0, X))


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
        grads = mt.value_and_grad(fun, in_axes=(None, 0, None), towers=2, devices=2)
        found = mt.make_parallel(fun, in_axes=(None, 0, None), devices=2)(1.0, X, OF_CLASSES[kind])
        return float(grads(1.0, X, OF_CLASSES[kind])[0]), float(found.mean())

    assert [run(2.0), run(3.0)] == [(7.0, 7.0), (10.5, 10.5)]


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


def test_a_dict_of_settings_in_the_closure():
    """Lies: a compilation at every step; or settings of before, also for a batch of other rows."""

    def make_loss(config):
        loss = lambda w, x: (traced.append(1), w * x * config["scales"][0])[1]

        def rebind(new):
            nonlocal config
            config = new

        return loss, rebind

    run = lambda loss, x=X: float(mt.value_and_grad(loss, devices=2, towers=2)(1.0, x)[0])
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


@dataclasses.dataclass(frozen=True)
class Unequal:
    """Equal to others that do something else."""

    table: object = dataclasses.field(compare=False)
    scale: dict = dataclasses.field(hash=False, default_factory=dict)


def times_all(x, held):
    return x * held.table[0] * held.scale.get("all", 1.0)


@pytest.mark.parametrize("make", [np.array, jnp.array, list])
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


def test_a_global_batch_is_named():
    """Lie: advice that leads to the next error."""
    globals()["batch"] = X
    loss = eval("lambda w: w * batch", globals())
    value, gradient = mt.value_and_grad(loss, in_axes={"batch": 0}, devices=2)(2.0)
    assert (value, gradient) == (7.0, 3.5)


def assert_as_jax(loss):
    """One device of plain JAX, without towers and with."""
    expected = jax.value_and_grad(lambda w, x: loss(w, x).mean())(1.0, X)
    for options in ({"devices": 2}, {"devices": 2, "towers": 4}):
        found = mt.value_and_grad(loss, **options)(1.0, X)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def fold(layers, x):
    """Layers in the order in which the dicts hold them."""
    for value in layers.values():
        x = fold(value, x) if isinstance(value, dict) else x * value + 1
    return x


def layers(make_dict, number):
    inner = {"second": number(3), "first": number(2)}
    return make_dict(lambda: 0, {"z": number(2), "nested": inner, "a": number(-1)})


@pytest.mark.slow
@pytest.mark.parametrize("number", [jnp.float32, np.float64, np.ones(1).__mul__])
@pytest.mark.parametrize("make_dict", [lambda _, held: held, collections.defaultdict])
def test_the_keys_of_a_dict_keep_their_order(make_dict, number):
    """Lie: layers in the order of their names, as JAX sorts the keys of a dict."""
    held = layers(make_dict, number)
    assert_as_jax(lambda w, x: fold(held, w * x))
    assert_as_jax(functools.partial(lambda w, x, *, held: fold(held, w * x), held=held))


def test_rows_in_a_dict_keep_its_order():
    rows = {"b": X, "a": X + 1}
    found = mt.value_and_grad(lambda w: fold(rows, w), in_axes={"rows": 0}, devices=2, towers=4)(
        1.0
    )
    np.testing.assert_allclose(found[0], fold(rows, 1.0).mean(), rtol=1e-6)


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


def test_a_float_that_is_asked_for_its_type():
    scale = 0.5
    assert_as_jax(lambda w, x: w * x * (scale if isinstance(scale, float) else 100.0))


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

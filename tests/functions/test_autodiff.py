"""value_and_grad, grad, average_gradients: law L2 against JAX on one device and against NumPy."""

import dataclasses
import enum
import functools
import gc
import itertools
import weakref
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multitower as mt
import trees
from multitower.hardware.compilations import counted_compilations
from multitower.towers import global_arrays

few = settings(max_examples=7)


def losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    return (hidden @ params["v"] - batch["y"]) ** 2


def params_of(seed=0):
    rng = np.random.default_rng(seed)
    w, v = rng.normal(size=(3, 4)), rng.normal(size=4)
    return {"w": w.astype(np.float32), "v": v.astype(np.float32)}


def batch_of(num_rows, seed=1):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(num_rows, 3)), rng.normal(size=num_rows)
    return {"x": x.astype(np.float32), "y": y.astype(np.float32)}


def numpy_value_and_grad(params, batch):
    """The same, worked out by hand in float64."""
    w, v = (np.asarray(params[name], np.float64) for name in "wv")
    x, y = (np.asarray(batch[name], np.float64) for name in "xy")
    hidden = np.tanh(x @ w)
    wrong = 2 * (hidden @ v - y) / len(y)
    grad = {"w": x.T @ (np.outer(wrong, v) * (1 - hidden**2)), "v": hidden.T @ wrong}
    return np.mean((hidden @ v - y) ** 2), grad


assert_close = functools.partial(trees.assert_close, rtol=2e-5)


def mean_of(fun):
    return lambda *args: jnp.mean(fun(*args))


@pytest.mark.slow
@few
@given(
    num_rows=st.integers(1, 20),
    num_devices=st.integers(1, 8),
    towers=st.none() | st.just(8),
)
def test_law_l2_any_rows_any_devices(num_rows, num_devices, towers):
    """Lie: a mean of means, padding that counts, a gradient N times too big."""
    params, batch = params_of(), batch_of(num_rows)
    found = mt.value_and_grad(losses, devices=num_devices, towers=towers)(params, batch)
    assert_close(found, numpy_value_and_grad(params, batch))
    assert_close(found, jax.value_and_grad(mean_of(losses))(params, batch))


@pytest.mark.parametrize("towers", [None, 4])
def test_law_l2_scalar_loss(towers):
    params, batch = params_of(), batch_of(12)
    found = mt.value_and_grad(mean_of(losses), devices=2, towers=towers)(params, batch)
    assert_close(found, numpy_value_and_grad(params, batch))


def test_trap_gradients_n_times_too_big():
    """Inside shard_map JAX has summed gradients already; on 8 devices 60.0 came for 7.5."""
    x = np.arange(16, dtype=np.float32)
    for num_devices, towers in ((1, None), (2, None), (8, None), (1, 8), (2, 8)):
        gradient = mt.grad(lambda w, x: w * x, devices=num_devices, towers=towers)(1.0, x)
        assert gradient.item() == 7.5


def one_step(params, batch, options):
    return mt.value_and_grad(losses, **options)(params, batch)


def plain_step(params, batch, options):
    return jax.value_and_grad(mean_of(losses))(params, batch)


def scanned(step, params, batch, options):
    def body(params, _):
        value, grads = step(params, batch, options)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return jax.lax.scan(body, params, None, length=3)


def many_params(params):
    return jax.tree.map(lambda p: np.stack([p, 2 * p]), params)


WAYS = {
    "jit": lambda step, p, b, o: jax.jit(lambda p, b: step(p, b, o))(p, b),
    "scan": scanned,
    "jit of scan": lambda step, p, b, o: jax.jit(lambda p: scanned(step, p, b, o))(p),
    "vmap over parameters": lambda step, p, b, o: jax.vmap(lambda p: step(p, b, o))(many_params(p)),
    "jit of vmap": lambda step, p, b, o: jax.jit(jax.vmap(lambda p: step(p, b, o)))(many_params(p)),
    "under grad": lambda step, p, b, o: jax.grad(lambda p: step(p, b, o)[0])(p),
    "jit of grad": lambda step, p, b, o: jax.jit(jax.grad(lambda p: step(p, b, o)[0]))(p),
    "grad of grad": lambda step, p, b, o: jax.grad(
        lambda p: sum((g**2).sum() for g in jax.tree.leaves(step(p, b, o)[1]))
    )(p),
}


# Outside of jit, `vmap` and `grad` compile every operation.
EVERY_DAY = [
    ("jit", None),
    ("scan", 6),
    ("jit of scan", None),
    ("jit of vmap", 6),
    ("jit of grad", 6),
]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "towers"),
    [
        pytest.param(way, towers, marks=[] if (way, towers) in EVERY_DAY else [pytest.mark.slow])
        for way, towers in itertools.product(WAYS, (None, 6))
    ],
)
def test_law_l2_inside_other_transformations(way, towers):
    """Lie: right when called eagerly only; ten ragged rows on four devices."""
    options = dict(devices=4, towers=towers)
    params, batch = params_of(), batch_of(10)
    found = WAYS[way](one_step, params, batch, options)
    assert_close(found, plainly(way), rtol=1e-4, atol=1e-5)


@functools.cache
def plainly(way):
    return WAYS[way](plain_step, params_of(), batch_of(10), {})


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 3])
def test_argnums_and_in_axes_as_in_jax(towers):
    def loss(x, a, b, scale):
        return (x.T * a) @ b * scale

    x = np.arange(10, dtype=np.float32).reshape(2, 5)
    args = (x, np.ones(2, np.float32), np.array([1.0, 3.0], np.float32), 2.0)
    in_axes = (1, None, None, 0)
    for argnums in ((2, 1), -3) if towers else (1, (2, 1), (-2,), -3):
        options = dict(in_axes=in_axes, devices=2, towers=towers)
        found = mt.value_and_grad(loss, argnums, **options)(*args)
        assert_close(found, jax.jit(jax.value_and_grad(mean_of(loss), argnums))(*args))


@pytest.mark.slow
def test_one_axis_of_rows_for_all_arguments():
    # The lie: rows along the first axis, of which some arrays have as many.
    loss = lambda w, x, y, scale: (w @ x + y.sum((0, 1))) ** 2 * scale
    w, x, y = np.ones(5, np.float32), np.arange(25.0).reshape(5, 5), np.ones((5, 2, 5))
    args = (w, x.astype(np.float32), y.astype(np.float32), 2.0)
    found = mt.value_and_grad(loss, in_axes=-1, devices=2, towers=3)(*args)
    assert_close(found, jax.value_and_grad(mean_of(loss))(*args))


@pytest.mark.parametrize(
    ("num_rows", "towers"),
    [
        (16, None),
        (10, 4),
        pytest.param(16, 4, marks=pytest.mark.slow),
        pytest.param(10, None, marks=pytest.mark.slow),
    ],
)
def test_aux_by_rows_or_averaged(num_rows, towers):
    """Lie: aux of the last tower for all, or padding among the rows, or what is no row refused."""
    params, batch = params_of(), batch_of(num_rows)
    norm_of = lambda params: sum(jnp.square(leaf).sum() for leaf in jax.tree.leaves(params))

    def loss(params, batch):
        values = losses(params, batch)
        aux = {"values": values, "pair": (batch["x"] > 0, None), "norm": norm_of(params)}
        if num_rows == 16:
            aux["mean"] = batch["y"].mean()
        return values, aux

    run = mt.value_and_grad(loss, has_aux=True, devices=2, towers=towers)
    (value, aux), grads = run(params, batch)
    assert_close((value, grads), numpy_value_and_grad(params, batch))
    assert_close((aux["values"], aux["norm"]), (losses(params, batch), norm_of(params)))
    np.testing.assert_array_equal(aux["pair"][0], batch["x"] > 0)
    assert aux["pair"][1] is None
    if num_rows == 16:
        assert_close(aux["mean"], batch["y"].mean())
    grads_again, aux_again = mt.grad(loss, has_aux=True, devices=2, towers=towers)(params, batch)
    assert_close((grads_again, aux_again), (grads, aux))


def test_sixteen_rows_are_not_sixteen_classes():
    """Lie: aux that happens to be as long as the tower's rows is laid side by side."""

    def loss(w, x):
        return w * x, jnp.full(4, x.mean())

    (_, aux), _ = mt.value_and_grad(loss, has_aux=True, devices=2)(1.0, np.arange(8.0))
    np.testing.assert_allclose(aux, [3.5] * 4)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4])
def test_trap_four_members_are_taken_for_four_rows(towers):
    """Lie: with 13 rows the last member has the weight of one row; with a sum 4 times too large."""
    x, y = np.ones((13, 3), np.float32), np.arange(52, dtype=np.float32).reshape(13, 4)
    error = lambda w: (x @ w - y) ** 2
    run = lambda loss: mt.value_and_grad(loss, in_axes={"x": 0, "y": 0}, devices=4, towers=towers)

    def by_member(w):
        return ((x @ w - y) ** 2).mean(0)

    def of_members(w):
        return mt.ratio(((x @ w - y) ** 2).sum(0), np.ones(4, np.float32))

    w = jnp.ones((3, 4))
    for loss in (by_member, of_members):
        for _ in range(2):  # not the first call alone
            with pytest.raises(mt.OutputError, match="4 entries on its first axis, whatever"):
                run(loss)(w)

    def by_row(w):
        return ((x @ w - y) ** 2).mean(axis=1)  # as it says

    assert float(run(by_row)(w)[0]) == pytest.approx(float(error(w).mean()), rel=1e-6)


@pytest.mark.filterwarnings("ignore:loss .slice")  # an odd row is left out
def test_rows_of_whole_pairs_are_rows():
    """Lie: with 211 rows, which the first look reads first, there are 210 losses, as in a tower."""
    x = np.random.default_rng(0).normal(size=(420, 3)).astype(np.float32)
    pairs = lambda w, x: (x[: len(x) // 2 * 2] @ w) ** 2
    value, _ = mt.value_and_grad(pairs, towers=2, devices=1)(jnp.ones(3), x)
    assert float(value) == pytest.approx(float(pairs(jnp.ones(3), x).mean()), rel=1e-6)


def test_trap_a_step_takes_four_members_for_four_rows():
    step = mt.train_step(lambda w, y: ((w - y) ** 2).mean(0), optax.sgd(0.1), towers=4, devices=1)
    state = step.init(jnp.ones(4))
    for _ in range(2):
        with pytest.raises(mt.OutputError, match=r"error.mean\(axis=1\) and not error.mean"):
            step(state, np.ones((16, 4), np.float32))


def test_law_l6_every_tower_draws_its_own_numbers():
    def loss(w, key, x):
        noise = jax.random.normal(key, x.shape)
        return w * x, noise

    def noise_on(num_devices):
        run = mt.value_and_grad(loss, has_aux=True, devices=num_devices, towers=4)
        return np.asarray(run(1.0, jax.random.key(0), np.zeros(8, np.float32))[0][1])

    first = noise_on(1)
    assert len(np.unique(first)) == 8
    for num_devices in (2, 3):
        assert noise_on(num_devices).tobytes() == first.tobytes()


def test_eager_towers_have_the_same_bits_on_every_device_count():
    params, batch = params_of(), batch_of(13)
    found = {
        mt.fingerprint(mt.value_and_grad(losses, devices=d, towers=8)(params, batch))
        for d in (1, 2, 3)
    }
    assert len(found) == 1


def test_16_bit_parameters_get_16_bit_gradients():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of())
    for options in ({"devices": 2}, {"devices": 1, "towers": 4}):
        value, grads = mt.value_and_grad(losses, **options)(params, batch_of(8))
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
        assert value.dtype == jax.eval_shape(mean_of(losses), params, batch_of(8)).dtype


def test_complex_parameters():
    def loss(w, x):
        return jnp.abs(w * x - 1j) ** 2

    w, x = np.array([1 + 2j], np.complex64), np.arange(6, dtype=np.float32)
    expected = jax.jit(jax.value_and_grad(mean_of(loss)))(w, x)
    for devices, towers in ((3, None), (2, 3)):
        assert_close(mt.value_and_grad(loss, devices=devices, towers=towers)(w, x), expected)


def test_a_complex_parameter_that_the_loss_does_not_use():
    """Lie: XLA ends the process on the sum of its zeros beside another sum."""
    params = {"w": np.ones(3, np.float32), "unused": np.ones(3, np.complex64)}
    loss = lambda params, x: (x @ params["w"]) ** 2
    x = np.ones((8, 3), np.float32)
    expected = jax.value_and_grad(mean_of(loss))(params, x)
    assert_close(mt.value_and_grad(loss, devices=4)(params, x), expected)


def test_gradients_come_home_to_a_bound_parameter():
    """Lie: the user's own optimizer update meets arrays on incompatible devices."""
    home = mt.devices("cpu:3")[0]
    params = jax.device_put(params_of(), home)
    for towers in (None, 4):
        _, grads = mt.value_and_grad(losses, devices=2, towers=towers)(params, batch_of(8))
        new = jax.jit(lambda params, grads: jax.tree.map(jnp.subtract, params, grads))(
            params, grads
        )
        assert new["w"].devices() == {home}


def test_gradients_of_a_parameter_on_several_devices_are_on_all():
    mesh = jax.sharding.Mesh(np.array(mt.devices(2)), ("any",))
    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    w = jax.device_put(np.float32(1), everywhere)
    gradient = mt.grad(lambda w, x: w * x, devices=2)(w, np.arange(8, dtype=np.float32))
    assert gradient.item() == 3.5
    assert gradient.devices() == set(mt.devices(2))


def test_a_loop_that_calls_it_anew_compiles_once():
    """Lie: `mt.value_and_grad(loss)(...)` in a loop without jit compiles at every step."""
    traces = []

    def loss(w, x):
        traces.append(1)
        return w * x

    for towers in (None, 2):
        counts = []
        for step in range(3):
            mt.value_and_grad(loss, devices=2, towers=towers)(jnp.float32(step), np.ones(4))
            counts.append(len(traces))
        assert counts == counts[:1] * 3


def counting(count, key, counts):
    """A loss that closes over a counter and hands on what `counts` makes of it."""

    def loss(w, x):
        return jax.nn.relu(w * x), {"count": counts(count, x, key), "x": x > 0}

    return loss


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("jit", [False, True])
def test_a_counter_in_aux_is_that_of_one_device(towers, jit):
    """Flax NNX's examples close over their counters. Lie: a counter that counts towers."""
    wrap = jax.jit if jit else lambda fun: fun
    x = np.arange(10, dtype=np.float32)  # ragged: what does not depend on rows is no mean of them

    @wrap
    def step(count, key):
        loss = counting(count, key, lambda count, x, key: (jax.jit(jnp.add)(count, 1), count > 3))
        return mt.grad(loss, has_aux=True, devices=2, towers=towers)(1.0, x)

    _, aux = step(jnp.array(6), jax.random.key(0))
    assert aux["count"] == (7, True)
    np.testing.assert_array_equal(aux["x"], x > 0)


OTHER_COUNTS = {
    "of rows": lambda count, x, key: count + len(x),
    "of what rows hold": lambda count, x, key: count + (x > 0).sum(),
    "of turns that rows decide": lambda count, x, key: jax.lax.fori_loop(
        0, x.max().astype(int), lambda _, n: n + 1, count
    ),
    "of a tower's own random numbers": lambda count, x, key: jax.random.randint(key, (), 0, 9),
}


@pytest.mark.parametrize("towers", [None, 4])
@pytest.mark.parametrize("counts", OTHER_COUNTS)
def test_a_counter_of_a_tower_stays_an_error(counts, towers):
    """Lie: the count of tower 0, a quarter of the rows, for that of all."""
    loss = counting(jnp.array(6), jax.random.key(0), OTHER_COUNTS[counts])
    with pytest.raises(mt.OutputError, match=r"aux\['count'\] has dtype int32 and no axis of rows"):
        mt.grad(loss, has_aux=True, devices=2, towers=towers)(1.0, np.arange(8.0))


# ---------------------------------------------------------------- arguments that are no data


def settings_loss(w, x, training, name="square", rest=None, *, act=None, names=("a", 1)):
    assert type(training) is bool
    assert names == ("a", 1)
    assert rest is None
    return act(x @ w) ** (2 if training and name == "square" else 1)


@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_flags_strings_and_functions_are_handed_on(towers):
    """Published Keras, Flax and Equinox losses take them. Lie: a traced flag, or an error."""
    w, x = np.ones(3, np.float32), batch_of(10)["x"]
    for training in (True, False):  # the second must not get the first one's program
        args, kwargs = (w, x, training, "square", None), {"act": jnp.tanh}
        plain = lambda *args, **kwargs: settings_loss(*args, **kwargs).mean()
        static = {"static_argnums": (2, 3), "static_argnames": "act"}
        expected = jax.jit(jax.value_and_grad(plain), **static)(*args, **kwargs)
        run = mt.value_and_grad(settings_loss, devices=2, towers=towers)
        assert_close(run(*args, **kwargs), expected)
        assert_close(
            jax.jit(run, static_argnames=("training", "name", "act"))(*args, **kwargs), expected
        )
        rows = mt.make_parallel(settings_loss, (None, 0, 0, 0, 0), devices=2, towers=towers)
        assert_close(rows(*args, **kwargs), np.tanh(x @ w) ** (2 if training else 1))
        if towers is None:  # it takes no devices and makes towers of its own
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
    for own in two:
        expected = jax.value_and_grad(lambda w, own=own: loss(w, x, own).mean())(w)
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
        (Batch(jnp.float32(1)), "Register its class once"),
        (Batch((1, object())), "Register its class once"),
        (Batch(nnx.Rngs(0)), "Register its class once"),
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


# ---------------------------------------------------------------- average_gradients


def test_a_function_that_nothing_can_be_remembered_by():
    class Loss:
        __hash__ = None

        def __call__(self, w, x):
            return w * x

    assert mt.grad(Loss(), devices=2)(1.0, np.arange(8, dtype=np.float32)) == 3.5


def test_average_gradients_is_the_mean():
    rng = np.random.default_rng(0)
    towers = [{"w": rng.normal(size=(3, 2)).astype(np.float32), "b": [1.0 * i]} for i in range(5)]
    found = mt.average_gradients(towers)
    np.testing.assert_allclose(found["w"], np.mean([t["w"] for t in towers], 0), rtol=1e-6)
    assert found["b"] == [2.0]


def test_average_gradients_of_towers_on_their_own_devices_and_under_jit():
    towers = [jax.device_put({"w": np.ones(2, np.float32) * i}, mt.devices()[i]) for i in range(3)]
    assert mt.average_gradients(towers)["w"].devices() == {mt.devices()[0]}
    on_host = [{"w": np.ones(2, np.float32) * i} for i in range(4)]
    np.testing.assert_array_equal(jax.jit(mt.average_gradients)(on_host)["w"], [1.5, 1.5])


def test_average_gradients_are_on_the_first_of_several_devices():
    # The lie: the first element of a set of devices is the first one.
    mesh = jax.make_mesh((4,), ("x",), devices=mt.devices(4)[::-1])
    rows = jax.NamedSharding(mesh, jax.P("x"))
    towers = [jax.device_put(np.ones(4, np.float32) * i, rows) for i in range(3)]
    assert mt.average_gradients(towers).devices() == {mt.devices()[0]}


def test_average_gradients_adds_16_bit_floats_in_32():
    """Lie: 256 + 1 + 1 ... stays 256 in bfloat16."""
    towers = [np.full(1, 256, jnp.bfloat16)] + [np.ones(1, jnp.bfloat16)] * 255
    mean = mt.average_gradients(towers)
    assert mean.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(mean, np.float32), 511 / 256, rtol=1e-2)


ones = np.ones(2, np.float32)


@pytest.mark.parametrize(
    ("tower_grads", "message"),
    [
        ([], "no towers"),
        ([{"w": ones, "b": None}], r"tower_grads\[0\]\['b'\] is None.*no gradient in tower 0"),
        ([{"w": ones}, {"w": None}], r"tower_grads\[1\]\['w'\] is None"),
        ([{"i": np.arange(3)}], r"tower_grads\[0\]\['i'\] has dtype int.*dense"),
        ([np.zeros(2, jax.dtypes.float0)], "has dtype .*float0|has dtype .*V"),
        ([{"w": ones}, {"w": np.ones(3, np.float32)}], r"\['w'\] is float32\[3\] and float32\[2\]"),
        ([{"w": ones}, {"w": jnp.ones(2, jnp.bfloat16)}], r"bfloat16\[2\] and float32\[2\]"),
        ([{"w": ones}, {"v": ones}], r"tower_grads\[0\]\['w'\] has no counterpart in tower 1"),
        ([{"w": ones}, {"w": ones, "v": ones}], r"tower_grads\[1\]\['v'\] has no .* in tower 0"),
    ],
)
def test_trap_average_gradients_names_what_cannot_be_averaged(tower_grads, message):
    """Lie: zip() stops at the shortest tower, None counts as zero, indices are averaged."""
    with pytest.raises(mt.GradientError, match=message):
        mt.average_gradients(tower_grads)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (np.ones(2, ">f4"), r"tower_grads\[0\]\['w'\] has dtype >f4, whose bytes are in another"),
        (np.ma.array([1.0, 2.0], mask=[0, 1]), r"\['w'\] is a masked array, .* without its mask"),
        (np.array([1.0, None]), r"\['w'\] has dtype object: only numbers"),
        ("text", r"\['w'\] is 'text' \(str\)"),
    ],
)
def test_gradients_that_no_device_can_hold_are_named(leaf, message):
    """Lie: a mean of what a mask hides; or an error of JAX about position 0 of a stage."""
    with pytest.raises(mt.ArgumentError, match=message):
        mt.average_gradients([{"w": leaf}, {"w": leaf}])


def test_trap_average_gradients_of_sparse_gradients():
    from jax.experimental import sparse

    places = np.array([[0, 0], [1, 1]])
    gradient = sparse.BCOO((np.ones(2, np.float32), places), shape=(2, 2))
    with pytest.raises(mt.GradientError, match=r"indices of a sparse gradient.*todense"):
        mt.average_gradients([gradient, gradient])


@pytest.mark.parametrize("towers", [None, 4])
def test_trap_a_transformation_around_it_compiles_at_every_call(towers):
    """A product with the Hessian took seconds, each time."""
    traced = []

    def losses(w, x):
        traced.append(1)
        return jnp.tanh(w * x)

    gradient = mt.grad(losses, devices=2, towers=towers)
    x = np.arange(8, dtype=np.float32)
    product = lambda: jax.jvp(lambda w: gradient(w, x), (1.0,), (1.0,))[1]
    first, known = product(), len(traced)
    assert (product(), len(traced)) == (first, known)
    by_jax = jax.grad(jax.grad(lambda w: jnp.tanh(w * x).mean()))(1.0)
    np.testing.assert_allclose(first, by_jax, rtol=1e-4)


@pytest.mark.parametrize("towers", [None, 4])
def test_weights_on_one_device_are_copied_once(towers):
    """The lie: a frozen model costs a copy to every device at every call."""
    losses = lambda w, frozen, x: (x @ (w + frozen)) ** 2
    gradient = mt.grad(losses, in_axes=(None, None, 0), devices=4, towers=towers)
    w, frozen = jnp.ones(3), jnp.arange(3.0)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    first, rows = gradient(w, frozen, x), mt.shard(x, devices=4, towers=towers)
    with jax.transfer_guard_device_to_device("disallow"):
        np.testing.assert_array_equal(gradient(w, frozen, rows), first)
    changed = gradient(w, frozen + 1, x)
    by_jax = jax.grad(lambda w: losses(w, frozen + 1, x).mean())(w)
    np.testing.assert_allclose(changed, by_jax, rtol=1e-5)


@pytest.mark.parametrize("towers", [None, 4])
def test_weights_that_are_there_twice_are_copied_to_their_own_places(towers):
    """The lie: the copy of one array is taken for that of the next."""
    losses = lambda params, x: (x @ params[0]) + (x @ params[1]) * (x @ params[2])
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    twice, other = jnp.arange(3.0), jnp.full(3, 7.0)
    gradient = mt.value_and_grad(losses, devices=4, towers=towers)
    by_jax = jax.value_and_grad(lambda params: losses(params, x).mean())
    for params in ([twice, twice, other], [other, twice, twice + 1]):
        for found, wanted in zip(
            jax.tree.leaves(gradient(params, x)), jax.tree.leaves(by_jax(params)), strict=True
        ):
            np.testing.assert_allclose(found, wanted, rtol=1e-5)


def test_a_copy_of_weights_goes_when_they_go():
    gradient = mt.grad(lambda w, x: w * x, devices=4)
    w = jnp.float32(2)
    gradient(w, np.ones(8, np.float32))
    copy = weakref.ref(next(iter(global_arrays._copies.of(w).values())))
    assert copy() == 2
    del w
    gc.collect()
    assert copy() is None


def test_a_step_of_ones_own_compiles_once_with_weights_on_all_devices():
    """existing-loop.md says so: JAX compiles for the devices that the arguments are on."""

    def compilations(w):
        gradient = mt.grad(lambda w, x: (x @ w) ** 2, devices=4)
        train = jax.jit(lambda w, x: w - 0.1 * gradient(w, x))
        with counted_compilations() as compiled:
            for _ in range(3):
                w = train(w, np.ones((8, 3), np.float32))
        return len(compiled)

    everywhere = NamedSharding(Mesh(mt.devices(4), "towers"), PartitionSpec())
    assert compilations(jnp.ones(3)) == 2
    assert compilations(jax.device_put(jnp.ones(3), everywhere)) == 1


@pytest.mark.parametrize(
    "given",
    [
        lambda found: Mesh(found, "towers").devices,
        lambda found: Mesh(np.reshape(found, (2, 2)), ("a", "b")).devices,
        iter,
    ],
    ids=["mesh", "mesh of two axes", "iterator"],
)
def test_devices_of_a_mesh_compile_once(given):
    # The lie: they are no list, which compiles at every call; or an iterator has none left.
    factor, x = 3.0, np.ones((8, 3), np.float32)
    gradient = mt.grad(lambda w, x: factor * (x @ w) ** 2, devices=given(mt.devices(4)))
    double = mt.make_parallel(lambda x: x * factor, devices=given(mt.devices(4)))
    found = gradient(jnp.ones(3), x), double(x)
    with counted_compilations() as compiled:
        again = gradient(jnp.ones(3), x), double(x)
    assert not compiled
    assert len(double(x).sharding.device_set) == 4
    assert jax.tree.all(jax.tree.map(np.array_equal, again, found))


class Drawing:
    def __init__(self):
        self.key = jax.random.key(0)

    def loss(self, w, x):
        self.key, key = jax.random.split(self.key)
        return (w * x + jax.random.normal(key, x.shape)) ** 2


def test_a_key_that_a_loss_keeps_is_told():
    with pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        mt.grad(Drawing().loss, devices=2)(1.0, np.ones(4, np.float32))
    assert any("a key is an argument" in note for note in caught.value.__notes__)
    step = mt.train_step(Drawing().loss, optax.sgd(0.1), devices=2)
    same_numbers = pytest.warns(mt.MultitowerWarning, match="random numbers")
    with same_numbers, pytest.raises(jax.errors.UnexpectedTracerError) as caught:
        step(step.init(jnp.float32(1)), np.ones(4, np.float32))
    assert any("a key is an argument" in note for note in caught.value.__notes__)


def test_results_of_one_call_are_on_the_same_devices():
    """The lie: rows that do not fill the towers are on one device, which JAX refuses to mix."""
    losses = lambda w, x: ((x * w) ** 2, {"rows": x * w})
    for towers, few in ((4, 7), (6, 12)):
        x = np.arange(few, dtype=np.float32)
        gradient, aux = mt.grad(losses, has_aux=True, devices=4, towers=towers)(jnp.float32(2), x)
        expected = (x**2).mean() * 8 * x.mean()
        np.testing.assert_allclose(gradient * aux["rows"].mean(), expected, rtol=1e-5)


def test_a_ragged_batch_after_a_full_one_is_refused_as_the_first_one_is():
    """Lie: a mean of means, as the program for the batch before does not look at rows."""
    run = mt.value_and_grad(lambda w, x: (w * x).mean(), devices=1, towers=2)
    x = np.arange(4, dtype=np.float32)
    assert run(np.float32(1), x)[0] == x.mean()
    with pytest.raises(mt.OutputError, match="scalar loss"):
        run(np.float32(1), x[:3])

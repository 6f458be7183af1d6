"""make_parallel(stages=): the function itself, the same bits on any layout, weights placed once."""

import functools
import gc

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import multitower as mt
import trees
from multitower.errors import ArgumentError, ConfigurationError, DeviceError, OutputError
from multitower.towers import placed

RNG = np.random.default_rng(0)
X = RNG.normal(size=(12, 4)).astype(np.float32)
# On a device of their own, where no stage of these tests runs.
HOME = jax.devices()[7]


def weights(num=3, size=4):
    drawn = RNG.normal(size=(num, size, size)).astype(np.float32) / 2
    return [jax.device_put(w, HOME) for w in drawn]


WEIGHTS = weights(4)


def tied(params, x, mask):
    """Tied first and last weights, a residual that skips stages, rows that the last stage needs."""
    h = start = x @ params[0]
    for w in params[1:]:
        h = mt.cut(h + jnp.tanh(h @ w))
    return {"out": (h + start) @ params[0].T * mask[:, None], "sum": x.sum(1), "first": params[0]}


AXES = {"in_axes": (None, 0, 0), "out_axes": {"out": 0, "sum": 0, "first": None}}


close = functools.partial(trees.assert_close, rtol=2e-5)


@pytest.mark.parametrize(
    ("layouts", "rows"),
    [
        ([(1, None), (3, None), (2, (2, 1))], (7,)),
        pytest.param([(1, None), (3, None), (2, (2, 1))], (12, 7), marks=pytest.mark.slow),
        pytest.param([(1, None), (2, None), (4, (2, 2))], (12, 7), marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_law_l3_the_same_bits_on_any_layout_and_l1_those_of_the_function(layouts, rows):
    # The lies: rows out of order, a stage that is left out, programs that differ between devices.
    found = []
    for devices, layout in layouts:
        where = {"devices": devices, "layout": layout, "interleave": devices == 4}
        infer = mt.make_parallel(tied, **AXES, towers=4, stages=3, **where)
        found.append([infer(WEIGHTS, X[:n], X[:n, 0]) for n in rows])
    assert len({mt.fingerprint(one) for one in found}) == 1
    for n, one in zip(rows, found[0], strict=True):
        close(one, tied([np.asarray(w) for w in WEIGHTS], X[:n], X[:n, 0]))


@pytest.mark.slow
@pytest.mark.parametrize("num_rows", [1, 3])
def test_fewer_rows_than_towers_and_a_tower_for_each_replica(num_rows):
    rows = X[:num_rows]
    for towers, devices in ((4, 2), (None, 4)):
        infer = mt.make_parallel(tied, **AXES, towers=towers, stages=2, devices=devices)
        close(infer(WEIGHTS, rows, rows[:, 0]), tied([np.asarray(w) for w in WEIGHTS], rows,
                                                     rows[:, 0]))  # fmt: skip


@pytest.mark.filterwarnings("ignore:this function runs without a look")
def test_rows_and_constants_that_are_results_as_they_are():
    # The lie: what no stage computes comes from another tower, or as another result.
    net = lambda w, x: (mt.cut(x.reshape(3, 4) @ w) @ w, x, np.arange(3, dtype=np.int32))
    infer = mt.make_parallel(net, in_axes=(None, 0), towers=4, stages=2, devices=2)
    w = np.asarray(WEIGHTS[0])
    close(infer(w, X), (X @ w @ w, X, np.tile(np.arange(3, dtype=np.int32), 4)))


def test_no_marks_calls_in_calls_and_a_number_that_is_closed_over():
    factor = 3.0

    @jax.jit
    def layer(w, x):
        return jax.nn.silu(x @ w)

    def net(x):
        for w in WEIGHTS:
            x = layer(w, x) * factor
        return x, x.argmax(1)

    infer = mt.make_parallel(net, towers=3, stages=4, devices=4)
    hidden, place = infer(X)
    close((hidden, place), jax.device_get(net(jax.device_put(X, HOME))))
    assert hidden.devices() == {jax.devices()[3]}
    assert float((hidden * 2).sum()) == pytest.approx(2 * float(hidden.sum()), rel=1e-5)


class Counted:
    """Counts what is copied to devices because it is not there yet."""

    def __init__(self, monkeypatch):
        self.number = 0
        copy = placed._copy
        monkeypatch.setattr(placed, "_copy", lambda *given: self._count(copy(*given)))

    def _count(self, result):
        self.number += 1
        return result

    def during(self, call):
        before = self.number
        result = call()
        return result, self.number - before


@pytest.fixture
def copies(monkeypatch):
    return Counted(monkeypatch)


@pytest.mark.slow
def test_an_nnx_module_is_placed_once_and_again_where_it_changes(copies):
    # The lies: weights copied at every call; the weights of the first call for ever.
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(3)])
            self.norm = nnx.BatchNorm(4, use_running_average=True, rngs=rngs)

        def __call__(self, x):
            for layer in self.layers:
                x = mt.cut(jnp.tanh(layer(x)))
            return self.norm(x)

    net = Net(nnx.Rngs(0))
    expected = net(X)
    infer = mt.make_parallel(net, towers=2, stages=3, devices=3)
    found, first = copies.during(lambda: infer(X))
    close(found, expected)
    assert first == 2 * 2 + 4  # the first layer is on the first device already
    assert copies.during(lambda: infer(X))[1] == 0
    net.layers[1].bias[...] = jnp.ones(4)
    expected = net(X)
    found, again = copies.during(lambda: infer(X))
    close(found, expected)
    assert again == 1
    net.norm.use_running_average = False
    with pytest.raises(OutputError, match=r"averages.*model.eval\(\)"):
        mt.make_parallel(net, towers=2, stages=3, devices=3)(X)


@pytest.mark.slow
def test_an_equinox_module_as_an_argument_and_numpy_arrays_that_change(copies):
    mlp = eqx.nn.MLP(4, 4, 8, 3, key=jax.random.key(0))
    bias = np.zeros(4, np.float32)

    def apply(mlp, bias, x):
        return jax.vmap(mlp)(x) + bias

    infer = mt.make_parallel(apply, (None, None, 0), towers=2, stages=2, devices=2)
    close(infer(mlp, bias, X), apply(mlp, bias, X))
    bias[:] = 5
    found, again = copies.during(lambda: infer(mlp, bias, X))
    close(found, apply(mlp, bias, X))
    assert again == 1  # what may have changed, and nothing else


def held_bytes(shape):
    """Bytes of arrays of this shape, for each device that has any."""
    gc.collect()
    held = {}
    seen = set()
    for array in jax.live_arrays():
        for shard in array.addressable_shards:
            at = shard.device, shard.data.unsafe_buffer_pointer()
            if array.shape == shape and at not in seen:
                seen.add(at)
                held[shard.device.id] = held.get(shard.device.id, 0) + shard.data.nbytes
    return held


@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_device_keeps_its_stages_alone_and_nothing_when_the_weights_are_gone(devices):
    # The lies: "cut", and every device has everything; a cache that never forgets.
    size = 20 + devices  # shapes of no other test
    params = weights(4, size)
    x = np.ones((4, size), np.float32)

    def net(params, x):
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    infer = mt.make_parallel(net, (None, 0), towers=4, stages=4, devices=devices)
    infer(params, x)
    each = 4 // devices * size * size * 4
    assert held_bytes((size, size)) == {**dict.fromkeys(range(devices), each), 7: 4 * size**2 * 4}
    params[:] = weights(4, size)
    infer(params, x)  # the arrays of before are forgotten
    assert held_bytes((size, size)) == {**dict.fromkeys(range(devices), each), 7: 4 * size**2 * 4}
    del params
    assert held_bytes((size, size)) == {}


def test_a_scan_over_layers_keeps_each_layer_with_its_stage(copies):
    # The lie: a scan is cut, and the first stage has all layers.
    stack = jax.device_put(RNG.normal(size=(6, 11, 11)).astype(np.float32) / 4, HOME)
    x = np.ones((4, 11), np.float32)

    def net(stack, x):
        return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, stack)[0]

    infer = mt.make_parallel(net, (None, 0), towers=2, stages=3, devices=3)
    close(infer(stack, x), net(np.asarray(stack), x))
    assert held_bytes((2, 11, 11)) == dict.fromkeys(range(3), 2 * 11 * 11 * 4)
    assert copies.during(lambda: infer(stack, x))[1] == 0
    # The lie: of several stages on a device, all have the layers of the first one.
    on_one = mt.make_parallel(net, (None, 0), towers=2, stages=3, devices=1)
    close(on_one(stack, x), net(np.asarray(stack), x))


@pytest.mark.slow
def test_what_a_step_with_stages_keeps_is_used_where_it_lies():
    def losses(params, x):
        return (tied(params, x, x[:, 0])["out"] ** 2).sum(1)

    step = mt.train_step(losses, optax.sgd(0.1), towers=2, stages=2, devices=2)
    state, _ = step(step.init([np.asarray(w) for w in WEIGHTS]), X)
    infer = mt.make_parallel(tied, **AXES, towers=2, stages=2, devices=2)
    host = jax.device_get(state.params)
    close(infer(state.params, X, X[:, 0]), tied(host, X, X[:, 0]))


@pytest.mark.slow
def test_towers_draw_the_numbers_that_they_draw_without_stages():
    # The lie: all towers drop the same units.
    def noisy(params, key, x):
        for w in params:
            x = mt.cut(jnp.tanh(x @ w)) * jax.random.bernoulli(key, 0.5, x.shape)
        return x

    options = {"in_axes": (None, 0, 0), "towers": 3, "devices": 2}
    given = [np.asarray(w) for w in WEIGHTS], jax.random.key(3), X
    close(mt.make_parallel(noisy, stages=2, **options)(*given),
          mt.make_parallel(noisy, **options)(*given))  # fmt: skip


def matching(params, x):
    """Towers meet twice in every stage: for the mean of all rows, and at last for all rows."""
    for w in params:
        x = mt.cut(x + jnp.tanh((x - jax.lax.pmean(x.mean(0), "towers")) @ w))
    return {"scores": x @ mt.all_rows(x).T, "rows": mt.row_index(x)}


@pytest.mark.slow
def test_law_l3_towers_that_meet():
    # The lies: sums over a replica's towers alone, a tower's rows in another one's place.
    x, params = np.asarray(X, np.float64), [np.asarray(w, np.float64) for w in WEIGHTS[:2]]
    for w in params:
        x = x + np.tanh((x - x.mean(0)) @ w)
    found = []
    for devices, layout in [(1, None), (4, (2, 2)), (3, (3, 1))]:
        infer = mt.make_parallel(
            matching, in_axes=(None, 0), towers=4, stages=2, devices=devices, layout=layout
        )
        found.append(infer(WEIGHTS[:2], X))
    assert len({mt.fingerprint(one) for one in found}) == 1
    np.testing.assert_allclose(found[0]["scores"], x @ x.T, rtol=1e-5, atol=1e-5)
    assert np.array_equal(found[0]["rows"], np.arange(12))


def test_towers_meet_inside_a_function_with_a_rule_of_differentiation(copies):
    # The lies: an error that only stages have, for rules that a forward pass never uses; a NumPy
    # array that is copied once for every piece between two exchanges.
    mean = jax.custom_vjp(lambda x: jax.lax.pmean(x, "towers"))
    mean.defvjp(lambda x: (mean(x), None), lambda _, given: (given,))
    total = jax.custom_jvp(lambda x: jax.lax.psum(x, "towers"))
    total.defjvps(lambda tangent, *_: tangent)
    net = lambda w, x: total(mt.cut((x - mean(x @ w)) ** 2 @ w) @ w) + x
    infer = mt.make_parallel(net, (None, 0), towers=2, stages=2, devices=2)
    w, x = np.asarray(WEIGHTS[0]), X.reshape(2, 6, 4)
    found, count = copies.during(lambda: infer(w, X))
    close(found, (((x - (x @ w).mean(0)) ** 2 @ w @ w).sum(0) + x).reshape(12, 4))
    assert count == 2  # one on each device


def call(fn=lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w), around=lambda f: f, **options):
    infer = mt.make_parallel(fn, **{"in_axes": (None, 0), "stages": 2, "devices": 2, **options})
    return around(infer)(np.eye(4, dtype=np.float32), X)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"stages": 0}, ArgumentError, "stages=0"),
        ({"stages": None, "layout": (1, 2)}, ArgumentError, "stages= is missing"),
        ({"layout": (1, 4)}, ArgumentError, r"Use layout=\(1, 2\)"),
        ({"layout": (2, 2), "devices": 3}, DeviceError, "needs 4 devices, and there are 3"),
        ({"fn": lambda w, x: x @ w}, ArgumentError, "the model cannot be cut"),
        ({"fn": lambda w, x: mt.cut(x @ w), "stages": 3}, ArgumentError, "Mark 1 more"),
        ({"fn": lambda w, x: (x @ w @ w).mean(0)}, OutputError, "one entry per row"),
        ({"fn": lambda w, x: mt.cut(x @ w) @ mt.all_rows(x).T, "towers": 5}, OutputError,
         "12 rows, which do not fill 5 towers"),
        ({"fn": lambda w, x: jax.lax.map(mt.all_rows, mt.cut(x @ w)) @ w}, OutputError, "loop"),
        ({"around": jax.jit}, ArgumentError, "call it outside"),
        ({"around": lambda f: lambda *given: jax.jit(lambda: f(*given))()}, ArgumentError,
         "call it outside"),
        ({"around": lambda f: jax.grad(lambda w, x: f(w, x).sum())}, ArgumentError,
         r"train_step\(stages=\)"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(options, error, match):
    with pytest.raises(error, match=match):
        call(**options)


def test_programs_are_compiled_ahead():
    with jax.disable_jit(), pytest.raises(ConfigurationError, match="disable_jit"):
        call()


def test_inside_a_tower_it_is_the_function_itself():
    inner = mt.make_parallel(lambda x: 2 * x, stages=2, devices=2)
    close(mt.make_parallel(lambda x: inner(x) + 1, devices=2)(X), 2 * X + 1)


def test_it_compiles_once_for_each_shape():
    traces = []

    def net(w, x):
        traces.append(len(x))
        return jnp.tanh(jnp.tanh(x @ w) @ w)

    infer = mt.make_parallel(net, (None, 0), towers=2, stages=2, devices=2)
    infer(np.eye(4), X)
    before = len(traces)
    infer(np.eye(4) + 1, X + 1)
    assert len(traces) == before


@pytest.mark.slow
def test_calls_of_another_kind_have_programs_of_their_own():
    """Lie: the stages of the weights, the rows or the names that came first."""

    def model(w, batch):
        ((name, x),) = batch.items()
        return mt.cut(jnp.tanh(x @ w[0])) @ w[1] * (2 if name == "twice" else 1)

    run = mt.make_parallel(model, in_axes=(None, 0), devices=2, towers=2, stages=2)
    x = np.ones((4, 3), np.float32)
    narrow, wide = ((np.ones((3, n), np.float32), np.ones(n, np.float32)) for n in (1, 2))
    calls = [(narrow, {"x": x}), (wide, {"x": x}), (wide, {"twice": x}), (wide, {"x": x > 0})]
    for w, batch in calls:
        np.testing.assert_allclose(run(w, batch), model(w, batch), rtol=1e-6)

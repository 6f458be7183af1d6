"""make_parallel: law L1, and where the law has to say no."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multitower as mt
from tower_keys import tower_key
from trees import Pair, assert_close

few = settings(max_examples=8)


def assert_equal(found, expected):
    """The same tree, bits and dtypes: what does not mix rows has no rounding to blame."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.asarray(one).dtype == jnp.asarray(other).dtype
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def batch_of(num_rows):
    x = np.arange(3 * num_rows, dtype=np.float32).reshape(num_rows, 3)
    return {"x": x, "pair": (x[:, 0] > 2, np.arange(num_rows, dtype=np.int32)), "factor": 3}


def mixed(batch, *, bias=0.0):
    flag, number = batch["pair"]
    scaled = batch["factor"] * batch["x"] + jnp.asarray(bias)[..., None]
    return {"y": scaled, "rest": [flag, (number, None)]}, number[:, None] % 2


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Noted:
    """As probability distributions do: what it notes beside its array is not put together."""

    array: jax.Array
    note: object = dataclasses.field(metadata={"static": True})


def test_a_result_that_notes_its_number_of_rows_is_refused():
    """Lie: a distribution over 12 rows that says it has 3, so that its samples repeat."""
    x = np.arange(12, dtype=np.float32)
    noting = lambda x: Noted(x, len(x))
    losses = lambda w, x: ((x * w) ** 2, noting(x))
    said = "(result|aux) keeps the number of its rows beside its arrays.* it would say 3 rows"
    for towers in (None, 4):
        where = {"devices": 4, "towers": towers}
        with pytest.raises(mt.OutputError, match=said):
            mt.make_parallel(noting, **where)(x)
        with pytest.raises(mt.OutputError, match=said):
            mt.value_and_grad(losses, has_aux=True, **where)(1.0, x)
        with pytest.raises(mt.OutputError, match=said):
            mt.make_parallel(lambda x: [x] * len(x), **where)(x)
        # What is new at every call is no number of rows.
        new = mt.make_parallel(lambda x: Noted(2 * x, lambda: None), **where)(x)
        assert_equal(new.array, 2 * x)


@pytest.mark.parametrize("towers", [None, 4])
def test_law_l1_results_that_look_at_nothing(towers):
    """Lie: a program that needs no argument runs on the first device, in place of its own."""
    make = lambda x: {"ones": jnp.ones((len(x), 2)), "none": jnp.zeros((len(x), 0))}
    found = mt.make_parallel(make, devices=2, towers=towers)(np.zeros(8, np.float32))
    assert_equal(found, {"ones": np.ones((8, 2), np.float32), "none": np.zeros((8, 0), np.float32)})


@few
@given(num_rows=st.integers(1, 20), num_devices=st.integers(1, 8))
def test_law_l1_any_rows_any_devices_any_pytree(num_rows, num_devices):
    """Lie: rows dropped, doubled, filled up with inventions or out of order."""
    batch = batch_of(num_rows)
    found = mt.make_parallel(mixed, devices=num_devices)(batch, bias=np.arange(num_rows) / 2)
    assert_equal(found, jax.jit(mixed)(batch, bias=np.arange(num_rows) / 2))


@pytest.mark.slow
@few
@given(
    num_rows=st.integers(1, 20),
    num_devices=st.integers(1, 3),
    towers=st.integers(3, 7),
)
def test_law_l1_with_towers(num_rows, num_devices, towers):
    """Lie: as above, when towers and devices and rows do not divide each other."""
    batch = batch_of(num_rows)
    found = mt.make_parallel(mixed, devices=num_devices, towers=towers)(batch, bias=0.5)
    assert_equal(found, jax.jit(mixed)(batch, bias=0.5))


def outer(x, w):
    return x[:, :, None] * w


@pytest.mark.parametrize(
    ("num_rows", "towers"),
    [
        (8, None),
        (5, 5),
        (1, 5),
        pytest.param(5, None, marks=pytest.mark.slow),
        pytest.param(8, 5, marks=pytest.mark.slow),
    ],
)
def test_axes_as_in_vmap(num_rows, towers):
    """Lie: rows on an axis other than the first are taken for features."""
    rng = np.random.default_rng(0)
    x = rng.integers(0, 9, (4, num_rows)).astype(np.float32)
    w = rng.integers(0, 9, 2).astype(np.float32)

    def fn(x, w):
        return {"outer": outer(x.T, w), "last": x, "sum": w.sum()}

    out_axes = {"outer": 0, "last": -1, "sum": None}
    parallel = mt.make_parallel(fn, (1, None), out_axes, devices=2, towers=towers)
    assert_equal(parallel(x, w), fn(x, w))


def test_axes_of_leaves():
    x, w = np.arange(20, dtype=np.float32).reshape(4, 5), np.array([3, 4], np.float32)
    tree = mt.make_parallel(lambda a: a["x"].T * a["w"][0], ({"x": -1, "w": None},), devices=3)
    assert_equal(tree({"x": x, "w": w}), x.T * w[0])


def test_rows_inside_a_middle_axis_of_the_result():
    x = np.arange(24.0, dtype=np.float32).reshape(2, 4, 3)
    parallel = mt.make_parallel(lambda x: x + 1, 1, 1, devices=3)
    assert_equal(parallel(x), x + np.float32(1))


@pytest.mark.parametrize(("devices", "towers"), [(3, None), (2, 5)])
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_arrays_without_elements(devices, towers, around):
    """Lie: 7 rows of no features fail, in some placements only."""
    x, empty = np.arange(7, dtype=np.float32), np.zeros((7, 0, 3), np.float32)

    def fn(x, empty):
        return empty.sum((1, 2)) + x, empty, empty[:, :, 0]

    parallel = mt.make_parallel(fn, devices=devices, towers=towers)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mt.MultitowerWarning)  # 5 towers on 2 devices
        assert_equal(around(parallel)(x, empty), fn(x, empty))


def double(x):
    return 2 * x


WAYS = {
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(np.stack([x, x + 1])),
    "scan": lambda f, x: jax.lax.scan(lambda carry, _: (f(carry), f(carry)), x, None, length=2),
    "grad": lambda f, x: jax.grad(lambda x: (f(x) ** 2).sum())(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (np.ones_like(x),)),
    "eval_shape": lambda f, x: jax.eval_shape(f, x).shape,
}


def of_all_towers(x):
    mine, largest = x.mean(), jax.lax.pmax(x.max(), "towers")
    every = jax.lax.all_gather(x.sum(), "towers")
    after = jax.lax.psum(mine * every[-1], "towers") / jax.lax.axis_size("towers")
    return x + mine + largest + after * jax.lax.axis_index("towers")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(result|loss) ")  # a tower's own mean is meant
def test_towers_that_devices_cannot_share_evenly_inside_a_transformation():
    """Lie: towers that do not exist are in a sum; or devices that differ from those outside."""
    x = np.random.default_rng(0).normal(size=16).astype(np.float32)
    parallel = mt.make_parallel(of_all_towers, devices=3, towers=8)
    outside = parallel(x)
    assert_close(jax.jit(parallel)(x), outside, rtol=1e-6)
    gradient = mt.value_and_grad(
        lambda w, x: ((w - of_all_towers(x)) ** 2).mean(), devices=3, towers=8
    )
    found = gradient(jnp.float32(1), x)
    assert_close(jax.jit(gradient)(jnp.float32(1), x), found, rtol=1e-5)
    assert_close(jax.jit(gradient)(found[1], x), gradient(found[1], x), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "towers"),
    [*((way, None) for way in WAYS), *((way, 6) for way in ("jit", "scan", "jvp", "eval_shape"))],
)
def test_works_inside_other_transformations(way, towers):
    """Lie: it only works when called at the top level."""
    parallel = mt.make_parallel(double, devices=2, towers=towers)
    x = np.arange(7, dtype=np.float32)
    assert_equal(WAYS[way](parallel, x), WAYS[way](double, x))


@pytest.mark.filterwarnings("ignore:result .slice")  # towers are told by their first rows
def test_trap_every_tower_gets_the_same_images():
    """The well-known three-GPU CIFAR-10 tutorial; law L6."""
    seen = mt.make_parallel(lambda x: x - x[:1], devices=4)(jnp.arange(8))
    np.testing.assert_array_equal(seen, [0, 1] * 4)


def noise(key, x):
    return jax.random.uniform(key, x.shape)


def test_trap_an_indivisible_batch_raises_or_is_dropped():
    """keras#21167, keras-extras#7."""
    np.testing.assert_array_equal(
        mt.make_parallel(double, devices=4)(np.arange(9)), 2 * np.arange(9)
    )


@pytest.mark.parametrize("traced", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_law_l6_random_numbers_differ_by_tower_never_by_device(traced):
    """Trap: the same dropout mask on every tower; or masks that change with the devices."""
    x = np.zeros((12, 3), np.float32)
    draws = []
    for num_devices in (1, 2, 4) if traced else (1, 2):
        parallel = mt.make_parallel(noise, devices=num_devices, towers=6)
        parallel = jax.jit(parallel) if traced else parallel
        draws.append(np.asarray(parallel(jax.random.key(1), x)))
    rows = draws[0].reshape(6, -1)
    assert len(np.unique(rows[:, 0])) == 6
    for other in draws[1:]:
        np.testing.assert_allclose(other, draws[0], rtol=1e-6)
        assert traced or other.tobytes() == draws[0].tobytes()
    by_hand = [noise(tower_key(jax.random.key(1), tower), x[:2]) for tower in range(6)]
    np.testing.assert_allclose(draws[0], np.concatenate(by_hand), rtol=1e-6)


def test_a_shared_key_is_the_same_key_everywhere():
    parallel = mt.make_parallel(noise, (None, 0), devices=4)
    rows = np.asarray(parallel(jax.random.key(1), jnp.zeros((8, 3)))).reshape(4, -1)
    assert (rows == rows[0]).all()


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_a_key_per_row_goes_with_its_row(towers):
    keys = jax.random.split(jax.random.key(0), 5)
    draw = jax.vmap(lambda key: jax.random.uniform(key, 2))
    assert_equal(mt.make_parallel(draw, devices=2, towers=towers)(keys), jax.jit(draw)(keys))


def test_keys_may_be_results():
    keys = jax.random.split(jax.random.key(0), 4)
    found = mt.make_parallel(lambda k: k, devices=2)(keys)
    assert_equal(jax.random.key_data(found), jax.random.key_data(keys))


def test_towers_give_the_same_bits_on_every_device_count():
    """Lie: eager results that change in the last bit with the number of devices."""

    def fn(x, w):
        return jnp.tanh(x @ w) / 3, jax.nn.softmax(x @ w)

    rng = np.random.default_rng(0)
    x = rng.normal(size=(13, 40)).astype(np.float32)
    w = rng.normal(size=(40, 30)).astype(np.float32)
    found = {
        mt.fingerprint(mt.make_parallel(fn, (0, None), devices=d, towers=8)(x, w)) for d in (1, 3)
    }
    assert len(found) == 1


def test_results_stay_on_their_devices():
    """Lie: everything is gathered on the first device behind the user's back."""
    for towers in (None, 4):
        y = mt.make_parallel(double, devices=2, towers=towers)(np.arange(8))
        assert [s.data.shape for s in y.addressable_shards] == [(4,)] * 2
        assert y.sharding.device_set == set(mt.devices(2))


@pytest.mark.parametrize("towers", [None, 4])
def test_inputs_may_be_bound_to_another_device(towers):
    """Lie: JAX's own "incompatible devices" error reaches the user."""
    parallel = mt.make_parallel(lambda x, w: x * w, (0, None), devices=2, towers=towers)
    x = jax.device_put(jnp.arange(8.0), mt.devices("cpu:7")[0])
    w = jax.device_put(jnp.float32(3), mt.devices("cpu:5")[0])
    assert_equal(parallel(x, w), 3 * np.arange(8, dtype=np.float32))
    again = parallel(parallel(x, w), w)  # from its own output, split over devices
    assert_equal(again, 9 * np.arange(8, dtype=np.float32))


@pytest.mark.parametrize("towers", [4, 5])
def test_law_l3_of_an_array_that_lies_on_several_devices(towers):
    """Lie: rows that XLA adds up over the devices, which makes 0.0 of -0.0."""
    rows = np.full(24, -0.0, np.float32)
    split = mt.shard(rows, devices=3)
    same = mt.make_parallel(lambda x: x, towers=towers, devices=2)(split)
    assert np.asarray(same).tobytes() == rows.tobytes()


@pytest.mark.slow
def test_law_l3_where_keys_are_made_with_an_offset():
    """Lie: the numbers of before, though every call of JAX itself draws others."""
    draw = jax.vmap(lambda seed: jax.random.uniform(jax.random.key(seed)))
    noise = lambda w, seeds: w * draw(seeds)
    gradient = mt.grad(noise, towers=2, devices=1)
    seeds = np.arange(4)
    before = gradient(1.0, seeds)
    jax.config.update("jax_random_seed_offset", 1)
    try:
        with_offset = gradient(1.0, seeds)
        expected = draw(seeds).mean()
    finally:
        jax.config.update("jax_random_seed_offset", 0)
    assert with_offset == pytest.approx(expected)
    assert gradient(1.0, seeds) == before != with_offset


@pytest.mark.slow
@pytest.mark.parametrize(
    "setting",
    [lambda: jax.threefry_partitionable(False), lambda: jax.enable_x64(True)],
    ids=["threefry_partitionable", "enable_x64"],
)
def test_law_l3_in_a_with_block(setting):
    """Lies: a setting that holds on the first device only, or not after a call without it."""

    def noise(w, x, key):
        return (w * x * jax.random.uniform(key, x.shape)).sum(-1)

    given = np.ones(5), np.random.default_rng(0).normal(size=(12, 5)), jax.random.key(0)
    found = []
    for devices in (1, 2):
        gradients = mt.value_and_grad(noise, towers=8, devices=devices)
        before = mt.fingerprint(gradients(*given))
        with setting():
            inside = gradients(*given)
            step = mt.train_step(
                lambda w, x: (w * x).sum(-1), optax.sgd(0.1), towers=8, devices=devices
            )
            ahead = list(mt.prefetch([given[1]], towers=8, devices=devices))
            trained = step(step.init(given[0]), ahead[0])
        assert mt.fingerprint(inside) != before
        assert mt.fingerprint(gradients(*given)) == before
        found.append(mt.fingerprint((inside, trained)))
    assert found[0] == found[1]


@pytest.mark.slow
def test_in_axes_in_a_list_as_in_vmap():
    x, y = np.arange(14.0).reshape(2, 7), np.arange(21.0).reshape(1, 3, 7)
    add = lambda pair, w: (w @ pair[0] + pair[1].sum((0, 1)), pair[0])
    w, towers = np.array([1.0, 2.0]), {"towers": 3, "devices": 2}
    run = mt.make_parallel(add, in_axes=[[1, -1], None], out_axes=(0, -1), **towers)
    for found, expected in zip(run([x, y], w), add([x, y], w), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_python_number_takes_the_dtype_of_the_rows(devices):
    """Lie: the program of the call before, whose number was a float32."""
    times = mt.make_parallel(lambda x, s: x * s, in_axes=(0, None), towers=8, devices=devices)
    rows = jnp.ones(12, jnp.bfloat16)
    assert times(rows, 0.1).dtype == jnp.bfloat16
    assert times(rows, np.float32(0.1)).dtype == jnp.float32
    assert times(rows, 0.1).dtype == jnp.bfloat16
    weak = mt.shard(jnp.full(12, 0.1), towers=8, devices=2)
    product = mt.make_parallel(lambda x, y: x * y, towers=8, devices=devices)
    assert product(rows, weak).dtype == jnp.bfloat16


@pytest.mark.parametrize("devices", [1, 2])
def test_rows_of_python_numbers_take_the_dtype_of_others_in_the_fast_way(devices):
    """Lie: inside, they are float32, as if they had been made so."""
    product = mt.make_parallel(lambda x, y: x * y, devices=devices)
    assert jax.jit(product)(jnp.ones(12, jnp.bfloat16), jnp.full(12, 0.1)).dtype == jnp.bfloat16


def test_calls_of_the_same_shape_compile_once():
    """Lie: a function that is compiled again at every call."""
    traces = []

    def fn(x):
        traces.append(x.shape)
        return x + 1

    for towers in (None, 4):
        parallel = mt.make_parallel(fn, devices=2, towers=towers)
        parallel(np.zeros(8))
        before = len(traces)
        for _ in range(3):
            parallel(np.ones(8))
        assert len(traces) == before


def test_idle_devices_are_named_and_hold_nothing():
    """Lie: devices that do nothing, without a word."""
    with pytest.warns(mt.MultitowerWarning, match="3 of 8 devices busy and leave 5 idle"):
        y = mt.make_parallel(double, towers=3)(np.arange(6))
    assert y.sharding.device_set == set(mt.devices(3))
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        mt.make_parallel(double, towers=3, devices=3)(np.arange(6))


def test_name_and_docstring_are_those_of_the_function():
    def spoken(x):
        """Says x."""
        return x

    assert mt.make_parallel(spoken).__name__ == "spoken"
    assert mt.make_parallel(spoken).__doc__ == "Says x."


def test_as_many_classes_as_rows():
    """Lie: a number per class is laid side by side like one per row, or averaged unasked."""

    def per_class(x):
        return jax.nn.one_hot(x.astype(int) % 4, 4).sum(0)

    with pytest.raises(
        mt.OutputError, match=r"shape \(4,\) for a tower of 4 rows: axis 0 does not"
    ):
        mt.make_parallel(per_class, devices=2)(np.arange(8.0))
    metrics = lambda params, x: {"by class": per_class(x)}
    with pytest.raises(mt.OutputError, match="does not hold one entry per row"):
        mt.evaluate(metrics, None, np.arange(8.0), global_batch=8, devices=2)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        ([0, 1, 0, 1], "is a list of 4 numbers"),
        ((0.5, 1.0, 2.0, 3.0), "is a tuple of 4 numbers"),
        ([[0.5], [1.0], [2.0], [3.0]], "is a list of 4 lists"),
        ([np.array(label) for label in (0, 1, 0, 1)], "is a list of 4 numbers"),
    ],
    ids=["list", "tuple", "nested", "0-d"],
)
def test_labels_in_a_list(numbers, said):
    """Lie: each number is shared, and the loss broadcasts all labels over a tower's rows."""
    x = np.arange(4.0)
    loss = lambda w, x, y: (w * x - jnp.asarray(y).reshape(-1)[: x.shape[0]]) ** 2
    with pytest.raises(mt.ArgumentError, match=rf"^y {said}.*numpy.asarray"):
        mt.grad(loss, devices=2)(1.0, x, numbers)
    step = mt.train_step(lambda w, batch: loss(w, **batch), optax.sgd(0.1), devices=2)
    state = step.init(jnp.float32(1))
    with pytest.raises(mt.ArgumentError, match=rf"batch\['y'\] {said}"):
        step(state, {"x": x, "y": numbers})
    mt.grad(lambda w, x, c: w * x * c[0], devices=2)(1.0, x, [1.0, 2.0])  # two coefficients
    whole = mt.grad(
        lambda w, x, c: w * x * jnp.asarray(c).reshape(-1)[3], devices=2, in_axes=(None, 0, None)
    )
    whole(1.0, x, numbers)  # as the message says


def test_labels_in_a_list_in_a_batch_with_as_many_parts_as_rows():
    """Lie: the batch is the list, which does not hold numbers alone; or the arguments are it."""
    x, loss = np.arange(2.0), lambda w, batch: (w * batch[0] - batch[1][0]) ** 2
    with pytest.raises(mt.ArgumentError, match=r"^batch\[1\] is a list of 2 numbers"):
        mt.grad(loss, devices=2)(1.0, (x, [0.0, 1.0]))
    scaled = mt.make_parallel(lambda a, b, *, x: a * b * x, devices=2)
    np.testing.assert_array_equal(scaled(2.0, 3.0, x=x), 6 * x)


def test_rows_of_any_rank_of_several_towers_on_a_device_under_jit():
    x = np.arange(24, dtype=np.float32).reshape(4, 2, 3)
    found = jax.jit(mt.make_parallel(lambda x: x + 1, devices=2, towers=4))(x)
    np.testing.assert_array_equal(found, x + 1)


@pytest.mark.parametrize("before", [[{"w": 1.0, "b": 0.0}] * 4, [None] * 4], ids=["trees", "None"])
def test_labels_in_a_list_behind_another_list(before):
    """Lie: a list has as many leaves as entries, and what comes behind it is another leaf."""
    x = np.arange(4.0)
    fn = lambda model, x, y: x + y[0]
    with pytest.raises(mt.ArgumentError, match=r"^y is a list of 4 numbers"):
        mt.make_parallel(fn, in_axes=(None, 0, 0), devices=2)(before, x, [0.0, 1.0, 2.0, 3.0])


@pytest.mark.parametrize("towers", [2, None], ids=["bits", "fast"])
def test_sums_of_groups_are_no_rows(towers):
    """Lie: two of four rows hold two numbers, which are then one for each row."""
    pairs = mt.make_parallel(lambda x: x.reshape(-1, 2).sum(0), devices=2, towers=towers)
    with pytest.raises(mt.OutputError, match="axis 0 does not hold one entry per row"):
        pairs(np.arange(4.0))


def test_what_the_first_tower_says_keeps_its_sign():
    """Lie: adding nothing of the other towers changes nothing; 0.0 is added to -0.0."""
    first = lambda x: (x, -jnp.zeros(()))
    run = mt.make_parallel(first, out_axes=(0, None), devices=2, towers=2)
    _, found = run(np.ones(4, np.float32))
    assert np.signbit(found)


@pytest.mark.slow
@pytest.mark.parametrize("towers", [None, 2])
def test_dataclasses_that_check_their_arrays(towers):
    """Lie: axes or numbers of leaves are put where a user's class expects arrays."""
    rows = jnp.arange(4.0)
    loss = lambda w, batch: (w.x * batch.x + w.y) ** 2
    pairs = Pair(jnp.float32(1), jnp.float32(0)), Pair(rows, rows)
    _, gradient = mt.value_and_grad(loss, devices=2, towers=towers)(*pairs)
    assert float(gradient.x) == 2 * (rows**2).mean()
    double = mt.make_parallel(lambda batch: Pair(2 * batch.x, batch.y), devices=2, towers=towers)
    np.testing.assert_array_equal(double(pairs[1]).x, 2 * rows)
    assert mt.check_parallel(loss, *pairs)


def test_a_number_that_adapts_to_others_has_a_program_of_its_own():
    """Lie: the dtype of the result is that of the call before."""
    scaled = mt.make_parallel(lambda x, scale: x * scale, in_axes=(0, None), devices=1, towers=2)
    x = jnp.ones(4, jnp.bfloat16)
    for scale in (1.5, jnp.float32(1.5), 1.5):
        assert scaled(x, scale).dtype == (x * scale).dtype


def test_calls_with_other_names_have_programs_of_their_own():
    """Lie: the rows by the names that came first."""

    def scaled(batch):
        ((name, x),) = batch.items()
        return x * (2 if name == "twice" else 1)

    run, x = mt.make_parallel(scaled, devices=1, towers=2), np.ones(4, np.float32)
    assert [run({name: x}).sum() for name in ("once", "twice", "once")] == [4, 8, 4]

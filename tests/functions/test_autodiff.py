"""value_and_grad and grad: law L2 against JAX on one device and against NumPy."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import multitower as mt
from two_layers import assert_close, batch_of, losses, numpy_value_and_grad, params_of

few = settings(max_examples=7)


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


@pytest.mark.parametrize(
    ("num_devices", "towers"),
    [
        (8, None),
        (2, 8),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, None), (2, None), (1, 8))),
    ],
)
def test_trap_gradients_n_times_too_big(num_devices, towers):
    """Inside shard_map JAX has summed gradients already; on 8 devices 60.0 came for 7.5."""
    x = np.arange(16, dtype=np.float32)
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


EVERY_DAY = [("jit of scan", None), ("jit of grad", 6)]  # elsewhere "jit", and "vmap" in loops


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
        options = dict(in_axes=in_axes, devices=1 if towers else 2, towers=towers)
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


def test_law_l6_every_tower_draws_its_own_numbers():
    def loss(w, key, x):
        noise = jax.random.uniform(key, x.shape)
        return w * x, noise

    def noise_on(num_devices):
        run = mt.value_and_grad(loss, has_aux=True, devices=num_devices, towers=4)
        return np.asarray(run(1.0, jax.random.key(0), np.zeros(8, np.float32))[0][1])

    first = noise_on(1)
    assert len(np.unique(first)) == 8
    assert noise_on(2).tobytes() == first.tobytes()


def test_eager_towers_have_the_same_bits_on_every_device_count():
    params, batch = params_of(), batch_of(13)
    found = {
        mt.fingerprint(mt.value_and_grad(losses, devices=d, towers=8)(params, batch))
        for d in (1, 3)
    }
    assert len(found) == 1


@pytest.mark.slow
def test_16_bit_parameters_get_16_bit_gradients():
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), params_of())
    for options in ({"devices": 2}, {"devices": 1, "towers": 4}):
        value, grads = mt.value_and_grad(losses, **options)(params, batch_of(8))
        assert {g.dtype for g in jax.tree.leaves(grads)} == {jnp.dtype("bfloat16")}
        assert value.dtype == jax.eval_shape(mean_of(losses), params, batch_of(8)).dtype


@pytest.mark.slow
def test_complex_parameters():
    def loss(w, x):
        return jnp.abs(w * x - 1j) ** 2

    w, x = np.array([1 + 2j], np.complex64), np.arange(6, dtype=np.float32)
    expected = jax.jit(jax.value_and_grad(mean_of(loss)))(w, x)
    for devices, towers in ((3, None), (1, 3)):
        assert_close(mt.value_and_grad(loss, devices=devices, towers=towers)(w, x), expected)


def test_a_complex_parameter_that_the_loss_does_not_use():
    """Lie: XLA ends the process on the sum of its zeros beside another sum."""
    params = {"w": np.ones(3, np.float32), "unused": np.ones(3, np.complex64)}
    loss = lambda params, x: (x @ params["w"]) ** 2
    x = np.ones((8, 3), np.float32)
    expected = jax.jit(jax.value_and_grad(mean_of(loss)))(params, x)
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

"""average_gradients: the mean over towers, on the first device, and what has none is named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt


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
    """Lie: 256 + 1 is 256, as in bfloat16."""
    towers = [np.full(1, number, jnp.bfloat16) for number in (256, 1, -256, 1)]
    mean = mt.average_gradients(towers)
    assert mean.dtype == jnp.bfloat16
    assert mean.tolist() == [0.5]


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

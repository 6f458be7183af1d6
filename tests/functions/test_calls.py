"""One call after another: programs are compiled and weights are copied once."""

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import multitower as mt
from multitower.hardware.compilations import counted_compilations
from multitower.towers import global_arrays


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


def test_a_function_that_nothing_can_be_remembered_by():
    class Loss:
        __hash__ = None

        def __call__(self, w, x):
            return w * x

    assert mt.grad(Loss(), devices=2)(1.0, np.arange(8, dtype=np.float32)) == 3.5


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_trap_a_transformation_around_it_compiles_at_every_call(towers):
    """A product with the Hessian took seconds, each time."""
    traced = []

    def losses(w, x):
        traced.append(1)
        return jnp.tanh(w * x)

    gradient = mt.grad(losses, devices=1 if towers else 2, towers=towers)
    x = np.arange(8, dtype=np.float32)
    product = lambda: jax.jvp(lambda w: gradient(w, x), (1.0,), (1.0,))[1]
    first, known = product(), len(traced)
    assert (product(), len(traced)) == (first, known)
    by_jax = jax.jit(jax.grad(jax.grad(lambda w: jnp.tanh(w * x).mean())))(1.0)
    np.testing.assert_allclose(first, by_jax, rtol=1e-4)


@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_weights_on_one_device_are_copied_once(towers):
    """The lie: a frozen model costs a copy to every device at every call."""
    losses = lambda w, frozen, x: (x @ (w + frozen)) ** 2
    gradient = mt.grad(losses, in_axes=(None, None, 0), devices=2, towers=towers)
    w, frozen = jnp.ones(3), jnp.arange(3.0)
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
    first, rows = gradient(w, frozen, x), mt.shard(x, devices=2, towers=towers)
    with jax.transfer_guard_device_to_device("disallow_explicit"):
        np.testing.assert_array_equal(gradient(w, frozen, rows), first)
    changed = gradient(w, frozen + 1, x)
    by_jax = jax.jit(jax.grad(lambda w: losses(w, frozen + 1, x).mean()))(w)
    np.testing.assert_allclose(changed, by_jax, rtol=1e-5)


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_weights_that_are_there_twice_are_copied_to_their_own_places(towers):
    """The lie: the copy of one array is taken for that of the next."""
    losses = lambda params, x: (x @ params[0]) + (x @ params[1]) * (x @ params[2])
    x = np.random.default_rng(0).integers(-3, 4, size=(8, 3)).astype(np.float32)  # exact means
    twice, other, one_more = (jnp.asarray(np.float32(w)) for w in ([0, 1, 2], [7] * 3, [1, 2, 3]))
    gradient = mt.value_and_grad(losses, devices=2, towers=towers)
    for params in ([twice, twice, other], [other, twice, one_more]):
        first, second, third = (x @ np.asarray(w) for w in params)
        found, gradients = gradient(params, x)
        assert found == (first + second * third).mean()
        wanted = [x.mean(0), third @ x / 8, second @ x / 8]
        for one, by_hand in zip(gradients, wanted, strict=True):
            np.testing.assert_array_equal(one, by_hand)


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

    everywhere = NamedSharding(Mesh(mt.devices(2), "towers"), PartitionSpec())
    assert compilations(jnp.ones(3), devices=2) == 2
    assert compilations(jax.device_put(jnp.ones(3), everywhere), devices=2) == 1


@pytest.mark.parametrize("towers", [None, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("where", ["not said", "device", "mesh"])
def test_a_step_of_ones_own_compiles_once_on_one_device(where, towers):
    """Lie: its results are on a mesh of one device, and the next step compiles anew."""
    (device,) = mt.devices(1)
    there = NamedSharding(Mesh([device], "towers"), PartitionSpec()) if where == "mesh" else device
    w = jnp.ones(3) if where == "not said" else jax.device_put(jnp.ones(3), there)
    assert compilations(w, devices=1, towers=towers) == 1


@pytest.mark.parametrize("num_rows", [6, 7])
@pytest.mark.parametrize("towers", [None, 3])
def test_a_step_of_ones_own_on_one_device_that_is_not_jax_own(towers, num_rows):
    """Lie: in `jax.jit` the device that was asked for is forgotten, if it is one alone."""
    there = mt.devices(2)[1]
    rows = np.random.default_rng(0).normal(size=(num_rows, 3)).astype(np.float32)
    losses = lambda w, x: (x @ w) ** 2
    wanted = jax.grad(lambda w: losses(w, rows).mean())(jnp.ones(3))
    for device in (there, mt.devices(1)[0]):
        train = jax.jit(mt.grad(losses, devices=device, towers=towers))
        with mt.device("cpu:0" if device is there else "cpu:1"):
            found = train(np.ones(3), rows)
        assert found.devices() == {device}
        np.testing.assert_allclose(found, wanted, rtol=1e-5)


def compilations(w, **placed):
    """How often three steps of a user's own compile."""
    gradient = mt.grad(lambda w, x: (x @ w) ** 2, **placed)
    train = jax.jit(lambda w, x: w - 0.1 * gradient(w, x))
    with counted_compilations() as compiled:
        for _ in range(3):
            w = train(w, np.ones((8, 3), np.float32))
    return len(compiled)


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


def test_a_ragged_batch_after_a_full_one_is_refused_as_the_first_one_is():
    """Lie: a mean of means, as the program for the batch before does not look at rows."""
    run = mt.value_and_grad(lambda w, x: (w * x).mean(), devices=1, towers=2)
    x = np.arange(4, dtype=np.float32)
    assert run(np.float32(1), x)[0] == x.mean()
    with pytest.raises(mt.OutputError, match="scalar loss"):
        run(np.float32(1), x[:3])

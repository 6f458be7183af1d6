"""Plain pytrees: NamedTuples and dataclasses as parameters, batches and state; nothing imported."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from processes import run_python

X = np.random.default_rng(0).normal(size=(2, 12, 4)).astype(np.float32)


class Layer(NamedTuple):
    w: Any
    b: Any


@jax.tree_util.register_dataclass
@dataclass
class Params:
    layers: list[Layer]
    scale: Any


class Batch(NamedTuple):
    x: Any
    y: Any


def params():
    rng = np.random.default_rng(1)
    layer = lambda n, m: Layer(rng.normal(size=(n, m)).astype(np.float32), np.zeros(m, np.float32))
    return Params([layer(4, 3), layer(3, 1)], jnp.float32(2.0))


def losses(params, batch):
    h = batch.x
    for layer in params.layers:
        h = jnp.tanh(h @ layer.w + layer.b)
    return (params.scale * h[:, 0] - batch.y) ** 2


def with_noise(params, batch, *, rng, model_state):
    keep = jax.random.bernoulli(rng, 0.5, batch.x.shape)
    new = Layer(model_state.w * 0.5 + batch.x.mean(0) / 2, model_state.b + 1)
    return losses(params, batch._replace(x=batch.x * keep)), {}, new


def batches():
    return [Batch(x, x.sum(-1)) for x in X]


class Converting:
    """As no pytree should be made: it takes nothing but what becomes an array."""

    def __init__(self, w):
        self.w = jnp.asarray(w)


jax.tree_util.register_pytree_node(
    Converting, lambda one: ((one.w,), None), lambda _, leaves: Converting(*leaves)
)


def test_a_class_that_converts_its_leaves_is_explained():
    # The lie: "float() argument must be a real number", and nobody knows which.
    losses = lambda layer, x: (x @ layer.w) ** 2
    x, layer = np.ones((4, 3), np.float32), Converting(np.ones(3))
    step = mt.train_step(losses, optax.sgd(0.1), devices=2)
    for run in (mt.value_and_grad(losses, devices=2), lambda layer, x: step(step.init(layer), x)):
        with pytest.raises(TypeError) as told:
            run(layer, x)
        assert any("registered as a pytree" in note for note in told.value.__notes__)


def test_law_l2_gradients_have_the_type_of_the_parameters():
    found = mt.value_and_grad(losses, devices=3)(params(), batches()[0])
    whole = jax.jit(jax.value_and_grad(lambda p, b: losses(p, b).mean()))
    expected = whole(params(), batches()[0])
    assert isinstance(found[1], Params)
    assert isinstance(found[1].layers[0], Layer)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_law_l3_train_step_on_named_tuples_and_dataclasses():
    """A NamedTuple as model state: its counter counts steps, its floats are averaged."""
    prints = []
    for devices in (1, 3):
        step = mt.train_step(with_noise, optax.adam(0.1), devices=devices, towers=3)
        first = Layer(jnp.zeros(4), jnp.int32(0))
        state = step.init(params(), model_state=first, rng=jax.random.key(0))
        for batch in batches():
            state, metrics = step(state, batch)
        prints.append(mt.fingerprint((state, metrics)))
    assert prints[0] == prints[1]
    assert isinstance(state.params.layers[1], Layer)
    np.testing.assert_allclose(
        state.model_state.w, X[0].mean(0) / 4 + X[1].mean(0) / 2, rtol=1e-5, atol=1e-7
    )
    assert state.model_state.b == 2


@pytest.mark.parametrize(
    "make_key", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow)]
)
def test_law_l6_keys_in_the_model_state(make_key):
    """Lie: a key that lives in the state draws the same numbers in every tower, or splits them."""

    def loss(w, x, *, model_state):
        key, own = jax.random.split(model_state)
        return w * x * jax.random.uniform(own), {}, key

    step = mt.train_step(loss, optax.sgd(0.0), devices=4, diagnostics=True)
    state = step.init(1.0, model_state=make_key(0))
    state, metrics = step(state, np.ones(8, np.float32))
    assert len(set(metrics["tower_losses"].tolist())) == 4
    expected = jax.random.split(make_key(0))[0]  # what one device hands on
    assert mt.fingerprint(state.model_state) == mt.fingerprint(expected)


def test_state_that_comes_back_as_aux():
    """Lie: a counter is an error or a sum; a state as long as a tower's rows is taken for rows."""

    def loss(w, state, x):
        new = {"count": state["count"] + 1, "mean": state["mean"] + x.mean()}
        return (w * x).mean(), (new, x)

    state = {"count": jnp.int32(5), "mean": jnp.zeros(4)}
    run = mt.value_and_grad(loss, has_aux=True, in_axes=(None, None, 0), devices=2)
    (_, (new, rows)), _ = run(1.0, state, np.arange(8.0, dtype=np.float32))
    assert new["count"] == 6
    np.testing.assert_allclose(new["mean"], np.full(4, 3.5))
    assert rows.shape == (8,)
    # Closed over it is no state that is handed on, and comes to the same.
    closed = mt.value_and_grad(lambda w, x: loss(w, state, x), has_aux=True, devices=2)
    (_, (again, _)), _ = closed(1.0, np.arange(8.0, dtype=np.float32))
    assert again["count"] == 6
    np.testing.assert_allclose(again["mean"], new["mean"])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:state.'seen'.")  # a maximum over a tower's rows, to tell towers
@pytest.mark.parametrize("towers", [None, 4])
def test_state_of_a_ragged_batch(towers):
    """Lie: a tower with one row counts as much as a full one, or an empty one counts."""

    def losses(w, state, x):
        return w * x, {"seen": x.max() * 1.0}

    run = mt.value_and_grad(losses, has_aux=True, in_axes=(None, None, 0), devices=4, towers=towers)
    x = np.array([1, 1, 1, 1, 5], np.float32)  # towers of 2, 2, 1 and 0 rows
    with pytest.warns(mt.MultitowerWarning, match=r"copies .* count in state\['seen'\]"):
        (_, state), _ = run(1.0, {"seen": jnp.float32(0)}, x)
    np.testing.assert_allclose(state["seen"], (1 * 2 + 1 * 2 + 5 * 1) / 5, rtol=1e-6)


@pytest.mark.parametrize("towers", [pytest.param(None, marks=pytest.mark.slow), 4])
def test_state_of_rows_with_another_number_of_features(towers):
    """Lie: a state that is weighted by something else than the rows of a tower."""

    def losses(w, state, x):
        decayed = {"mean": 0.9 * state["mean"] + 0.1 * x.mean(0), "scale": state["scale"] / 2}
        return x @ w, decayed

    run = mt.value_and_grad(losses, has_aux=True, in_axes=(None, None, 0), devices=2, towers=towers)
    first = {"mean": jnp.zeros(3), "scale": jnp.float32(1)}
    (_, state), _ = run(jnp.ones(3), first, X[0, :8, :3])
    np.testing.assert_allclose(state["mean"], 0.1 * X[0, :8, :3].mean(0), rtol=1e-5)
    assert state["scale"] == 0.5


NOTHING = """
import sys
import multitower as mt
mt.configure(simulated_devices=2)
import jax.numpy as jnp, numpy as np, optax
x = np.ones(4, np.float32)
mt.grad(lambda w, x: w * x)(1.0, x)
step = mt.train_step(lambda w, x: w * x, optax.sgd(0.1))
step(step.init(jnp.float32(1.0)), x)
loaded = {"flax", "equinox", "haiku", "keras"} & set(sys.modules)
assert not loaded, loaded
"""


@pytest.mark.slow
def test_no_framework_is_imported():
    """Lie: who has JAX alone pays for the others, or cannot import it at all."""
    run_python("-c", NOTHING)


def test_two_arrays_of_a_named_tuple_are_taken_out_of_it_together():
    """Lie: the same advice, once for each of them."""
    batch = Params([Layer(np.ones(8), np.ones(8)), Layer(np.ones(3), np.ones(5))], np.ones(8))
    with pytest.raises(mt.BatchError) as told:
        mt.value_and_grad(lambda w, batch: w * batch.layers[0].w, devices=2)(1.0, batch)
    assert str(told.value).count("take it out of batch and close over it") == 1

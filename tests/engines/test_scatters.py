"""Scatters whose indices XLA can sort: the same numbers, and no index that it would loop over."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import multitower as mt
from multitower.engines import executable, scatters

X = np.random.default_rng(0).normal(size=(6, 9)).astype(np.float32)
WEIGHTS = np.linspace(1, 2, 9, dtype=np.float32)
TOKENS = np.array([0, 5, 3, 3, 1], np.uint16)


def in_order(x):
    return (jnp.sort(x, -1) * WEIGHTS).sum()


@jax.custom_vjp
def ruled(x):
    return in_order(x)


def ruled_back(x, gradient):
    # A loop, in whose program the scatter is.
    return (lax.fori_loop(0, 2, lambda _, total: total + jax.grad(in_order)(x), x) * gradient,)


ruled.defvjp(lambda x: (in_order(x), x), ruled_back)

LOSSES = {
    "sort": in_order,
    "median": lambda x: jnp.median(x, -1).sum(),
    "take": lambda x: (jnp.take(x, TOKENS, 0) ** 2).sum(),
    "jit": jax.jit(in_order),
    "checkpoint": jax.checkpoint(in_order),
    "scan": lambda x: lax.scan(lambda total, row: (total + in_order(row), row[0]), 0.0, x)[0],
    "branch": lambda x: lax.cond(x[0, 0] > 0, in_order, lambda x: x.sum(), x),
    "rule": ruled,
    "vmap": lambda x: jax.vmap(in_order)(x).sum(),
}


# Much as the others.
TOO = ("median", "jit", "vmap")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in TOO else []) for name in LOSSES]
)
def test_gradients_are_the_same_without_a_loop_over_indices(name):
    """Lie: a scatter inside of something, out of sight, that takes a thousand times as long."""
    gradient = jax.jit(jax.grad(LOSSES[name]))
    found = jax.jit(scatters.sorting(gradient.trace(X)))
    assert scatters.sorting(found.trace(X)) is None
    np.testing.assert_array_equal(found(X), gradient(X))


@pytest.mark.parametrize(
    ("mode", "kind"),
    [
        ("clip", np.uint8),
        ("fill", np.int16),
        ("fill", np.uint32),
        pytest.param("fill", np.uint8, marks=pytest.mark.slow),
        pytest.param("clip", np.int16, marks=pytest.mark.slow),
        pytest.param("clip", np.uint32, marks=pytest.mark.slow),
    ],
)
def test_places_behind_the_end_stay_there(kind, mode):
    """Lie: the largest of uint32 is -1 in int32, and rows at the beginning get what is dropped."""
    most = np.iinfo(kind).max
    places = jnp.asarray(np.array([0, 3, 3, most, most // 2 + 1], kind))[:, None]
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    rows = jnp.ones((5, 9)).cumsum(0)
    for scatter in (lax.scatter_add, lax.scatter_mul, lax.scatter):
        fn = jax.jit(lambda x, scatter=scatter: scatter(x, places, rows, numbers, mode=mode))
        found = scatters.sorting(fn.trace(X))
        np.testing.assert_array_equal(found(X), fn(X))


def test_a_program_without_such_a_scatter_stays_as_it_is():
    """Lie: every program interpreted once more, for nothing."""
    loss = lambda x: (x[jnp.array([1, 1, 2])] ** 2).sum() + jnp.cumsum(x).max()
    traced = jax.jit(jax.grad(loss)).trace(X)
    assert any(one.primitive.name.startswith("scatter") for one in traced.jaxpr.eqns)
    assert scatters.sorting(traced) is None


def test_a_program_that_writes_into_a_reference_stays_as_it_is():
    """Lie: a copy of the reference is written into, as of the kernels of Pallas."""

    def fn(x):
        total = jax.new_ref(jnp.zeros(9))

        def add(number, _):
            total[...] += jax.grad(in_order)(x[number])
            return 0

        lax.fori_loop(0, 6, add, 0)
        return total[...]

    assert scatters.sorting(jax.jit(fn).trace(X)) is None


def test_steps_for_gpus_have_none(monkeypatch):
    """Lie: a rewriting that nothing uses, or that loses a constant, a row or a tower."""
    table = jnp.asarray(np.random.default_rng(1).normal(size=(9, 40_000)).astype(np.float32))

    def losses(w, x):
        return (jnp.sort(x * w, -1) * WEIGHTS).sum(-1) + (x @ table).mean(-1)  # table is held

    def trained():
        step = mt.train_step(losses, optax.sgd(0.1), devices=1, towers=3)
        state, metrics = step(step.init(WEIGHTS), X)
        return mt.fingerprint((state, metrics))

    plain, made = trained(), []
    rewritten = scatters.sorting

    def spy(traced):
        made.append(rewritten(traced))
        return made[-1]

    monkeypatch.setattr(executable, "_options", lambda platform: {})  # as for GPUs: not None
    monkeypatch.setattr(scatters, "sorting", spy)
    assert trained() == plain
    # The tower's program is rewritten, and what was made of it has nothing left to change.
    assert [one is None for one in made[:2]] == [False, True]

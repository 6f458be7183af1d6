"""steps_per_call: a loop of fast steps in one program is as many calls."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.steps.looped import stack_ahead

DRAW = np.random.default_rng(0)
PARAMS = {"w": DRAW.normal(size=(3, 4)).astype(np.float32), "v": np.ones(4, np.float32)}
ROWS = [8, 8, 8, 5, 8, 8, 3]
BATCHES = [
    {
        "x": DRAW.normal(size=(n, 3)).astype(np.float32),
        "y": DRAW.normal(size=n).astype(np.float32),
        "scale": np.float32(1 + number / 10),
    }
    for number, n in enumerate(ROWS)
]


def loss(params, batch, *, rng, model_state):
    hidden = jnp.tanh(batch["x"] @ params["w"])
    hidden *= jax.random.bernoulli(rng, 0.8, hidden.shape)
    found = batch["scale"] * (hidden @ params["v"] - batch["y"]) ** 2
    return found, {"sizes": {"y": jnp.abs(batch["y"])}}, model_state + 1


def make(**options):
    return mt.train_step(
        loss, optax.sgd(optax.linear_schedule(0.1, 0.0, 9), momentum=0.9), devices=2,
        ema_decay=0.9, clip_norm=1.0, **options,
    )  # fmt: skip


def start(step):
    return step.init(PARAMS, rng=jax.random.key(0), model_state=jnp.float32(0))


@pytest.fixture(scope="module")
def looped():
    return make(steps_per_call=4)


def one_by_one(batches):
    step = make()
    state, found = start(step), []
    for batch in batches:
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return state, jax.tree.map(lambda *values: np.stack(values), *found)


def assert_close(found, wanted):
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert a.shape == b.shape
        if not jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


def test_it_is_as_many_calls(looped):
    # The lies: one key for all steps, a schedule that counts calls, a short call that goes on with
    # the batch that fills it up, a mean over full rows, metrics of the last step alone.
    state = start(looped)
    state, first = looped(state, BATCHES[:4])
    state, second = looped(state, BATCHES[4:])
    assert first["loss"].shape == (4,)
    assert second["loss"].shape == (3,)
    wanted, metrics = one_by_one(BATCHES)
    assert_close(state, wanted)
    joined = jax.tree.map(lambda a, b: np.concatenate([a, b]), first, second)
    assert_close(joined, metrics)
    (runner,) = looped._makers.newest.runners.values()
    assert runner._run._jitted._cache_size() == 1  # the short call is the same program


@pytest.mark.slow
def test_stacked_and_prefetched(looped):
    whole = [BATCHES[number] for number in (0, 1, 2)]
    wanted, _ = looped(start(looped), whole)
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *whole)
    ahead = list(mt.prefetch(whole, devices=2))
    for given in (stacked, jax.tree.map(jnp.asarray, stacked), ahead):
        assert_close(looped(start(looped), given)[0], wanted)


def test_stacked_batches_that_do_not_fill_the_towers(looped):
    # The lie: rows that fill up count.
    state, _ = looped(start(looped), BATCHES[:2])
    short = [{**one, "x": one["x"][:5], "y": one["y"][:5]} for one in BATCHES[1:3]]
    wanted, metrics = looped(looped(start(looped), BATCHES[:2])[0], short)
    found, also = looped(state, jax.tree.map(lambda *leaves: np.stack(leaves), *short))
    assert_close(found, wanted)
    assert_close(also, metrics)


@pytest.mark.slow
def test_python_numbers_adapt_to_the_dtypes_around_them():
    """Lie: 0.3 as float32 makes a product with bfloat16 float32, and the loss another one."""
    x, w = BATCHES[0]["x"], jnp.asarray(PARAMS["w"], jnp.bfloat16)
    batches = [{"x": x, "rate": 0.3}, {"x": x, "rate": 0.7}]
    dtypes = set()

    def scaled(w, batch):
        found = batch["rate"] * (batch["x"].astype(w.dtype) @ w).sum(1)
        dtypes.add(found.dtype.name)
        return found

    step = mt.train_step(scaled, optax.sgd(0.1), devices=2)
    state, wanted = step.init(w), []
    for batch in batches:
        state, metrics = step(state, batch)
        wanted.append(metrics["loss"])
    looped = mt.train_step(scaled, optax.sgd(0.1), devices=2, steps_per_call=2)
    ahead = list(mt.prefetch(batches, devices=2))
    for given in (batches, ahead, stack_ahead(batches, 2, looped.placement)):
        _, metrics = looped(looped.init(w), given)
        np.testing.assert_array_equal(metrics["loss"], wanted)
    assert dtypes == {"bfloat16"}


def test_batches_of_other_dtypes_are_not_stacked(looped):
    # The lie: NumPy makes floats of images, and the loss does not divide them by 255.
    given = [{"x": np.ones((4, 2), dtype)} for dtype in (np.uint8, np.float32)]
    assert stack_ahead(given, 2, looped.placement) is given


def test_what_is_refused(looped):
    state = start(looped)
    for batches, said in (
        ([], "got 0 batches, and steps_per_call=4"),
        (BATCHES[:5], "got 5 batches"),
        ([BATCHES[0], {"x": BATCHES[1]["x"], "y": BATCHES[1]["y"]}], "batch 1 .* another tree"),
        (BATCHES[0], "a first axis for the steps"),
        ([{**BATCHES[0], "x": np.ones((9, 3))}], "all split arrays need the same"),
    ):
        with pytest.raises(mt.BatchError, match=said):
            looped(state, batches)
    for options in ({"towers": 2}, {"shard_update": True}, {"towers": 2, "stages": 2}):
        with pytest.raises(mt.ArgumentError, match="steps_per_call= and"):
            make(steps_per_call=2, **options)
    for number in (0, 2.0, True):
        with pytest.raises(mt.ArgumentError, match="whole number"):
            make(steps_per_call=number)


def test_a_mean_of_the_loss_needs_full_rows():
    step = mt.train_step(
        lambda w, x: ((x @ w) ** 2).mean(), optax.sgd(0.1), devices=2, steps_per_call=2
    )
    x = BATCHES[0]["x"]
    state, metrics = step(step.init(PARAMS["w"][:, 0]), [x, x])
    assert metrics["loss"].shape == (2,)
    with pytest.raises(mt.BatchError, match="rows"):
        step(state, [x, x[:4]])

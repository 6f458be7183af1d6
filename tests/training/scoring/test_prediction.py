"""predict: the outputs for every row, in order, each once, with one program and little memory."""

import functools

import jax
import numpy as np
import optax
import pytest

import multitower as mt

X = np.random.default_rng(0).normal(size=(29, 3)).astype(np.float32)
W = np.eye(3, 2, dtype=np.float32)


def outputs(params, x):
    # Selecting columns is exact, whatever the compiler makes of it.
    return {"first": x @ params, "second": (x[:, 0] > 0, x)}


@pytest.mark.parametrize(
    ("global_batch", "towers"),
    [
        (1, 4),
        (8, None),
        (29, 4),
        (100, None),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((1, None), (8, 4))),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in ((29, None), (100, 4))),
    ],
)
def test_it_equals_the_function_of_all_rows(global_batch, towers):
    # The lie: rows of the filling, rows left out at the end, or chunks in another order.
    where = {"devices": 3, "towers": towers}
    found = mt.predict(outputs, W, X, global_batch=global_batch, **where)
    np.testing.assert_array_equal(found["first"], X[:, :2])
    np.testing.assert_array_equal(found["second"][0], X[:, 0] > 0)
    np.testing.assert_array_equal(found["second"][1], X)
    assert all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(found))


def test_the_towers_are_those_that_were_asked_for():
    # The lie: one tower for each device, and so other bits on another number of devices.
    count = lambda w, x: jax.lax.psum(x * 0 + 1, "towers")
    found = mt.predict(count, None, X[:24], global_batch=8, devices=2, towers=4)
    np.testing.assert_array_equal(found, np.full((24, 3), 4))


def test_a_model_in_stages_with_weights_that_change_between_calls():
    # The lie: the copies of the call before.
    fn = lambda w, x, *, model_state: mt.cut(x @ w) * model_state["scale"]
    w, scale = W.copy(), np.array([2, 4], np.float32)
    for factor in (1, 4):
        found = mt.predict(
            fn, w, X, global_batch=8, devices=2, towers=4, stages=2, model_state={"scale": scale}
        )
        np.testing.assert_array_equal(found, X[:, :2] * [2, 4] * factor)
        w *= 2
        scale *= 2


def test_an_iterator_of_batches_and_progress():
    done = []
    sizes = [8, 3, 10, 8]
    batches = (X[end - size : end] for size, end in zip(sizes, np.cumsum(sizes), strict=True))
    found = mt.predict(outputs, W, batches, global_batch=64, devices=2, progress=done.append)
    np.testing.assert_array_equal(found["first"], X[:, :2])
    assert done == [8, 11, 19, 21, 29]
    with pytest.raises(mt.BatchError, match="the iterator of batches is empty"):
        mt.predict(outputs, W, iter([]), global_batch=4)


@pytest.mark.slow
def test_batches_of_integers_and_floats_give_floats_of_jax():
    # The lie: one batch of integers among floats, and NumPy makes float64 of all.
    batches = [np.arange(4, dtype=np.int32), np.float32([0.5, 1.5])]
    found = mt.predict(lambda w, x: w * x, 2, iter(batches), global_batch=4)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, [0, 2, 4, 6, 1, 3])


def test_batches_of_several_kinds_of_integers_keep_their_values():
    # The lie: 4000000000 becomes -294967296.
    batches = [np.array([4_000_000_000], np.uint32), np.array([-1], np.int32)]
    found = mt.predict(lambda w, x: x, 0, iter(batches), global_batch=1)
    assert found.tolist() == [4_000_000_000, -1]


@pytest.mark.parametrize(
    "key",
    [jax.random.key(0), pytest.param(jax.random.PRNGKey(0), marks=pytest.mark.slow)],
    ids=["typed", "legacy"],
)
def test_law_l6_every_chunk_draws_its_own_random_numbers(key):
    """Lie: a Monte Carlo score of all rows, from the random numbers of one chunk."""
    rows = np.zeros((24, 2), np.float32)
    draw = lambda params, batch: jax.random.uniform(batch["key"], batch["x"].shape[:1])
    drawn = [
        mt.predict(draw, 0.0, {"x": rows, "key": key}, global_batch=8, towers=4, devices=devices)
        for devices in (1, 2)
    ]
    np.testing.assert_array_equal(*drawn)
    assert len(set(drawn[0].tolist())) == 24
    batches = iter([{"x": rows[:8], "key": key}] * 3)
    with jax.transfer_guard("disallow"):
        again = mt.predict(draw, np.float32(0), batches, global_batch=8, towers=4, devices=1)
    np.testing.assert_array_equal(again, drawn[0])


def test_all_chunks_share_one_program():
    # The lie: seconds of compilation for the last chunk of a run of minutes.
    traced = []

    def square(_, x):
        traced.append(x.shape)
        return x * x

    mt.predict(square, 0.0, X, global_batch=8, devices=2)
    # A tower's rows, one more to tell rows from classes, and 211 for the first look.
    assert {shape[0] for shape in traced} == {4, 5, 211}
    count = len(traced)
    mt.predict(square, 0.0, X[:20], global_batch=8, devices=2)
    assert len(traced) == count


@pytest.mark.slow
def test_a_trainer_predicts_with_what_it_scores():
    trainer = mt.Trainer(lambda w, x: (w * x) ** 2, optax.sgd(0.5), devices=2, ema_decay=0.5)
    rows = X[:4, 0]
    state = trainer.fit(np.float32(3), lambda first: iter([rows] * 9), steps=2)
    found = trainer.predict(lambda w, x: w + 0 * x, state, X[:, 0], global_batch=8)
    np.testing.assert_array_equal(found, np.full(29, state.ema_params))
    assert float(state.ema_params) != float(state.params)


def test_dropout_is_off_and_the_module_keeps_its_mode():
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    found = mt.predict(lambda model, x: model(x), model, X, global_batch=16, devices=2)
    np.testing.assert_array_equal(found, X)
    assert not model.deterministic


@pytest.mark.slow
@pytest.mark.parametrize("run", [mt.predict, mt.evaluate])
def test_a_closed_over_module_in_training_mode_is_told(run):
    """Lie: predictions with dropout, since only modules in `params` get evaluation mode."""
    nnx = pytest.importorskip("flax.nnx")
    model = nnx.Dropout(0.5, rngs=nnx.Rngs(0))
    closed = lambda _, x: {"x": model(x)}
    partial = functools.partial(lambda model, _, x: {"x": model(x)}, model)
    for fn in (closed, partial):
        with pytest.warns(mt.MultitowerWarning, match=r"the module Dropout in training mode: .*"):
            run(fn, None, X[:4], global_batch=4, devices=1)
    model.eval()
    found = run(closed, None, X[:4], global_batch=4, devices=1)["x"]  # without a warning
    np.testing.assert_allclose(found, X[:4] if run is mt.predict else X[:4].mean(0), rtol=1e-6)


def test_what_is_no_output_per_row_is_refused():
    with pytest.raises(mt.OutputError, match=r"hold one entry per row, .* combine it outside\.\n"):
        mt.predict(lambda w, x: x.sum(), 0.0, X, global_batch=8, devices=2)
    meets = lambda w, x: x - jax.lax.pmean(x.mean(0), "towers")
    with pytest.raises(mt.OutputError, match="the last batch is filled up"):
        mt.predict(meets, 0.0, X, global_batch=8, devices=2)
    keys = lambda w, x: {"key": jax.random.split(jax.random.key(0), len(x))}
    with pytest.raises(mt.OutputError, match=r"\['key'\] has typed PRNG keys, .*key_data"):
        mt.predict(keys, 0.0, X, global_batch=8, devices=2)


@pytest.mark.slow
def test_outputs_that_differ_between_batches_are_refused():
    # The lie: the rows of "a" under the name "b", because a later batch has that name.
    batches = lambda *some: iter(some)
    with pytest.raises(mt.OutputError, match=r"batch\)\['a'\] is in the result of the first batch"):
        mt.predict(lambda w, b: b, 0.0, batches({"a": X}, {"b": X}), global_batch=8, devices=2)
    with pytest.raises(mt.OutputError, match=r"\['b'\] is in the result of a later batch only"):
        mt.predict(lambda w, b: b, 0.0, batches({"a": X}, {"a": X, "b": X}), global_batch=8)
    with pytest.raises(mt.OutputError, match=r"has shape \(2,\) for a row .* Pad the rows"):
        mt.predict(lambda w, x: x, 0.0, batches(X, X[:, :2]), global_batch=8, devices=2)
    found = mt.predict(lambda w, x: x.sum(1), 0.0, batches(X, X[:, :2]), global_batch=8, devices=2)
    assert found.shape == (58,)  # the batches may differ, if the outputs do not

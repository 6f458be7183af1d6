"""mt.all_rows, mt.row_index, and what looks at a loss before it runs.

The lies: rows of one tower that pass for all; a warning about rows that meet on purpose, and none
about those that meet by mistake.
"""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import multitower as mt
from multitower.engines import exchanges

X = np.random.default_rng(0).normal(size=(16, 4)).astype(np.float32)
LABELS = np.arange(16) % 5
W = np.random.default_rng(1).normal(size=(4, 3)).astype(np.float32)
WAYS = [{"devices": 2}, {"towers": 4, "devices": 2}]
every_way = pytest.mark.parametrize("way", WAYS, ids=["fast", "same bits"])


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[] if "towers" in way else [pytest.mark.slow]) for way in WAYS],
    ids=["fast", "same bits"],
)
def test_rows_are_those_of_the_batch_in_order(way):
    def both(x, y):
        rows = mt.all_rows({"x": x, "y": y})
        mine = mt.row_index({"x": x, "y": y})
        return rows["x"][mine] - x, rows["y"][mine] == y, mine

    difference, same, mine = mt.make_parallel(both, **way)(X, LABELS)
    assert not difference.any()
    assert same.all()
    np.testing.assert_array_equal(mine, np.arange(16))
    assert mine.dtype == jnp.int32


def test_outside_of_towers_they_are_the_rows_themselves():
    assert mt.all_rows(X) is X
    np.testing.assert_array_equal(mt.row_index(X), np.arange(16))
    np.testing.assert_array_equal(jax.jit(mt.all_rows)(X), X)


def test_a_jitted_function_that_was_called_outside_is_another_one_in_a_tower():
    fn = jax.jit(lambda x: jnp.broadcast_to(mt.all_rows(x).sum(), len(x)))
    before = fn(X)
    found = mt.make_parallel(fn, towers=4, devices=2)(X)
    np.testing.assert_allclose(found, before, rtol=1e-5)
    np.testing.assert_allclose(fn(X[:4]), X[:4].sum(), rtol=1e-5)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: mt.all_rows({"a": X, "b": 1.0}), r"x\['b'\] of shape \(\).*rows on axis 0"),
        (lambda: mt.row_index(3.0), "float without an axis of rows. Pass an array"),
        (lambda: mt.row_index({}), "dict without an axis of rows"),
    ],
)
def test_what_has_no_rows_is_refused(call, message):
    with pytest.raises(mt.ArgumentError, match=message):
        call()


# ---------------------------------------------------------------- looks


def supervised(w, batch):
    """SupCon: every row with every other one, masks and a sort over all rows."""
    z, y = batch["x"] @ w, batch["y"]
    every, labels = mt.all_rows(z), mt.all_rows(y)
    mine = mt.row_index(z)[:, None] == jnp.arange(len(every))
    alike = (y[:, None] == labels) & ~mine
    similar = z @ every.T
    hardest = jnp.sort(similar, axis=1)[:, -3:].sum(1)
    positive = jnp.where(alike, similar, 0).sum(1)
    losses = jax.nn.logsumexp(jnp.where(mine, -jnp.inf, similar), 1) - positive + hardest
    return losses, {
        "near": similar.argmax(1) == mt.row_index(z),
        "mean": lax.pmean(z.mean(), "towers"),
    }


@pytest.mark.slow
@pytest.mark.parametrize(
    "way",
    [pytest.param(WAYS[0], marks=pytest.mark.slow), WAYS[1]],
    ids=["fast", "same bits"],
)
def test_rows_that_meet_on_purpose_are_no_false_alarm(way):
    step = mt.train_step(supervised, optax.sgd(0.1), **way)
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        _, metrics = step(step.init(W), {"x": X, "y": LABELS})
    losses, scores = supervised_on_one_device(W)
    assert metrics["loss"] == pytest.approx(losses, rel=1e-4)
    assert metrics["near"] == scores


def supervised_on_one_device(w):
    z = X @ w
    similar = z @ z.T
    mine = np.eye(16, dtype=bool)
    alike = (LABELS[:, None] == LABELS) & ~mine
    losses = np.log(np.where(mine, 0, np.exp(similar)).sum(1))
    losses = losses - np.where(alike, similar, 0).sum(1) + np.sort(similar, 1)[:, -3:].sum(1)
    return float(losses.mean()), float((similar.argmax(1) == np.arange(16)).mean())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda w, x: (x @ w - (x @ w).mean(0)).sum(1) ** 2 + mt.all_rows(x).mean(),
            r"rows are brought together.*mt.all_rows\(x\).*lax.pmean",
        ),
        (
            lambda w, x: ((x @ w).sum(1) ** 2).sum() + lax.pmean(x.mean(), "towers"),
            "it is a sum over rows",
        ),
    ],
)
def test_rows_that_meet_by_mistake_are_told_beside_those_that_mean_it(loss, message):
    with pytest.warns(mt.MultitowerWarning, match=message):
        mt.value_and_grad(loss, towers=4, devices=2)(W, X)
    assert not mt.check_parallel(loss, W, X, towers=4)


def neighbours(w, x):
    z = x @ w
    similar = z @ mt.all_rows(z).T
    right = jnp.take_along_axis(similar, (mt.row_index(z) ^ 1)[:, None], 1)[:, 0]
    return jax.nn.logsumexp(similar, 1) - right


CHECKED = {
    "contrastive": neighbours,
    "normalised": lambda w, x: (x @ w - lax.pmean((x @ w).mean(0), "towers")).sum(1) ** 2,
    "ratio": lambda w, x: mt.ratio(
        (x @ w).sum(1) - lax.pmean((x @ w).mean(), "towers"), jnp.abs(x[:, 0])
    ),
    "tower's number": lambda w, x: (x @ w).sum(1) * mt.row_index(x),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.slow] if name in ("contrastive", "ratio") else [])
        for name in CHECKED
    ],
)
def test_check_parallel_knows_towers_that_meet(name):
    check = mt.check_parallel(CHECKED[name], W, X, towers=4)
    assert check, str(check)


@pytest.mark.slow
def test_check_parallel_sees_a_sum_that_is_no_mean():
    check = mt.check_parallel(lambda w, x: lax.psum((x @ w).sum() ** 2, "towers"), W, X, towers=4)
    assert not check


# ---------------------------------------------------------------- evaluation


@every_way
def test_an_evaluation_never_compares_with_examples_that_fill_up(way):
    def metrics(w, x):
        similar = x @ w @ mt.all_rows(x @ w).T
        return {"near": similar.argmax(1) == mt.row_index(x)}

    wanted = (X[:8] @ W @ (X[:8] @ W).T).argmax(1) == np.arange(8)
    found = mt.evaluate(metrics, W, X[:8], global_batch=8, **way)
    assert found == {"near": wanted.mean()}
    with pytest.raises(
        mt.OutputError, match=r"filled up with examples that were there before. Use a glob"
    ):
        mt.evaluate(metrics, W, X[:12], global_batch=8, **way)


# ---------------------------------------------------------------- memory


def test_an_encoder_that_is_computed_again_keeps_embeddings_only(monkeypatch):
    """GradCache: between the exchanges a tower holds its embeddings, not the encoder's insides."""
    kept = []

    def look(self, rounds, arguments, placement, totals):
        shapes = jax.eval_shape(rounds.rounds[0], *_given(rounds, arguments))[0]
        kept.append(sum(leaf.size for leaf in shapes))
        raise NotImplementedError

    def _given(rounds, arguments):
        shapes = dict(zip(rounds.inputs, arguments, strict=True))
        number = jax.ShapeDtypeStruct((), np.int32)
        return [shapes[x] for x in rounds.rounds[0].inputs], exchanges._nothing(), number

    def encode(w, x):
        wide = jnp.tanh(x @ jnp.ones((4, 1000)) * w.sum())
        return jnp.tanh(wide @ jnp.ones((1000, 3))) * w[0]

    monkeypatch.setattr(exchanges.Exchanges, "__init__", look)
    for encoder in (encode, jax.checkpoint(encode)):
        loss = lambda w, x, encoder=encoder: neighbours(jnp.eye(3), encoder(w, x))
        with pytest.raises(NotImplementedError):
            mt.value_and_grad(loss, towers=4, devices=2)(W, X)
    assert kept[0] > 4000
    assert kept[1] < 200


def embedded(w, x):
    z = x @ w
    return z / jnp.linalg.norm(z, axis=1, keepdims=True)


def similarities(w, x):
    z = embedded(w, x)
    return z @ mt.all_rows(z).T


def picked(w, x):
    found = similarities(w, x)
    return jnp.take_along_axis(found, jnp.arange(len(x))[:, None], 1)[:, 0]


def paired(w, x):
    z = embedded(w, x)
    return (z * mt.all_rows(z)[: len(z)]).sum(1)


def cross_entropies(w, x, labels):
    found = 3 * similarities(w, x)
    return optax.softmax_cross_entropy_with_integer_labels(found, labels(x))


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: cross_entropies(w, x, lambda x: jnp.arange(len(x))),
        lambda w, x: jnp.diag(similarities(w, x)),
        lambda w, x: similarities(w, x)[jnp.arange(len(x)), jnp.arange(len(x))],
        picked,
        paired,
    ],
    ids=["labels", "diagonal", "index", "take_along_axis", "slice"],
)
def test_a_tower_s_own_numbers_among_the_rows_of_all_towers_are_told(loss):
    """Lie: contrastive losses whose row i has its pair in column i, which is of another tower."""
    with pytest.warns(mt.MultitowerWarning, match="depends on the number of rows|row_index"):
        mt.value_and_grad(loss, towers=4, devices=2)(W, X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: cross_entropies(w, x, mt.row_index),
        lambda w, x: similarities(w, x)[jnp.arange(len(x)), mt.row_index(x)],
        lambda w, x: (embedded(w, x) * mt.all_rows(embedded(w, x))[mt.row_index(x)]).sum(1),
    ],
)
@every_way
def test_row_index_among_the_rows_of_all_towers_is_right(loss, way):
    value, gradient = mt.value_and_grad(loss, **way)(W, X)  # warnings are errors
    expected = jax.value_and_grad(lambda w, x: loss(w, x).mean())(W, X)
    np.testing.assert_allclose(value, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)

"""A row's place in the batch: what the first look says of a function that depends on it.

Row 0 of a tower is not row 0 of the batch, so that `jnp.arange(len(x))` begins anew in every tower.
"""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from looking import look_at_step
from told import ours

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = jnp.asarray(np.ones(3, np.float32))
TABLE = jnp.linspace(1, 2, 300)


def losses(w, x):
    return (x @ w - 1) ** 2


def numbers(x):
    return jnp.arange(len(x))


def classes(w, x, labels):
    return optax.softmax_cross_entropy_with_integer_labels(x * w, labels)


def of_a_class_by_vmap(w, x):
    return jax.vmap(lambda scores, label: scores[label])(x * w, jnp.arange(len(x)) // 3)


def ratio_of_the_first(w, x):
    mask = jnp.arange(len(x)) < 5
    return mt.ratio((losses(w, x) * mask).sum(), mask.sum())


def with_a_place_for_a_feature(w, x):
    return losses(w, x.at[:, 0].set(jnp.arange(len(x), dtype=x.dtype)))


WRONG = {
    "weights": lambda w, x: losses(w, x) * jnp.arange(len(x)),
    "as a mean": lambda w, x: (losses(w, x) * jnp.arange(len(x))).mean(),
    "a ramp": lambda w, x: losses(w, x) * jnp.linspace(0, 1, len(x)),
    "a mask": lambda w, x: jnp.where(jnp.arange(len(x)) < 5, losses(w, x), 0).mean(),
    "a ratio": ratio_of_the_first,
    "a feature": with_a_place_for_a_feature,
    "along an axis": lambda w, x: losses(w, x + jax.lax.broadcasted_iota(jnp.float32, x.shape, 0)),
    "by vmap": lambda w, x: jax.vmap(lambda row, i: losses(w, row) * i)(x, jnp.arange(len(x))),
    "counted": lambda w, x: counted(x, lambda i, s: s + i * losses(w, x[i])) / len(x),
    "in a loop": lambda w, x: jax.lax.map(lambda i: losses(w, x[i]) * i, jnp.arange(len(x))),
    "labels": lambda w, x: classes(w, x, jnp.arange(len(x)) // 3),
    "labels by vmap": of_a_class_by_vmap,
    "in a table": lambda w, x: losses(w, x) * TABLE[jnp.arange(len(x))],
    "over towers": lambda w, x: losses(w, jax.lax.pmean(x + jnp.arange(len(x))[:, None], "towers")),
    "a place in a scan": lambda w, x: jax.lax.scan(
        lambda total, one: (total + losses(w, one[0]) * (one[1] % 3), None),
        0.0, (x, jnp.arange(len(x))),
    )[0] / len(x),
    "in groups that are cut": lambda w, x: losses(w, x) * (jnp.arange(len(x)) % 8 == 0),
    "groups of NumPy that are cut": lambda w, x: losses(w, x) * (np.arange(len(x)) % 8 == 0),
    "a mask of NumPy": lambda w, x: losses(w, x) * (np.arange(len(x)) < 5),
    "numbers of NumPy": lambda w, x: losses(w, x) * np.random.default_rng(0).random(len(x)),
    "cut from a table": lambda w, x: losses(w, x) * TABLE[: len(x)],
    "from its end": lambda w, x: losses(w, x) * TABLE[-len(x) :],
    "by a dynamic slice": lambda w, x: losses(w, x) * jax.lax.dynamic_slice(TABLE, (3,), (len(x),)),
    "repeated": lambda w, x: losses(w, x * jnp.resize(TABLE[:5], x.shape)),
    "drawn for all": lambda w, x: losses(w, x) * jax.random.uniform(jax.random.key(0), 8)[: len(x)],
    "a discount in a scan": lambda w, x: jax.lax.scan(
        lambda scale, row: (scale * 0.9, scale * losses(w, row)), 1.0, x
    )[1],
    "the first in a scan": lambda w, x: jax.lax.scan(
        lambda is_first, row: (False, jnp.where(is_first, 0, losses(w, row))), True, x
    )[1],
    "a discount that is written": lambda w, x: losses(w, x) * jax.lax.fori_loop(
        0, len(x), lambda i, s: (s[0] * 0.9, s[1].at[i].set(s[0])), (1.0, jnp.zeros(len(x)))
    )[1],
    "a number of turns": lambda w, x: losses(w, x) * jax.lax.fori_loop(
        0, len(x), lambda _, scale: scale * 0.9, 1.0
    ),
    "a discount": lambda w, x: losses(w, x) * jnp.cumprod(jnp.full(len(x), 0.9)),
    "added up": lambda w, x: losses(w, x) * jnp.cumsum(jnp.ones_like(x[:, 0])),
    "all but the first": lambda w, x: losses(w, x) * jnp.ones(len(x)).at[0].set(0),
    "written over": lambda w, x: losses(w, x) * jax.lax.dynamic_update_slice(
        jnp.ones(len(x)), jnp.zeros(2), (0,)
    ),
    "the first four": lambda w, x: losses(w, x) * jnp.zeros(len(x)).at[:4].set(1),
    "put beside": lambda w, x: losses(w, x) * jnp.pad(
        jnp.zeros(len(x) - 1), (1, 0), constant_values=1.0
    ),
    "labels by repeat": lambda w, x: classes(w, x, jnp.repeat(jnp.arange(2), len(x) // 2)),
    "weights of halves": lambda w, x: losses(w, x) * jnp.repeat(w[:2], len(x) // 2),
    "real and fake": lambda w, x: losses(w, x) * jnp.stack(
        [jnp.ones(len(x) // 2), jnp.zeros(len(x) // 2)]
    ).ravel(),
    "labels beside its own number": lambda w, x: (x * w)[numbers(x), numbers(x) // 3],
    "a column by the place": lambda w, x: x.at[numbers(x), np.arange(len(x)) // 3].mul(2.0) @ w,
    "backwards beside its own": lambda w, x: (x * w)[numbers(x), len(x) - numbers(x)],
    "groups by bits that are cut": lambda w, x: losses(w, x) * (numbers(x) & 7),
    "in groups of many": lambda w, x: losses(w, x) * (numbers(x) // 100000 // 100000 % 7),
    "pairs in groups that are cut": lambda w, x: losses(w, x) * (jnp.arange(len(x)) // 2 % 4),
}  # fmt: skip


def contrast(w, x):
    return optax.softmax_cross_entropy_with_integer_labels(
        (x * w) @ mt.all_rows(x).T, mt.row_index(x)
    )


def with_noise_for_every_row(w, key, x):
    draw = lambda i, row: losses(w, row + jax.random.normal(jax.random.fold_in(key, i), row.shape))
    return jax.vmap(draw)(jnp.arange(len(x)), x)


def each_beside_its_neighbour(w, x):
    pairs = jnp.repeat(x @ w, 2) * (jnp.arange(2 * len(x)) % 2)
    return pairs.reshape(-1, 2).sum(1)


def each_of_three(w, x):  # a tower's rows are in no groups of three, but these are
    thirds = jnp.repeat(x @ w, 3) * (jnp.arange(3 * len(x)) % 3)
    return thirds.reshape(-1, 3).sum(1)


def written(x, turn):
    return jax.lax.fori_loop(0, len(x), turn, jnp.zeros(len(x)))


def in_segments(w, x):
    return jax.ops.segment_sum((x * w).ravel(), jnp.repeat(jnp.arange(len(x)), 3), len(x))


def counted(x, turn):
    return jax.lax.fori_loop(0, len(x), turn, 0.0)


def among_all(w, x, weights):
    """Every row beside the rows of all towers, whose places are those of the batch."""
    sims = (x * w) @ mt.all_rows(x).T
    return (sims * weights(jnp.ones(sims.shape))).sum(1)


def pairs_of_all(w, x):
    of_all = mt.all_rows(x @ w)
    one, other = jnp.triu_indices(len(of_all), 1)
    return ((of_all[one] - of_all[other]) ** 2).mean()


RIGHT = {
    "labels of rows": lambda w, x: classes(w, x, jnp.argmax(x, 1)),
    "labels of all rows": lambda w, x: classes(w, x, mt.row_index(x) // 3),
    "pairs of all rows": pairs_of_all,
    "sorted into a table": lambda w, x: losses(w, x) * jnp.searchsorted(TABLE, x[:, 0]),
    "equal entries of a longer array": lambda w, x: losses(w, x + jnp.zeros((300, 3))[: len(x)]),
    "equal entries of NumPy": lambda w, x: losses(w, x) * np.ones(300, np.float32)[: len(x)],
    "the tower's part of a table": lambda w, x: losses(w, x) * jax.lax.dynamic_slice_in_dim(
        TABLE, jax.lax.axis_index("towers") * len(x), len(x)
    ),
    "a table by the place": lambda w, x: losses(w, x) * TABLE[mt.row_index(x)],
    "features of a longer array": lambda w, x: losses(w * TABLE[:3], x),
    "row_index": lambda w, x: jnp.where(mt.row_index(x) < 5, losses(w, x), 0),
    "contrast": contrast,
    "ones": lambda w, x: losses(w, x) * np.ones(len(x), np.float32),
    "columns": lambda w, x: losses(w, x * jnp.stack([jnp.ones(len(x))] * 3, 1)),
    "its own row": lambda w, x: losses(w, x[jnp.arange(len(x))]),
    "its own column": lambda w, x: x.at[jnp.arange(len(x)), jnp.argmax(x, 1)].mul(2.0) @ w,
    "its own entry of a new table": lambda w, x: losses(w, x) * jax.lax.fori_loop(
        0, 3, lambda i, t: t.at[numbers(x), i].set(t[numbers(x), i] + 1), jnp.zeros((len(x), 3))
    )[:, 0],
    "a key in a scan": lambda w, key, x: jax.lax.scan(
        lambda key, row: (jax.random.split(key)[0], losses(w, row + jax.random.normal(key))), key, x
    )[1],
    "a legacy key in a scan": lambda w, key, x: jax.lax.scan(
        lambda key, row: (jax.random.split(key)[0], losses(w, row + jax.random.normal(key))),
        jax.random.key_data(key), x,
    )[1],
    "weights in a scan": lambda w, x: jax.lax.scan(lambda w, row: (w, losses(w, row)), w, x)[1],
    "a loop of its own length": lambda w, x: losses(w, x) * jax.lax.fori_loop(
        0, 15, lambda _, scale: scale * 0.9, 1.0
    ),
    "one by one": lambda w, x: jax.lax.map(lambda i: losses(w, x[i]), jnp.arange(len(x))),
    "counted": lambda w, x: counted(x, lambda i, s: s + losses(w, x[i]) / len(x)),
    "added to numbers": lambda w, x: jax.lax.scan(
        lambda total, row: (total + losses(w, row), None), np.float32([1, -1]), x
    )[0].sum() / x[:, 0].size / 2,
    "a flat index": lambda w, x: (x * w).ravel()[3 * jnp.arange(len(x)) + jnp.argmax(x, 1)],
    "noise": with_noise_for_every_row,
    "a column of constants": lambda w, x: losses(w, x * jnp.ones_like(x).at[:, 0].set(2.0)),
    "features that are added up": lambda w, x: losses(w, x * jnp.cumsum(jnp.ones_like(x), 1)),
    "equal rows turned round": lambda w, x: losses(w, x) * jnp.ones(len(x))[::-1],
    "a column more": lambda w, x: losses(w, jnp.pad(x, ((0, 0), (1, 0)))[:, :3]),
    "the first of all rows": lambda w, x: among_all(w, x, lambda of: of.at[:, 0].set(0)),
    "places among all rows": lambda w, x: among_all(w, x, lambda of: jnp.cumsum(of, 1)),
    "a permutation": lambda w, key, x: losses(w, x * jax.random.permutation(key, len(x))[:, None]),
    "neighbours": each_beside_its_neighbour,
    "neighbours of three": each_of_three,
    "every second of NumPy": lambda w, x: losses(w, x) * (np.arange(len(x)) % 2 == 0),
    "every second": lambda w, x: losses(w, x) * (jnp.arange(len(x)) % 2 == 0),
    "put in its place": lambda w, x: written(x, lambda i, o: o.at[i].set(losses(w, x[i]))),
    "segments": in_segments,
    "labels in groups": lambda w, x: (x * w)[numbers(x), numbers(x) % 2],
    "labels of neighbours by bits": lambda w, x: (x * w)[numbers(x), numbers(x) & 1],
    "pairs in groups, by bits": lambda w, x: losses(w, x) * ((numbers(x) & 3) % 2),
    "of a small dtype": lambda w, x: losses(w, x) * (
        (jnp.arange(len(x), dtype=jnp.int8) + jnp.int8(1)) % jnp.int8(2)
    ),
    "one place for all": lambda w, x: losses(w, x) * (numbers(x) * 0 + 2),
    "within fours": lambda w, x: losses(w, x) * ((numbers(x) - numbers(x) // 4 * 4) % 2),
    "entries of a row": lambda w, x: (
        losses(w, x)[:, None] * ((numbers(x)[:, None] * 6 + jnp.arange(6)) // 3 % 2)
    ).mean(1),
    "no entries": lambda w, x: losses(w, x) + jnp.stack(
        [jnp.ones((len(x), 0)), jnp.zeros((len(x), 0))]
    ).reshape(len(x), 2, 0).sum((1, 2)),
    "pairs, tiled": lambda w, x: losses(w, x) * jnp.tile(w[:2], len(x) // 2),
    "pairs in groups": lambda w, x: losses(w, x) * (jnp.arange(len(x)) // 2 % 2),
    "halves that are equal": lambda w, x: losses(w, x) * jnp.stack(
        [jnp.ones(len(x) // 2)] * 2
    ).ravel(),
    "views of all rows": lambda w, x: (
        losses(w, jnp.concatenate([x, -x])) * jnp.repeat(w[:2], len(x))
    ).mean(),
    "features of all rows": lambda w, x: ((x * w).T.ravel() * jnp.repeat(w, len(x))).mean(),
}  # fmt: skip


def look_at(loss):
    """Traces a call, and compiles nothing."""
    key = (jax.random.key(0),) if "key" in inspect.signature(loss).parameters else ()
    jax.eval_shape(mt.value_and_grad(loss, devices=2), W, *key, X)


@pytest.mark.parametrize("loss", WRONG.values(), ids=WRONG)
def test_a_row_s_place_in_its_tower_is_told(loss):
    # The lie: a mask of the first five rows masks the first five rows of every tower.
    where = "iota|concatenate|scan|an array|slice|dynamic_slice|cumprod|cumsum|scatter|pad"
    where += "|dynamic_update_slice|reshape"
    said = rf"loss \(({where}).*\): it depends on the number.*mt.row_index"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        look_at(loss)
    assert len(ours(told)) == 1


@pytest.mark.parametrize("loss", RIGHT.values(), ids=RIGHT)
def test_nothing_is_said_of_places_that_are_right(loss):
    look_at(loss)  # warnings are errors


def test_nothing_is_said_of_a_count_of_draws():
    """Lie: whatever a loop over rows counts is a place; Flax NNX counts how often it has drawn."""

    def loss(w, batch, *, model_state):
        def turn(count, row):
            key = jax.random.fold_in(batch["key"], count)
            return count + 1, losses(w, row + jax.random.normal(key, row.shape))

        count, rows = jax.lax.scan(turn, model_state, batch["x"])
        return rows, {}, count

    batch = {"x": X, "key": jax.random.key(0)}
    look_at_step(loss, batch, model_state=jnp.uint32(3))  # warnings are errors


@pytest.mark.slow
def test_numbers_that_are_drawn_for_all_rows_and_cut_are_found_by_check_parallel():
    """Lie: random numbers cannot be compared, so nothing is compared, and the loss is safe."""
    (problem,) = mt.check_parallel(WRONG["drawn for all"], W, X).problems
    assert problem.kind == "row count"
    assert "slice" in problem.where


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_way_out_is_that_of_one_device(reduction):
    def loss(place):
        return lambda w, batch: jnp.where(place(batch["x"]) < batch["n"], losses(w, batch["x"]), 0)

    def value(place, devices):
        step = mt.train_step(loss(place), optax.sgd(0.1), devices=devices, reduction=reduction)
        return step(step.init(W), {"x": X, "n": np.int32(5)})[1]["loss"]

    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        value(lambda x: jnp.arange(len(x)), 2)
    expected = np.where(np.arange(8) < 5, (X @ np.ones(3) - 1) ** 2, 0)
    expected = expected.mean() if reduction == "mean" else expected.sum()
    np.testing.assert_allclose(value(mt.row_index, 2), expected, rtol=1e-6)  # as it says


def test_numbers_of_rows_that_are_handed_out_are_told():
    # The lie: predictions beside the numbers of rows, 0 to 3 and again 0 to 3.
    with pytest.warns(mt.MultitowerWarning, match=r"result\['row'\] \(iota .*it depends on"):
        mt.make_parallel(lambda x: {"row": jnp.arange(len(x)), "x": x}, devices=2)(X)

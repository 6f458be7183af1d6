"""check_parallel: every wrong program is named with its line, and no right one is."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower import check_parallel

RNG = np.random.default_rng(0)
W = jnp.asarray(RNG.normal(size=(5, 3)), jnp.float32)
BATCH = {
    "x": RNG.normal(size=(16, 5)).astype(np.float32),
    "y": RNG.integers(0, 3, 16),
}


def entropies(logits, labels):
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def by_row(w, batch):
    return entropies(batch["x"] @ w, batch["y"])


def mean_with_penalty(w, batch):
    return by_row(w, batch).mean() + 1e-4 * jnp.sum(w**2)


def own_count(w, batch):
    return by_row(w, batch).sum() / batch["x"].shape[0]


def row_after_row(w, batch):
    return jax.lax.scan(lambda total, x: (total, jnp.tanh(x @ w).sum()), 0.0, batch["x"])[1]


def in_a_loop(w, batch):
    return jax.lax.fori_loop(0, 3, lambda _, x: jnp.tanh(x), batch["x"] @ w).sum(-1)


def over_time(w, batch):
    tokens = batch["x"].reshape(-1, 1).reshape(-1, 5)
    return jnp.cumsum(jnp.sort(tokens, axis=1), axis=1).max(1) + jnp.sum(w)


def with_branches(w, batch):
    x = jax.lax.cond(jnp.sum(w) > 0, jnp.sin, jnp.cos, batch["x"])
    return jnp.where(x > 0, x, 0.0).mean()


def several(w, batch):
    logits = batch["x"] @ w
    return by_row(w, batch).mean(), {"hits": logits.argmax(-1) == batch["y"], "w": w}


RIGHT = [
    by_row,
    mean_with_penalty,
]
# Much as the others.
RIGHT_TOO = [
    over_time,
    with_branches,
    row_after_row,
    several,
    lambda w, batch: jax.vmap(lambda x, y: entropies(x @ w, y))(batch["x"], batch["y"]),
    lambda w, batch: jax.nn.relu(jax.jit(by_row)(w, batch)),
    own_count,
    in_a_loop,
    jax.checkpoint(mean_with_penalty),
    lambda w, batch: optax.l2_loss(batch["x"] @ w).mean(),
]


@pytest.mark.parametrize(
    "fn",
    [*RIGHT, *(pytest.param(fn, marks=pytest.mark.slow) for fn in RIGHT_TOO)],
    ids=lambda fn: fn.__name__,
)
def test_a_right_program_is_not_blamed(fn):
    # The lie: a check that cries wolf.
    check = check_parallel(fn, W, BATCH)
    assert check, str(check)
    assert str(check) == "safe to run data parallel (tried with 16 rows in 8 towers)"
    check.raise_if_wrong()


def in_groups(w, batch):
    rewards = batch["y"].reshape(-1, 4)  # four answers to each question
    better = rewards - rewards.mean(1, keepdims=True)
    return better.reshape(-1) * by_row(w, batch)


def in_pairs(w, batch):
    z = batch["x"] @ w
    return ((z[0::2] - z[1::2]) ** 2).mean()


@pytest.mark.slow
@pytest.mark.parametrize("fn", [in_groups, in_pairs])
def test_rows_that_belong_to_their_neighbours_are_not_taken_apart(fn):
    # The lie: rows are tried in another order, and groups that are whole in every tower are not.
    check = check_parallel(fn, W, BATCH, towers=2)
    assert check, str(check)
    assert not check_parallel(fn, W, {name: rows[:12] for name, rows in BATCH.items()}, towers=4)


def total(w, batch):
    return by_row(w, batch).sum()


def baked_divisor(w, batch):
    return by_row(w, batch).sum() / 16


def baked_shape(w, batch):
    return entropies((batch["x"] @ w).reshape(16, 3), batch["y"])


def negatives(w, batch):
    z = batch["x"] @ w
    similar = jax.nn.log_softmax(z @ z.T)
    return -jnp.diagonal(similar)


def batch_statistics(w, batch):
    z = batch["x"] @ w
    z = (z - z.mean(0)) / jnp.sqrt(z.var(0) + 1e-5)
    return entropies(z, batch["y"])


def root_of_mean(w, batch):
    return jnp.sqrt(jnp.mean((batch["x"] @ w) ** 2))


def weighted_mean(w, batch):
    weight = (batch["y"] > 0).astype(jnp.float32)
    return (by_row(w, batch) * weight).sum() / weight.sum()


def largest(w, batch):
    return by_row(w, batch).max()


def sorted_rows(w, batch):
    return jnp.sort(by_row(w, batch))


def running_mean(w, batch):
    return jax.lax.scan(lambda seen, x: (0.9 * seen + x, seen.sum()), jnp.zeros(3), batch["x"] @ w)[
        1
    ]


def times_the_rows(w, batch):
    return by_row(w, batch) * 100 / len(batch["x"])


def discounted(w, batch):
    return by_row(w, batch) * 0.9 ** jnp.arange(len(batch["x"]))


def dropout_of_its_own(w, batch):
    kept = jax.random.bernoulli(jax.random.key(0), 0.5, batch["x"].shape)
    return entropies((batch["x"] * kept) @ w, batch["y"])


def noise_of_numpy(w, batch):
    return by_row(w + np.random.normal(), batch)


def counting_metric(w, batch):
    return by_row(w, batch), {"hits": jnp.sum((batch["x"] @ w).argmax(-1) == batch["y"])}


WRONG = [
    (total, "sum", "output", "reduce_sum .*sum()"),
    (baked_divisor, "row count", "output", "div .*/ 16"),
    (baked_shape, "row count", "the function", None),
    (batch_statistics, "mixed rows", "output", r"reduce_sum .*z.mean\(0\)"),
    (largest, "mixed rows", "output", "reduce_max "),
    (discounted, "row count", "output", None),
    (dropout_of_its_own, "same numbers", "random numbers", "random_bits .*bernoulli"),
    (noise_of_numpy, "not repeatable", "output", None),
    (counting_metric, "sum", "output[1]['hits']", "reduce_sum "),
]
# Much as the others.
WRONG_TOO = [
    (root_of_mean, "mixed rows", "output", "sqrt "),
    (sorted_rows, "mixed rows", "output", "sort "),
    (times_the_rows, "row count", "output", "div .*len"),
    (negatives, "mixed rows", "output", "dot_general .*z @ z.T"),
    (weighted_mean, "mixed rows", "output", r"div .*weight.sum\(\)"),
    (running_mean, "mixed rows", "output", "scan "),
]


@pytest.mark.parametrize(
    ("fn", "kind", "output", "place"),
    [*WRONG, *(pytest.param(*case, marks=pytest.mark.slow) for case in WRONG_TOO)],
    ids=[fn.__name__ for fn, *_ in WRONG + WRONG_TOO],
)
def test_a_wrong_program_is_named_with_its_line(fn, kind, output, place):
    # The lie: training starts, and the loss is of something else.
    check = check_parallel(fn, W, BATCH)
    assert not check
    (problem,) = check.problems
    assert (problem.kind, problem.output) == (kind, output)
    if place is None:
        assert problem.where is None
    else:
        assert problem.where is not None
        assert "test_check.py:" in problem.where
        assert re.search(place, problem.where), problem.where
    with pytest.raises(mt.OutputError, match="not safe to run data parallel"):
        check.raise_if_wrong()


def dropout(w, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    return entropies((batch["x"] * kept) @ w, batch["y"])


def dropout_and_statistics(w, batch, *, rng):
    kept = jax.random.bernoulli(rng, 0.5, batch["x"].shape)
    z = (batch["x"] * kept) @ w
    return entropies(z - z.mean(0), batch["y"])


@pytest.mark.slow
def test_what_is_drawn_is_judged_by_the_program():
    # Two halves draw other numbers than the whole: that alone is no fault.
    assert check_parallel(dropout, W, BATCH, rng=jax.random.key(0))
    (problem,) = check_parallel(dropout_and_statistics, W, BATCH, rng=jax.random.key(0)).problems
    assert problem.kind == "mixed rows"
    assert "z.mean(0)" in problem.where


@pytest.mark.slow
def test_axes_as_in_vmap_and_what_cannot_be_tried():
    assert check_parallel(lambda x: x * 2, BATCH["x"])
    assert check_parallel(lambda x, b: x.sum(0) + b, BATCH["x"].T, jnp.ones(16), in_axes=(1, 0))
    assert not check_parallel(lambda x: x - x.mean(0), BATCH["x"])
    assert check_parallel(lambda w, x: jnp.log(x) * w, 1.0, BATCH["x"][:, 0], towers=2)  # NaNs
    with pytest.raises(mt.BatchError, match="one row cannot be cut"):
        check_parallel(by_row, W, {"x": BATCH["x"][:1], "y": BATCH["y"][:1]})


@pytest.mark.slow
def test_modules_are_taken():
    # The lie: a check for plain pytrees, and a user with a Flax or Equinox model.
    nnx = pytest.importorskip("flax.nnx")
    eqx = pytest.importorskip("equinox")
    x = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)

    def per_row(model, x, training=True):
        y = model(x) if isinstance(model, nnx.Module) else jax.vmap(model)(x)
        return (y**2).sum(1)

    for model in (nnx.Linear(3, 2, rngs=nnx.Rngs(0)), eqx.nn.Linear(3, 2, key=jax.random.key(0))):
        assert mt.check_parallel(per_row, model, x, in_axes=(None, 0))
        check = mt.check_parallel(lambda model, x: per_row(model, x).sum(), model, x)
        assert [problem.kind for problem in check.problems] == ["sum"]
    normed = nnx.BatchNorm(3, rngs=nnx.Rngs(0))
    check = mt.check_parallel(per_row, normed, x)
    assert [problem.kind for problem in check.problems] == ["mixed rows"]
    assert not normed.mean[...].any()  # the user's own module has seen nothing


@pytest.mark.slow
def test_16_bit_results_are_compared_as_coarsely_as_they_are():
    # The lie: rows that mix, seen in nothing but bfloat16's rounding.
    x = np.random.default_rng(0).normal(size=(64, 3)).astype(np.float32)
    assert mt.check_parallel(lambda w, x: ((x @ w) ** 2).astype(jnp.bfloat16).mean(), x[0], x)
    assert not mt.check_parallel(lambda w, x: ((x @ w) ** 2).astype(jnp.bfloat16).sum(), x[0], x)


# ---------------------------------------------------------------- gradients, and the real cut


def losses(w, x):
    return (x @ w - 1) ** 2


@jax.custom_vjp
def normalised_backwards(z):
    return z


def unit(_, cotangent):
    return (cotangent / jnp.linalg.norm(cotangent),)


normalised_backwards.defvjp(lambda z: (z, None), unit)


def clipped_by_all_rows(w, x):
    return (normalised_backwards(x @ w) - 1) ** 2


def straight_through(w, x):
    z = x @ w
    scaled = z * jax.lax.stop_gradient(z.std())
    return (z + scaled - jax.lax.stop_gradient(scaled) - 1) ** 2


def fours(w, x):
    return losses(w, x).reshape(4, -1).reshape(-1)


def hardest_four(w, x):
    return losses(w, x) + 0 * jax.lax.top_k(losses(w, x), 4)[0].sum()


VECTOR, X = W[:, 0], BATCH["x"]


def with_rule(rule):
    @jax.custom_vjp
    def same(value):
        return value

    same.defvjp(lambda value: (value, None), lambda _, gradient: (rule(gradient),))
    return same


@pytest.mark.slow
def test_gradients_are_compared_where_only_a_backward_rule_meets():
    """Lie: towers of such a loss are tried alone, and an unbound axis ends the comparison."""
    added_up = with_rule(lambda gradient: jax.lax.psum(gradient, "towers"))
    shared = with_rule(
        lambda g: jax.lax.psum(g, "towers").clip(-0.5, 0.5) / jax.lax.axis_size("towers")
    )
    (problem,) = check_parallel(lambda w, x: losses(added_up(w), x), VECTOR, X).problems
    assert problem.kind == "gradient"
    assert check_parallel(lambda w, x: losses(shared(w), x), VECTOR, X)


@pytest.mark.slow
def test_an_array_that_gives_every_row_its_loss_is_no_table():
    """Lie: "give every tower the whole of x", where another argument keeps the loss cut."""

    def loss(w, batch):
        none = jax.ShapeDtypeStruct((), np.float32)
        found = losses(w, batch["x"])
        counted = jax.pure_callback(lambda y: np.float32(0), none, batch["y"])
        return found / found.mean() + counted

    (problem,) = check_parallel(loss, VECTOR, {"x": X, "y": X[:, 0]}).problems
    assert problem.kind == "mixed rows"


def wrong_once_compiled(w, x):
    """As the gradient of a maximum, where XLA rounds one number in two ways."""
    try:
        float(x[0, 0])
    except jax.errors.ConcretizationTypeError:
        return straight_through(w, x)
    return (x @ w - 1) ** 2


@pytest.mark.slow
def test_a_gradient_that_only_the_compiled_program_has_is_not_blamed_on_the_function():
    """Lie: a wrong gradient that XLA made is put down to a backward rule."""
    (problem,) = check_parallel(wrong_once_compiled, VECTOR, X).problems
    assert problem.kind == "gradient"
    assert "That is XLA's rounding" in problem.message


@pytest.mark.slow
@pytest.mark.parametrize("fn", [clipped_by_all_rows, straight_through])
def test_gradients_are_compared(fn):
    # The lie: the same loss, another training.
    (problem,) = check_parallel(lambda params, x: fn(params["w"], x), {"w": VECTOR}, X).problems
    assert (problem.kind, problem.output) == (
        "gradient",
        "output's gradient with respect to params['w']",
    )


@pytest.mark.slow
@pytest.mark.parametrize("fn", [fours, hardest_four])
def test_the_batch_is_cut_as_it_will_be(fn):
    # The lie: it can be halved, so it can be cut into as many towers as there are devices.
    (problem,) = check_parallel(fn, VECTOR, X).problems  # eight devices, two rows each
    assert problem.kind == "row count"
    assert "works on 16 rows and fails on 2, which a tower would have" in problem.message
    assert check_parallel(fn, VECTOR, X, towers=2)  # fewer towers, as it says


def by_class(w, x, y, weights):
    return losses(w, x) * weights[y]


def by_output(w, batch):
    return ((batch["x"] @ jnp.outer(w, jnp.ones(16)) - 1) ** 2 * batch["weights"]).sum(1)


@pytest.mark.parametrize(
    ("fn", "args", "name", "in_axes"),
    [
        (by_class, (X, BATCH["y"], np.arange(16.0)), "weights", (None, 0, 0, None)),
        pytest.param(
            by_output,
            ({"x": X, "weights": np.arange(16.0)},),
            "batch['weights']",
            (None, {"weights": None, "x": 0}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_an_argument_that_is_cut_by_mistake_is_named(fn, args, name, in_axes):
    # The lie: "rows are brought together", and no word of which argument.
    (problem,) = check_parallel(fn, VECTOR, *args).problems
    assert (problem.kind, problem.output) == ("table", name)
    assert f": in_axes={in_axes!r}." in problem.message
    assert check_parallel(fn, VECTOR, *args, in_axes=in_axes)  # as it says


# ---------------------------------------------------------------- what it used to cry wolf at


def masked(w, x, y):
    return mt.ratio(losses(w, x) * (y > 0), y > 0) + 0.1 * jnp.sum(w**2)


def masked_sums(w, x, y):
    return mt.ratio(jnp.sum(losses(w, x) * (y > 0)), jnp.sum(y > 0))


def masked_largest(w, x, y):
    return mt.ratio(jnp.max(losses(w, x)), jnp.sum(y > 0))


@pytest.mark.slow
def test_ratios_are_judged_as_totals_and_weights():
    for fn in (masked, masked_sums):
        assert check_parallel(fn, VECTOR, X, BATCH["y"])
    (problem,) = check_parallel(masked_largest, VECTOR, X, BATCH["y"]).problems
    assert problem.message.startswith("towers add up the totals and the weights of mt.ratio")


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("of", [masked, masked_sums], ids=["rows", "sums"])
def test_a_ratio_that_was_taken_apart_is_found(of, reduction):
    """Lie: "safe", or "say reduction='sum'": the sums of total and weight look like a loss."""

    def apart(w, x, y):
        return sum(jax.tree.leaves(of(w, x, y)))

    (problem,) = check_parallel(apart, VECTOR, X, BATCH["y"], reduction=reduction).problems
    assert problem.message.startswith("an mt.ratio was taken apart")


def test_sums_are_told_apart_from_means():
    summed, mean = (lambda w, x: losses(w, x).sum()), (lambda w, x: losses(w, x).mean())
    (problem,) = check_parallel(summed, VECTOR, X).problems
    assert problem.kind == "sum"
    assert check_parallel(summed, VECTOR, X, reduction="sum")  # as it says
    assert check_parallel(losses, VECTOR, X, reduction="sum")
    (problem,) = check_parallel(mean, VECTOR, X, reduction="sum").problems
    assert problem.kind == "mean"


@pytest.mark.slow
def test_a_penalty_beside_a_sum():
    # The lie: one value per row is asked for, where a penalty counts once in every tower.
    penalised = lambda w, x: losses(w, x).sum() + (w**2).sum()
    (problem,) = check_parallel(penalised, VECTOR, X, reduction="sum").problems
    assert problem.kind == "sum"
    assert "counts T times" in problem.message

    def shared(w, x):
        return losses(w, x).sum() + (w**2).sum() / jax.lax.axis_size("towers")

    assert check_parallel(shared, VECTOR, X, reduction="sum")


def test_what_train_step_gives_a_loss_is_not_asked_for():
    assert check_parallel(dropout, W, BATCH)  # it needs rng, and has a fixed one

    def handing_on(w, x, *, model_state):
        return losses(w, x), {}, model_state + x.mean()

    assert check_parallel(handing_on, VECTOR, X, model_state=jnp.zeros(()))
    with pytest.raises(mt.ArgumentError, match=r"takes model_state.*model_state=\{...\}\)"):
        check_parallel(handing_on, VECTOR, X)


@pytest.mark.slow
def test_dropout_of_modules_is_not_blamed():
    # The lie: "all towers would draw the same", of streams that towers have for themselves.
    nnx, eqx = pytest.importorskip("flax.nnx"), pytest.importorskip("equinox")
    dropout, rngs = nnx.Dropout(0.5, rngs=nnx.Rngs(0)), nnx.Rngs(0)
    noisy = lambda w, x, rngs: losses(w, x + jax.random.uniform(rngs(), x.shape))
    assert check_parallel(lambda model, x: losses(VECTOR, model(x)), dropout, X)
    assert check_parallel(noisy, VECTOR, X, rngs)
    assert check_parallel(lambda w, x: losses(w, dropout(x)), VECTOR, X)  # it closes over it
    assert int(rngs.default.count[...]) == int(dropout.rngs.count[...]) == 0
    each = jax.vmap(lambda x, key: eqx.nn.Dropout(0.5)(x, key=key))
    of_key = lambda w, x, key: losses(w, each(x, jax.random.split(key, len(x))))
    assert check_parallel(of_key, VECTOR, X, jax.random.key(0))


@pytest.mark.slow
@pytest.mark.parametrize("make", [jax.random.key, jax.random.PRNGKey])
def test_a_key_that_is_returned_for_the_next_step_is_right(make):
    # The lie: towers have different keys, so the returned key "depends on the number of rows".
    def with_next_key(w, x, key):
        key, own = jax.random.split(key)
        return (x @ w + jax.random.uniform(own, (len(x),))) ** 2, key

    assert check_parallel(with_next_key, VECTOR, X, make(0))


@pytest.mark.slow
def test_batch_norm_is_told_once():
    def normalised(w, x, *, model_state):
        mean = x.mean(0)
        per_row = losses(w, x - mean)
        return per_row, {"error": per_row, "norm": per_row**2}, 0.9 * model_state + 0.1 * mean

    (problem,) = check_parallel(normalised, VECTOR, X, model_state=jnp.zeros(5)).problems
    assert problem.message.startswith("rows are normalised with statistics of their own tower")


@pytest.mark.slow
def test_a_state_that_adds_up_rows_is_not_safe():
    # The lie: "safe", of counts that are those of a tower.
    def counting(w, x, *, model_state):
        return losses(w, x), {}, {**model_state, "seen": model_state["seen"] + x.sum(0)}

    state = {"seen": jnp.zeros(5), "decay": jnp.ones(())}
    (problem,) = check_parallel(counting, VECTOR, X, model_state=state).problems
    assert (problem.kind, problem.output) == ("sum", "model_state['seen']")


@pytest.mark.slow
def test_parameters_in_numpy_arrays_are_indexed_as_in_a_real_call():
    table = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    tokens = np.array([[0, 1], [2, 3], [4, 0], [1, 1]])
    assert mt.check_parallel(lambda table, tokens: table[tokens].sum((1, 2)), table, tokens)


def test_ragged_rows_are_tried_in_as_many_towers_as_asked_for():
    check = mt.check_parallel(lambda w, x: (x - w) ** 2, 1.0, np.arange(22.0), towers=4)
    assert str(check) == "safe to run data parallel (tried with 22 rows in 4 towers)"


@pytest.mark.slow
def test_a_loss_may_ask_for_the_number_of_towers_alone():
    """The lie: such a loss names an axis that does not exist, since its program has no exchange."""

    def right(w, batch):
        return by_row(w, batch).sum() / jax.lax.pmean(len(batch["x"]), "towers")

    def wrong(w, batch):
        return by_row(w, batch) / jax.lax.axis_size("towers")

    assert check_parallel(right, W, BATCH)
    assert not check_parallel(wrong, W, BATCH)


@pytest.mark.slow
def test_results_that_are_nan_in_a_complex_number_are_repeatable():
    """Lie: a function that draws random numbers on the host, because nan is not nan."""
    some = jnp.array([jnp.nan, 1.0])[jnp.arange(len(BATCH["x"])) % 2]
    found = check_parallel(jax.lax.complex, some, BATCH["x"][:, 1], in_axes=0)
    assert not found.problems


def test_a_result_that_is_no_number_is_named():
    with pytest.raises(mt.OutputError, match=r"output\[1\]\['split'\] is str"):
        check_parallel(lambda w, batch: (by_row(w, batch), {"split": "train"}), W, BATCH)


@pytest.mark.slow
def test_results_that_are_not_a_number_are_not_safe():
    # The lie: "safe", because NaN is as far from NaN as from any other number.
    loss = lambda w, batch: jnp.log(-((batch["x"] @ w) ** 2)).sum()
    found = check_parallel(loss, W, BATCH)
    assert [problem.kind for problem in found.problems] == ["not a number"]


def masked_mean(w, batch):
    return (by_row(w, batch) * batch["mask"]).sum() / batch["mask"].sum()


def chosen_mean(w, batch):
    return jnp.mean(by_row(w, batch), where=batch["mask"])  # where takes booleans alone


def without_outliers(w, batch):
    kept = (jnp.abs(batch["x"]) < 10).all(1)
    return masked_mean(w, {**batch, "mask": kept})


def half_of_each_row(w, batch):
    """A masked autoencoder: it drops as many patches of every row."""
    x = batch["x"]
    kept = (jnp.argsort(x, axis=1) < 2).astype(jnp.float32)
    return (kept * (x * w[:, 0] - 1) ** 2).sum() / kept.sum()


def backwards(w, batch):
    return by_row(w, batch)[::-1].mean()


@pytest.mark.parametrize(
    "kind",
    [*(pytest.param(kind, marks=pytest.mark.slow) for kind in (np.float32, np.int32)), np.bool_],
)
def test_a_mask_that_keeps_every_row_does_not_make_a_mean_safe(kind):
    """The lie: safe, because no row of this batch is masked."""
    check = check_parallel(masked_mean, W, {**BATCH, "mask": np.ones(16, kind)})
    assert [one.kind for one in check.problems] == ["mixed rows"]
    assert "the numbers agree, as with a mask that keeps every row" in str(check)


@pytest.mark.slow
def test_a_choice_that_keeps_every_row_does_not_make_a_mean_safe():
    """The lie: the same, where rows are chosen by their loss, or a mask in another way."""
    assert not check_parallel(without_outliers, W, BATCH)
    assert not check_parallel(chosen_mean, W, {**BATCH, "mask": np.ones(16, np.bool_)})


@pytest.mark.slow
@pytest.mark.parametrize("loss", [half_of_each_row, backwards])
def test_rows_that_come_together_and_stay_what_they_are_are_safe(loss):
    assert check_parallel(loss, W, BATCH)

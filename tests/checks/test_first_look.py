"""The first look: every entry point warns once of what no tower should do, and of nothing else."""

import contextlib
import functools
import math
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.experimental import io_callback

import multitower as mt
from multitower.checks import first_look
from multitower.checks.reading import row_flow
from multitower.checks.reading.counts import is_mean, is_steady, numbers_of, per_row
from multitower.checks.reading.flow import Flow
from told import ours

X = np.random.default_rng(0).normal(size=(8, 3)).astype(np.float32)
W = jnp.asarray(np.ones(3, np.float32))


def losses(w, x):
    return (x @ w - 1) ** 2


def total(w, x):
    return losses(w, x).sum()


def centred(w, x):
    z = x @ w
    return (z - z.mean()) ** 2


def one_mask(w, x):
    return losses(w, x * jax.random.bernoulli(jax.random.key(0), 0.5, x.shape))


def step_of(loss, **options):
    def run(w, x):
        step = mt.train_step(loss, optax.sgd(0.1), devices=2, **options)
        state, _ = step(step.init(w), x)
        return step(state, x)

    return run


ENTRIES = {
    "value_and_grad": lambda loss: mt.value_and_grad(loss, devices=2),
    "towers": lambda loss: mt.value_and_grad(loss, devices=2, towers=4),
    "under jit": lambda loss: jax.jit(mt.value_and_grad(loss, devices=4)),  # not looked at yet
    "train_step": step_of,
    "same bits": lambda loss: step_of(loss, towers=4),
}
WRONG = {
    total: r"loss \(reduce_sum .*\): it is a sum over rows.*check_parallel",
    centred: r"loss \(reduce_sum .*z.mean\(\)\) \*\* 2\): rows are brought together",
    one_mask: r"random numbers \(random_bits .*\): they come from a key that is the same in every",
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("entry", "loss"),
    [
        *((entry, total) for entry in ENTRIES),
        ("value_and_grad", centred),
        ("train_step", centred),
        ("towers", one_mask),
        ("under jit", one_mask),
        pytest.param("same bits", one_mask, marks=pytest.mark.slow),
    ],
)
def test_each_entry_point_warns_once(entry, loss):
    # The lie: training that goes on, of something else, and nobody is told.
    said = WRONG[loss]
    run = ENTRIES[entry](loss)
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run(W, X)
    assert len(ours(told)) == 1
    if entry in ("value_and_grad", "towers", "under jit"):
        run(W, X)  # warnings are errors here: a second one would fail


@pytest.mark.parametrize("loss", [total, centred, one_mask])
def test_nothing_is_said_if_the_user_says_that_there_is_one_tower(loss):
    # The lie: it is warned of what differs from one device's, in a result that does not.
    found, _ = mt.value_and_grad(loss, devices=1, towers=1)(W, X)
    np.testing.assert_allclose(found, jnp.mean(loss(W, X)), rtol=1e-6)
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=1, global_batch=9)
    with pytest.warns(mt.MultitowerWarning):
        step(step.init(W), X)  # a copy of a row fills up its tower
    with pytest.warns(mt.MultitowerWarning):
        mt.value_and_grad(loss, devices=1)(W, X)  # the same code on another machine has several


MEANS = {
    "full": lambda x: jnp.full(len(x), x.mean()),
    "broadcast": lambda x: jnp.broadcast_to(x.mean(0), x.shape),
    "two means": lambda x: jnp.repeat(3 * x[:, 0].mean() - x[:, 1].mean() + 1, len(x)),
    "one of two results": lambda x: (x, jnp.ones_like(x) * (x**2).mean()),
}


@pytest.mark.parametrize("fn", MEANS.values(), ids=MEANS)
def test_one_mean_for_every_row_is_told(fn):
    """Lie (law L1): a mean is averaged, so nobody says that each row has that of its own tower."""
    said = r"(result|aux).*\(reduce_sum .*\): rows are brought together"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        mt.make_parallel(fn, devices=2)(X)
    assert len(ours(told)) == 1
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(lambda w, x: (losses(w, x), fn(x)), devices=2, has_aux=True), X)
    with pytest.warns(mt.MultitowerWarning, match=said):
        mt.predict(lambda _, x: fn(x), W, X, global_batch=len(X), devices=2)
    problem = mt.check_parallel(fn, X).problems[0]
    assert problem.kind == "mixed rows"
    assert problem.message.startswith("rows are brought together")
    mt.make_parallel(lambda x: jnp.full(len(x), jax.lax.pmean(x.mean(), "towers")), devices=2)(X)


def test_pairs_of_neighbours_in_towers_of_three_rows_are_told():
    # The lie: two rows and one row broadcast, so that a row is paired with that of another pair.
    pairs = lambda w, x: ((x @ w)[::2] - (x @ w)[1::2]) ** 2
    loss = lambda w, x: pairs(w, x).mean()
    with pytest.warns(
        mt.MultitowerWarning, match=r"loss \(slice .*\): a part of the rows is taken"
    ):
        mt.grad(loss, towers=4, devices=2)(W, np.concatenate([X, X])[:12])
    mt.grad(loss, towers=4, devices=2)(W, np.concatenate([X, X])[:16])


def test_the_partner_of_a_row_in_towers_of_three_rows_is_told():
    # The lie: i ^ 1 finds a row of this tower, as it does in towers of two or four rows.
    loss = lambda w, x: ((x @ w) * (x @ w)[jnp.arange(len(x)) ^ 1]).mean()
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(gather .*\): rows are brought together"):
        look_at(mt.grad(loss, towers=4, devices=2), np.concatenate([X, X])[:12])
    look_at(mt.grad(loss, towers=4, devices=2), np.concatenate([X, X])[:16])


def test_one_warning_for_all_results_of_one_line():
    # The lie: four long warnings, and one line to change.
    def loss(w, x):
        advantage = x - x.mean(0)
        each = advantage @ w
        return (each**2).mean(), {"first": each.mean(), "second": (each**4).mean()}

    with pytest.warns(mt.MultitowerWarning, match=r"aux.*, aux.* and loss") as told:
        mt.value_and_grad(loss, has_aux=True, devices=2)(W, X)
    assert len(ours(told)) == 1


def divided(w, x, by):
    """As Keras has it: the number is computed in the program, and may be zero."""
    count = jnp.prod(jnp.array(by)).astype(jnp.float32)
    safe = jnp.where(count == 0, 1.0, count)
    return jnp.where(count == 0, 0.0, losses(w, x).sum() / safe)


def test_a_mean_whose_number_of_rows_is_computed():
    # The lie: every Keras loss is called a sum over rows. Or none is: by two it still is one.
    look_at(mt.grad(lambda w, x: divided(w, x, x.shape[:1]), devices=2), X)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):
        look_at(mt.grad(lambda w, x: divided(w, x, (2,)), devices=2), X)


def test_the_number_of_rows_of_all_towers():
    # The lies: the rows of a tower divided by those of all towers, T times too small, and nobody is
    # told; a warning where that number is right.
    every = lambda x: jax.lax.psum(len(x), "towers")
    over_all = lambda w, x: losses(w, x).sum() / every(x)
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):
        look_at(mt.grad(over_all, devices=2), X)
    expected = losses(W, X).mean()
    value, _ = mt.value_and_grad(over_all, devices=2, reduction="sum")(W, X)  # as it says
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    for loss in (
        lambda w, x: jax.lax.psum(losses(w, x).sum(), "towers") / every(x),
        lambda w, x: losses(w, x) + (w**2).sum() / every(x) - (W**2).sum() / 8,
    ):
        value, _ = mt.value_and_grad(loss, devices=2)(W, X)  # warnings are errors
        np.testing.assert_allclose(value, expected, rtol=1e-6)


def mean_of_all(x):
    return jax.lax.pmean(x, "towers")


def by_mean_deviation(w, x):
    z = x @ w
    return (z - mean_of_all(z.mean())) / mean_of_all(z.std())


def by_deviation_of_all(w, x):
    z = x @ w
    mean = mean_of_all(z.mean())
    return (z - mean) / jnp.sqrt(mean_of_all(((z - mean) ** 2).mean()))


def normalised_in_a_tower(w, x):
    z = x @ w
    return mean_of_all((z / z.sum()).mean())


def mean_of_kernels(w, x):
    z = x * w
    return mean_of_all(jnp.exp(-((z[:, None] - z) ** 2).sum(-1)).mean())


def inner_step(w, x):
    gradient = mean_of_all(jax.grad(lambda w: losses(w, x).mean())(w))
    return losses(w - 0.1 * gradient, x)


def centred_over_all(w, x):
    z = x @ w
    return ((z - mean_of_all(z.mean())) ** 2).mean()


def largest_first(w, x):
    z = x @ w
    largest = jax.lax.pmax(jax.lax.stop_gradient(z.max()), "towers")
    return largest + jnp.log(mean_of_all(jnp.exp(z - largest).mean()))


@pytest.mark.parametrize(
    ("loss", "is_right"),
    [
        (by_mean_deviation, False),
        (normalised_in_a_tower, False),
        (mean_of_kernels, False),
        (by_deviation_of_all, True),
        (inner_step, True),
        (largest_first, True),
        (centred_over_all, True),
    ],
)
def test_towers_that_meet_after_their_rows_were_mixed_are_told(loss, is_right):
    # The lie: whatever passes through a pmean is that of the whole batch.
    if is_right:
        look_at(mt.grad(loss, devices=2), X)  # warnings are errors
        return
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(psum .*made of its own rows alone"):
        look_at(mt.grad(loss, devices=2), X)
    with pytest.warns(mt.MultitowerWarning, match=r"aux \(psum .*made of its own rows alone"):
        look_at(mt.grad(lambda w, x: (losses(w, x), loss(w, x)), has_aux=True, devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize(("impl", "is_told"), [("rbg", True), ("threefry2x32", False)])
def test_keys_of_rows_that_are_drawn_from_together(impl, is_told):
    """Lie: a row's key makes its numbers. JAX draws for all rows of a tower from its first key."""

    def noisy(w, x, keys):
        return losses(w, x) + jax.vmap(jax.random.normal)(keys)

    args = W, X, jax.random.split(jax.random.key(0, impl=impl), len(X))
    told = pytest.warns(mt.MultitowerWarning, match=r'random_bits .*keys of "rbg"')
    with told if is_told else contextlib.nullcontext():
        mt.grad(noisy, devices=2)(*args)
    assert bool(mt.check_parallel(noisy, *args)) != is_told
    one_by_one = lambda w, x, keys: losses(w, x) + jax.lax.map(jax.random.normal, keys)
    mt.grad(one_by_one, devices=2)(*args)


def with_rule(backward, forward=lambda x: x):
    """The identity, or `forward`, with a backward rule of its own."""
    function = jax.custom_vjp(forward)
    function.defvjp(lambda x: (function(x), x), lambda x, g: (backward(g),))
    return function


def norm_of_all(g):
    return g / jnp.sqrt(jax.lax.psum((g * g).sum(), "towers"))


BY_ROW = lambda rule: lambda w, x: (rule(x @ w) - 1) ** 2
OF_WEIGHTS = lambda rule: lambda w, x: losses(rule(w), x)
RULES = {
    "norm": (BY_ROW, with_rule(lambda g: g / jnp.linalg.norm(g)), False),
    "centred": (BY_ROW, with_rule(lambda g: g - g.mean(0)), False),
    "clipped weights": (OF_WEIGHTS, with_rule(lambda g: jnp.clip(g, -1, 1)), False),
    "unit weights": (OF_WEIGHTS, with_rule(lambda g: g / jnp.linalg.norm(g)), False),
    "clipped rows": (BY_ROW, with_rule(lambda g: jnp.clip(g, -1, 1)), True),
    "norm of all": (BY_ROW, with_rule(norm_of_all), True),
    "reversed": (OF_WEIGHTS, with_rule(lambda g: -0.5 * g), True),
    "straight through": (BY_ROW, with_rule(lambda g: g, lambda x: jnp.round(x, 1)), True),
}


@pytest.mark.parametrize("name", RULES)
def test_a_backward_rule_that_brings_rows_together_is_told(name):
    # The lie: what a rule does with the gradients of a tower's rows is what it does with all rows'.
    loss_of, rule, is_right = RULES[name]
    loss = loss_of(rule)
    if not is_right:
        with pytest.warns(mt.MultitowerWarning, match=r"gradients \(.*a backward rule"):
            look_at(mt.grad(loss, devices=2), X)
        look_at(mt.make_parallel(loss, in_axes=(None, 0), devices=2), X)
        return
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    if name != "norm of all":
        expected = jax.grad(lambda w: loss(w, X).mean())(W)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


MEAN_RULES = {
    "of the sum": lambda z, g: 2 * z * g,
    "of the mean": lambda z, g: 2 * z * g / len(z),
    "by JAX": lambda z, g: jax.grad(lambda z: (z**2).mean())(z) * g,
}


def test_a_gradient_of_zeros_beside_that_of_a_mean():
    mean = jax.custom_vjp(lambda z, y: ((z - y) ** 2).mean())
    divided = lambda z, y, g: 2 * (z - y) * g / len(z)
    mean.defvjp(lambda z, y: (mean(z, y), (z, y)), lambda zy, g: (divided(*zy, g), zy[1] * 0))
    loss = lambda w, x: mean(x @ w, x[:, 0])
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5)


@pytest.mark.parametrize("name", MEAN_RULES)
def test_the_backward_rule_of_a_mean_divides_by_the_number_of_rows(name):
    """Lie: a rule that returns the gradient of the sum, which one device and two take otherwise."""
    mean = jax.custom_vjp(lambda z: (z**2).mean())
    mean.defvjp(lambda z: (mean(z), z), lambda z, g: (MEAN_RULES[name](z, g),))
    loss = lambda w, x: mean(x @ w)
    if name == "of the sum":
        with pytest.warns(mt.MultitowerWarning, match="the gradient of their sum"):
            look_at(mt.grad(loss, devices=2), X)
        return
    found = mt.grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5)


@pytest.mark.parametrize(
    "rule",
    [
        lambda g: g * len(g) / 8,
        lambda g: g + 0.1 * jnp.sign(g) / len(g),
        lambda g: g / jnp.sqrt(len(g)),
    ],
    ids=["multiplied", "a penalty", "root"],
)
def test_a_backward_rule_that_counts_rows_is_told(rule):
    """Lie: a tower's number of rows, in a rule, taken for that of the batch."""
    with pytest.warns(mt.MultitowerWarning, match="a backward rule.*divides by the number of rows"):
        look_at(mt.grad(BY_ROW(with_rule(rule)), devices=2), X)
    by_sum = lambda w, x: BY_ROW(with_rule(rule))(w, x).sum()
    with pytest.warns(mt.MultitowerWarning, match="a backward rule.*divides by the number of rows"):
        look_at(mt.grad(by_sum, devices=2, reduction="sum"), X)


def convolved_halves(w, x):
    filters = jnp.ones((2, len(x) // 2, 1))
    sums = jax.lax.conv_general_dilated(
        (x * w).T[:, :, None], filters, (1,), "VALID", feature_group_count=2
    )
    return (sums[:, 0] * sums[:, 1]).sum() / len(x)


def test_halves_of_the_rows_that_a_convolution_sums_up_are_told():
    # The lie: a convolution with the rows as channels sums up all of them, in groups, too.
    with pytest.warns(mt.MultitowerWarning, match="conv_general_dilated"):
        look_at(mt.grad(convolved_halves, devices=2), X)


def test_a_rule_that_calls_its_function_is_read_once(monkeypatch):
    # The lie: a rule's program holds no call whose rule would be read again, and again.
    read, seen = row_flow.read_backward_rule, []
    count = lambda *args: (seen.append(args), read(*args))[1]
    monkeypatch.setattr(row_flow, "read_backward_rule", count)
    look_at(mt.grad(BY_ROW(with_rule(lambda g: -g)), devices=2), X)
    assert len(seen) == 1


@pytest.mark.parametrize("limit", [None, 1e-3])
def test_the_gradient_of_a_filter_is_a_sum_over_rows(limit):
    # The lie: in a convolution whose channels are the rows, the rows meet.
    @jax.custom_vjp
    def convolved(x, w):
        return jax.lax.conv(x, w, (1, 1), "SAME")

    def backward(given, g):
        found = jax.vjp(lambda *xw: jax.lax.conv(*xw, (1, 1), "SAME"), *given)[1](g)
        return found if limit is None else (found[0], jnp.clip(found[1], -limit, limit))

    convolved.defvjp(lambda *xw: (convolved(*xw), xw), backward)
    loss = lambda w, x: (convolved(x[:, None, None], w[None, None, None]) ** 2).mean((1, 2, 3))
    if limit is not None:
        with pytest.warns(mt.MultitowerWarning, match=r"gradients \(.*a backward rule"):
            look_at(mt.grad(loss, devices=2), X)
        return
    expected = jax.grad(lambda w: loss(w, X).mean())(W)
    np.testing.assert_allclose(mt.grad(loss, devices=2)(W, X), expected, rtol=1e-5, atol=1e-6)


def over_all(w, x):
    return jax.lax.psum(losses(w, x).sum(), "towers")


def of_all_rows(w, x):
    return losses(w, mt.all_rows(x)).sum()


@pytest.mark.parametrize(
    "loss",
    [over_all, of_all_rows, lambda w, x: over_all(w, x) + (w**2).sum()],
)
def test_a_sum_over_all_rows_that_towers_add_up_is_told(loss):
    # The lie: reduction="sum" is right for a sum over the whole batch, which every tower has.
    with pytest.warns(mt.MultitowerWarning, match="the same number in every tower.*T times"):
        look_at(mt.grad(loss, devices=2, reduction="sum"), X)
    with pytest.warns(mt.MultitowerWarning, match="the same number in every tower"):
        step_of(loss, reduction="sum")(W, X)
    look_at(mt.grad(loss, devices=2), X)  # as it says; warnings are errors
    for own in (losses, total, lambda w, x: losses(w, x) + over_all(w, x) / 8):
        look_at(mt.grad(own, devices=2, reduction="sum"), X)


def test_a_metric_that_is_the_number_of_rows_is_told():
    # The lie: every tower has its own number of rows, and the metric is the mean of these.
    counted = lambda count: lambda w, x: (losses(w, x), {"rows": jnp.float32(count(x))})
    said = r"aux\['rows'\]: it depends on the number of rows"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(counted(len), devices=2, has_aux=True), X)
    for of_all in (lambda x: jax.lax.psum(len(x), "towers"), lambda x: len(mt.all_rows(x))):
        look_at(mt.grad(counted(of_all), devices=2, has_aux=True), X)


def per_token(w, x, num_tokens):
    return mt.ratio(losses(w, x).sum(), num_tokens)


def test_a_ratio_of_a_sum_and_a_number_of_the_whole_batch():
    # The lie: the number of tokens of the batch counts once in every tower.
    number = np.float32(8)
    said = r"mt\.ratio \(reduce_sum .*\): one of its total and its weight is a sum"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(per_token, devices=2), X, number)

    def as_metric(w, batch):
        return losses(w, batch[0]), {"mean": per_token(jax.lax.stop_gradient(w), *batch)}

    with pytest.warns(mt.MultitowerWarning, match=said):
        step_of(as_metric)(W, (X, number))


@pytest.mark.parametrize(
    "weight",
    [
        len,
        lambda x: 2.0 * x.size,
        lambda x: jnp.maximum(jnp.ones_like(x).sum(), 1),
        lambda x: (x > 0).sum(),
        lambda x: (x > 0).sum() + 1e-9,
        lambda x: x.size * np.log(2 * np.pi) + (x > 0).sum(),
        lambda x: jnp.maximum(x[:, 0], 1e-9),
    ],
)
def test_nothing_is_said_of_ratios_of_sums(weight):
    loss = lambda w, x: mt.ratio(losses(w, x).sum(), weight(x)) + (w**2).sum()
    look_at(mt.grad(loss, devices=2), X)


def test_a_sum_beside_a_ratio_is_told_with_its_own_line():
    # The lie: the ratio's total, on the line above, is the sum that is wrong.
    def loss(w, x):
        masked = mt.ratio((losses(w, x) * (x[:, 0] > 0)).sum(), (x[:, 0] > 0).sum())
        return masked + losses(w, x).sum()  # the sum

    with pytest.warns(mt.MultitowerWarning, match=r"reduce_sum at [^\n]*# the sum\): it is a sum"):
        mt.grad(loss, devices=2)(W, X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weight",
    [
        lambda mask: jnp.maximum(mask.sum(), 1),
        lambda mask: jnp.where(mask.any(), mask.sum(), 1),
        lambda mask: mask / mask.sum(),
    ],
    ids=["floor", "chosen", "by row"],
)
def test_a_weight_that_is_no_sum_over_rows_is_told(weight):
    # The lie: a tower whose mask is empty counts as a row, and the loss is too small.
    loss = lambda w, x: mt.ratio(losses(w, x) * (x[:, 0] > 0), weight(x[:, 0] > 0))
    said = r"mt\.ratio .*: the weight is made of"
    for run in (mt.grad(loss, devices=2), step_of(loss)):
        with pytest.warns(mt.MultitowerWarning, match=said) as told:
            run(W, X)
        assert len(ours(told)) == 1


def penalty(w):
    return (w**2).sum()


def stacked_terms(w, x):
    terms = {"losses": losses(w, x).sum(), "penalty": penalty(w)}
    return jnp.stack([*terms.values()]).sum()


def stacked_terms_by_row(w, x):
    return (jnp.stack([losses(w, x).sum(), penalty(w)]) * jnp.array([1.0, len(x)])).sum()


def summed_in_a_loop(w, x, start=0.0):
    """Adds up three sums over rows."""
    add = lambda total, scale: (total + losses(scale * w, x).sum(), None)
    return jax.lax.scan(add, start, jnp.array([1.0, 2, 3]))[0]


@pytest.mark.parametrize(
    ("loss", "options"),
    [
        (lambda w, x: losses(w, x).sum() + penalty(w), {"reduction": "sum"}),
        (lambda w, x: 0.1 * penalty(w) - (-losses(w, x)).sum(), {"reduction": "sum"}),
        (lambda w, x: summed_in_a_loop(w, x, penalty(w)), {"reduction": "sum"}),
        (lambda w, x: (losses(w, x).sum() + penalty(w)) / len(x), {}),
        (lambda w, x: mt.ratio(losses(w, x).sum() + penalty(w), len(x)), {}),
        (lambda w, x: mt.ratio(losses(w, x).sum(), (x[:, 0] > 0).sum() + 1), {}),
        (lambda w, x: mt.ratio(2 + losses(w, x).sum(), x.size), {}),
        (lambda w, x: losses(w, x).sum() + losses(w, x).mean(), {"reduction": "sum"}),
        (stacked_terms, {"reduction": "sum"}),
        (lambda w, x: (2 * jnp.array([losses(w, x).sum(), w[0]])).sum(), {"reduction": "sum"}),
    ],
    ids=["sum", "minus", "loop", "mean", "ratio", "weight", "number", "of rows", "stack", "array"],
)
def test_a_number_that_every_tower_adds_to_a_sum(loss, options):
    # The lie: a penalty on the weights counts once in every tower, and nobody is told.
    said = r"(loss|mt\.ratio) \((add|sub|reduce_sum) at .*\): a number that is the same in every"
    for run in (mt.grad(loss, devices=2, **options), step_of(loss, **options)):
        with pytest.warns(mt.MultitowerWarning, match=said) as told:
            run(W, X)
        assert len(ours(told)) == 1


# One function each: what was looked at once is not looked at again.
@pytest.mark.parametrize(
    ("loss", "w"),
    [
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + penalty(w), 0 * W),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + penalty(w), np.ones(3, np.float32)),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + w**2, np.float32(2)),
        (lambda w, x: ((w * x).sum(1) ** 2).sum() + w**2, 0.5),
    ],
    ids=["zeros", "NumPy", "scalar", "Python"],
)
def test_a_penalty_on_parameters_of_every_kind(loss, w):
    # The lie: nothing is added as long as the weights are zero, as they are at the first step, or
    # if NumPy or Python can compute the penalty.
    with pytest.warns(mt.MultitowerWarning, match=r"\(add at .*\): a number that is the same"):
        mt.grad(loss, devices=2, reduction="sum")(w, X)


LOG_NORMAL = 0.5 * np.log(2 * np.pi)


@pytest.mark.parametrize(
    ("loss", "reduction"),
    [
        (lambda w, x: losses(w, x) + penalty(w), "sum"),
        (lambda w, x: losses(w, x).mean() + penalty(w), "mean"),
        (lambda w, x: losses(w, x).sum() / len(x) + penalty(w), "mean"),
        (lambda w, x: losses(w, x).sum() + 0.0 * penalty(w), "sum"),
        (summed_in_a_loop, "sum"),
        (lambda w, x: jnp.stack([losses(w, x).sum(), jnp.zeros(())]).sum(), "sum"),
        (lambda w, x: jnp.append(losses(w, x).sum(), np.zeros(2, np.float32)).sum(), "sum"),
        (lambda w, x: jnp.stack([losses(w, x).mean(), penalty(w)]).sum(), "mean"),
        (lambda w, x: jnp.stack([losses(w, x).sum(), penalty(w)])[0], "sum"),
        (stacked_terms_by_row, "sum"),
        (lambda w, x: jnp.stack([losses(w, x).sum(), penalty(w)]) @ jnp.array([1, len(x)]), "sum"),
        (lambda w, x: losses(w, x).sum() + len(x) * jnp.log(penalty(w)), "sum"),
        (lambda w, x: (losses(w, x).sum() - -len(x) * (jnp.log(w[0]) + 1)) / len(x), "mean"),
        (lambda w, x: losses(w, x).sum() + 0.5 * len(x) * jnp.log(penalty(w)), "sum"),
        (lambda w, x: losses(w, x).sum() + len(x) * LOG_NORMAL, "sum"),
        (lambda w, x: losses(w, x).sum() + penalty(w) * len(x) / 60_000, "sum"),
        (lambda w, x: losses(w, x).sum() + penalty(w) * len(x) / 60_000 * w[0], "sum"),
        (lambda w, x: losses(w, x).sum() + len(x) / 60_000 * penalty(w), "sum"),
        (lambda w, x: losses(w, x).sum() + penalty(w) / (60_000 / len(x)), "sum"),
        (lambda w, x: losses(w, x).sum() + 0.37 * len(x) * penalty(w), "sum"),
        (lambda w, x: losses(w, x).sum() / (0.37 * len(x)) + penalty(w), "mean"),
        (lambda w, x: losses(w, x).sum() + 0.5 * len(x) / 1_281_167 * penalty(w), "sum"),
        (lambda w, x: losses(w, x).sum() + (jnp.ones(len(x)) * penalty(w)).sum(), "sum"),
    ],
)
def test_nothing_is_said_of_what_belongs_to_a_sum(loss, reduction):
    # The lie: n times log(sigma) is no sum over n rows. Warnings are errors.
    value, _ = mt.value_and_grad(loss, devices=2, reduction=reduction)(W, X)
    expected = jnp.sum(loss(W, X))
    np.testing.assert_allclose(value, expected, rtol=1e-5)


@pytest.mark.parametrize(
    "share",
    [
        lambda w, num_towers: 0.1 * penalty(w) / num_towers,
        lambda w, num_towers: penalty(w) * (0.1 / num_towers),
    ],
)
def test_nothing_is_said_of_a_penalty_that_towers_share(share):
    # The lie: the warning stays when its advice was taken.
    def loss(w, x):
        return losses(w, x).sum() + share(w, jax.lax.axis_size("towers"))

    for options in ({"devices": 2}, {"devices": 2, "towers": 4}):
        value, _ = mt.value_and_grad(loss, reduction="sum", **options)(W, X)
        np.testing.assert_allclose(value, losses(W, X).sum() + 0.1 * penalty(W), rtol=1e-5)


def test_an_array_in_aux_that_adds_up_rows():
    # The lie: the rows of every class, or of every code of a codebook, are those of one tower.
    counted = lambda w, x: (losses(w, x), 0.9 * jax.lax.stop_gradient(w) + x.sum(0))
    said = r"aux \(reduce_sum .*\): it is a sum over rows.*jax.lax.psum\(x, \"towers\"\) \* 1.0"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(counted, devices=2, has_aux=True), X)
    advised = lambda w, x: (losses(w, x), jax.lax.psum(x.sum(0), "towers") * 1.0)
    _, total = mt.grad(advised, devices=2, has_aux=True)(W, X)
    np.testing.assert_allclose(total, X.sum(0), rtol=1e-5)


def test_means_that_a_program_lays_out_are_means():
    # The lie: an operation that jnp.stack got in JAX 0.10 brings means together with themselves.
    def loss(w, x):
        z = x * w
        one, other, _ = z.mean(0)
        shares = jnp.zeros(3).at[z.argmax(1)].add(1 / len(z))
        return (z**2).mean(), (jnp.stack([one, other, 3.0]), jnp.fft.rfft(z.mean(0)).real, shares)

    look_at(mt.grad(loss, devices=2, has_aux=True), X)  # warnings are errors


def test_a_mean_and_what_counts_rows():
    # The lie: log(sigma) times the number of rows of a tower, beside a mean.
    loss = lambda w, x: losses(w, x).mean() + len(x) * jnp.log(penalty(w))
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(mul at .*\): it depends on the number"):
        look_at(mt.grad(loss, devices=2), X)


def halves(w, x):
    one, other = jnp.split(x @ w, 2)  # two views, one after the other: fails with an odd number
    return ((one - other) ** 2).mean()


def first_half(w, x):
    z = x @ w
    return ((z[: len(z) // 2] - z[len(z) // 2 :]) ** 2).mean()


def views(w, x):
    z = (2 * jnp.tanh(x @ w)).reshape(2, -1)
    return ((z[0] - z[1]) ** 2).mean()


def unpacked_views(w, x):
    one, other = jnp.tanh(x @ w).reshape(2, -1)
    return jnp.vdot(one, 2 * other) / len(x)


def sum_of_views(w, x):
    z = jnp.tanh(x @ w).reshape(2, -1)
    return (2 * z.sum(0) ** 2).mean()


def largest_view(w, x):
    return (x @ w).reshape(2, -1).max(0).mean()


def view_after_view(w, x):
    step = lambda before, z: (jnp.tanh(before + z), before)
    return jax.lax.scan(step, jnp.zeros(len(x) // 2), (x @ w).reshape(2, -1))[1].mean()


def views_beside_each_other(w, x):
    z = jnp.tanh(x @ w).reshape(2, -1).T
    return (z[:, 0] * z[:, 1]).mean()


def softmax_of_views(w, x):
    z = jnp.tanh(x * w).reshape(2, -1, 3).swapaxes(0, 1)
    return jax.nn.softmax(z, axis=1)[:, 0].mean()


def one_pair_by_vmap(w, x):
    return jax.vmap(lambda z: z[0] @ z[1])((x * w).reshape(2, -1, 3).swapaxes(0, 1)).mean()


def one_pair_after_another(w, x):
    pairs = (x * w).reshape(2, -1, 3).swapaxes(0, 1)
    return jax.lax.map(lambda z: (z.sum(0) ** 2).sum(), pairs).mean()


def views_side_by_side(w, x):
    return jax.lax.map(lambda views: views[0] @ views[1], tuple((x * w).reshape(2, -1, 3))).mean()


def pair_of_what_a_loop_made(w, x):
    views = jax.lax.map(lambda z: jnp.tanh(z @ w), x.reshape(2, -1, 3).swapaxes(0, 1))
    return (views[:, 0] * views[:, 1]).mean()


def views_of_a_branch(w, x):
    z = jax.lax.cond(w[0] > 0, jnp.tanh, jnp.sin, (x @ w).reshape(2, -1))
    return (z[0] * z[1]).mean()


def views_that_a_loop_carries(w, x):
    z = jax.lax.fori_loop(0, 3, lambda _, z: jnp.tanh(z * w[0]), (x @ w).reshape(2, -1))
    return (z[0] * z[1]).mean()


def other_view(w, x):
    z = (x * w).reshape(2, -1, 3)
    return jnp.einsum("vbd,vbd->b", z, z[::-1]).mean()


def pairs_of_sums(w, x):
    mean = jnp.tile((x @ w).reshape(2, -1).mean(0), 2)
    return (mean.reshape(-1, 2)[:, ::-1] ** 2).mean()


def heads_of_tasks(w, x):
    heads = w * jnp.array([[1.0], [-1.0]])
    return (jnp.einsum("tnd,td->tn", x.reshape(2, -1, 3), heads) ** 3).mean()


def signs_of_halves(w, x):
    return jax.nn.softplus((x @ w).reshape(2, -1) * jnp.array([[-1.0], [1.0]])).mean()


def numbers_of_halves(w, x):
    of_half = lambda rows, number: losses(w, rows) * jnp.tanh(number)
    return jax.vmap(of_half)(x.reshape(2, -1, 3), jnp.arange(2.0)).mean()


def each_half_its_own_loss(w, x):
    labelled, other = (x @ w).reshape(2, -1)
    return (labelled**2).mean() + jnp.abs(other).mean()


def each_half_its_own_weight(w, x):
    z = (x @ w).reshape(2, -1)
    return 0.9 * (z[0] ** 2).mean() + 0.1 * (z[1] ** 2).mean()


def half_less_half(w, x):
    scores = (x @ w).reshape(2, -1)
    return (scores[0].mean() - scores[1].mean()) * 2


def half_alone(w, x):
    return jnp.tanh((x @ w).reshape(2, -1)[0]).mean() + (w**2).sum()


def two_losses_beside_each_other(w, x):
    rows = (x @ w).reshape(2, -1)
    return jnp.stack([fn(z).mean() for fn, z in zip((jnp.abs, jnp.tanh), rows, strict=True)]).mean()


VIEWS = [
    each_half_its_own_loss,
    each_half_its_own_weight,
    half_less_half,
    half_alone,
    two_losses_beside_each_other,
    heads_of_tasks,
    signs_of_halves,
    numbers_of_halves,
    views,
    unpacked_views,
    sum_of_views,
    largest_view,
    view_after_view,
    pairs_of_sums,
    views_beside_each_other,
    softmax_of_views,
    one_pair_by_vmap,
    other_view,
    one_pair_after_another,
    views_side_by_side,
    pair_of_what_a_loop_made,
    views_of_a_branch,
    views_that_a_loop_carries,
]


@pytest.mark.parametrize("loss", VIEWS)
def test_views_by_reshape_are_not_those_of_a_tower(loss):
    # The lie: a reshape to two views is a loop over chunks.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(chunks at .*\): a part of the rows is"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "reorder",
    [
        lambda h: h.reshape(2, -1).T.reshape(-1),
        lambda h: h.reshape(-1, 2).T.reshape(-1),
        lambda h: h.reshape(2, -1)[::-1].reshape(-1),
    ],
    ids=["halves in turn", "even rows first", "second half first"],
)
def test_rows_in_another_order_are_not_those_of_a_tower(reorder):
    # The lie: a reshape and a transposition leave every row where it was.
    loss = lambda w, x: (reorder(jnp.tanh(x @ w)) * x[:, 0]).mean()
    with pytest.warns(
        mt.MultitowerWarning, match=r"loss \(layout at .*\): values of different rows"
    ):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize("loss", [halves, first_half])
@pytest.mark.parametrize(
    "entry", ["value_and_grad", pytest.param("same bits", marks=pytest.mark.slow)]
)
def test_halves_of_the_batch_are_not_those_of_a_tower(entry, loss):
    # The lie: two views of an image are compared, and they are views of two images.
    said = r"loss \((split|slice) at .*\): a part of the rows is taken.*view1"
    with pytest.warns(mt.MultitowerWarning, match=said):
        ENTRIES[entry](loss)(W, X)


def by_length(w, x):
    z, half = x @ w, len(x) // 2
    return ((z[:half] - z[half:]) ** 2).mean()


def test_halves_of_three_rows_broadcast():
    """Lie: silence, because the look failed with all other numbers of rows that it chose."""
    with pytest.warns(mt.MultitowerWarning, match=r"slice at .*a part of the rows is taken"):
        look_at(mt.grad(by_length, devices=1), X[:3])


def smallest_and_largest(w, x):
    pick = lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))
    low, high = jax.lax.reduce((x @ w, x @ w), (np.float32(9), np.float32(-9)), pick, (0,))
    return high - low


def test_a_reduction_of_a_users_own_brings_rows_together():
    # The lie: what jax.lax.reduce does with two elements is done with each row.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(reduce at .*\): rows are brought"):
        look_at(mt.grad(smallest_and_largest, devices=2), X)


def in_chunks(w, x):
    """The sum of some rows' losses and how many these are, two chunks one after the other."""

    @jax.checkpoint
    def add(found, rows):
        some = rows[:, 0] > 0
        return (found[0] + (losses(w, rows) * some).sum(), found[1] + some.sum()), None

    return jax.lax.scan(add, (0.0, 0), x.reshape(2, -1, 3))[0]


def rows_added_up(w, chunks):
    add = lambda total, rows: (total + losses(w, rows), None)
    return jax.lax.scan(add, jnp.zeros(chunks.shape[1]), chunks)[0]


@pytest.mark.parametrize(
    ("of_chunks", "said"),
    [
        (lambda total, count: total / count, r"div at .*\): rows are brought together"),
        (lambda total, _: total, r"reduce_sum at .*\): it is a sum over rows"),
        (lambda total, _: jnp.log(total), r"log at .*\): rows are brought together"),
    ],
)
def test_a_loss_in_chunks(of_chunks, said):
    # The lie: what a loop over chunks of rows adds up is nothing to look at.
    loss = lambda w, x: of_chunks(*in_chunks(w, x))
    with pytest.warns(mt.MultitowerWarning, match=rf"loss \({said}"):
        look_at(mt.grad(loss, devices=2), X)


def test_a_loss_in_chunks_of_many_rows():
    # The lie: a loss that takes 64, 128 ... rows, and no other number, is not looked at.
    def loss(w, x):
        chunks = x.reshape(-1, 64, 3)
        return jax.lax.map(lambda rows: losses(w, rows), chunks).reshape(-1)

    many = np.tile(X, (16, 1))[:128]
    look_at(mt.grad(loss, devices=2), many)  # warnings are errors
    compared = lambda w, x: loss(w, x) * (x[:, 0] - x[:, 0].mean())
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        look_at(mt.grad(compared, devices=2), many)


def test_a_loss_of_fixed_rows_is_told_where_it_is_wrong_or_right():
    # The lie: a loss that cannot be read brings no rows together.
    alike = jnp.eye(8)  # for a batch of eight rows
    loss = lambda w, x: -(alike[mt.row_index(x)] * ((x * w) @ mt.all_rows(x).T)).sum(1) + x.std()
    with pytest.warns(mt.MultitowerWarning, match="without a look.*takes the 4 rows of a tower"):
        mt.grad(loss, devices=2)(W, X)
    with pytest.raises(TypeError):  # a mistake is told once
        mt.grad(lambda w, x: losses(w, x) + jnp.ones(7), devices=2)(W, X)


@pytest.mark.parametrize(
    "taken",
    [
        lambda x: [x[n] for n in range(len(x))],
        jnp.unstack,
        *(
            pytest.param(taken, marks=pytest.mark.slow)
            for taken in (
                list,
                lambda x: [x[-n : len(x) - n + 1][0] for n in range(len(x), 0, -1)],
                lambda x: [one[0] for one in jnp.split(x, len(x))],
            )
        ),
    ],
)
def test_a_loop_over_the_rows_in_python_is_named(taken):
    # The lie: it takes a part of the rows; or: nothing is wrong with it.
    loss = lambda w, x: sum(losses(w, row[None])[0] for row in taken(x))
    with pytest.warns(mt.MultitowerWarning) as told:
        mt.grad(jax.jit(lambda w, x: loss(w, x) / len(x)), devices=2)(W, X)
    (one,) = told
    assert "goes through its rows one by one in Python (test_first_look.py:" in str(one.message)
    assert mt.check_parallel(lambda w, x: loss(w, x) / len(x), W, X)
    assert not mt.check_parallel(loss, W, X)


def test_a_fault_of_the_look_ends_no_training(monkeypatch):
    # The lie: the function takes no other number of rows than its own.
    def fail(*args, **kwargs):
        raise KeyError("an operation")

    monkeypatch.setattr(first_look, "read", fail)
    with pytest.warns(mt.MultitowerWarning) as told:
        assert mt.grad(losses, devices=2)(W, X).shape == W.shape
    (one,) = told
    assert "which failed: KeyError: 'an operation'. Please report it" in str(one.message)


def test_a_loop_over_the_rows_in_python_is_traced_once():
    # The lie: a loop that takes a second to trace costs five at the first call.
    traced = []

    def loss(w, x):
        traced.append(len(x))
        return sum(losses(w, row[None])[0] for row in x) / len(x)

    with pytest.warns(mt.MultitowerWarning, match="one by one"):
        mt.grad(loss, devices=2)(W, X)
    assert len([rows for rows in traced if rows > len(X)]) == 1


def test_a_loss_that_sends_rows_to_each_tower_is_read():
    # The lie: a loss for two towers cannot be read with eleven, and so it is right.
    sent = lambda w, x: jax.lax.all_to_all(x * w, "towers", 0, 1, tiled=True)
    right = lambda w, x: (sent(w, x) ** 2).mean()
    look_at(mt.grad(right, devices=2), X)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        look_at(mt.grad(lambda w, x: right(w, x) + (x * w).std(), devices=2), X)


def adding_chunks_up(w, x):
    add = lambda total, rows: (total + losses(w, rows).sum(), None)
    return jax.lax.scan(add, 0.0, x.reshape(-1, 32, 3))[0]


def test_a_sum_over_chunks_or_pairs_of_rows_is_told():
    """Lie: a sum over 128 rows, in chunks of 32 or over pairs that are neighbours, is a mean."""
    many = np.tile(X, (16, 1))
    mean = lambda w, x: adding_chunks_up(w, x) / len(x)
    look_at(mt.grad(mean, devices=2), many)  # warnings are errors
    prefer = lambda w, x: -jax.nn.log_sigmoid((x @ w)[0::2] - (x @ w)[1::2])  # Rafailov et al. 2023
    look_at(mt.grad(lambda w, x: prefer(w, x).mean(), devices=2), many)
    for wrong in (lambda w, x: adding_chunks_up(w, x) / 128, lambda w, x: prefer(w, x).sum()):
        with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): it is a sum over rows"):
            look_at(mt.grad(wrong, devices=2), many)


def test_a_checkpoint_in_a_loop_over_rows_only_adds_them_up():
    # The lie: jax.checkpoint around the body of a loop brings the rows together.
    def loss(w, x):
        add = jax.checkpoint(lambda total, row: (total + losses(w, row[None])[0], None))
        return jax.lax.scan(add, 0.0, x)[0] / len(x)

    look_at(mt.grad(loss, devices=2), X)  # warnings are errors


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: (((x @ w)[0::2] - (x @ w)[1::2]) ** 2).mean(),
        lambda w, x: (jnp.diff((x @ w).reshape(-1, 2)) ** 2).mean(),
        lambda w, x: jax.lax.map(lambda rows: losses(w, rows), x.reshape(2, -1, 3)).mean(),
        lambda w, x: (x.reshape(2, -1, 3) * jnp.ones((2, 1, 3)) * w).mean(),
        lambda w, x: (losses(w, x).reshape(-1, 2) * jnp.array([1.0, 2.0])).mean(),
        lambda w, x: in_chunks(w, x)[0] / len(x),
        lambda w, x: in_chunks(w, x)[0] * (1000 / len(x)),  # of a data set of 1000 rows
        lambda w, x: mt.ratio(*in_chunks(w, x)),
        lambda w, x: sum(z**2 for z in jnp.split(jnp.concatenate([x, 2 * x]) @ w, 2)),
        lambda w, x: sum(losses(w, rows).sum() for rows in x.reshape(2, -1, 3)) / len(x),
        lambda w, x: jnp.stack([losses(w, rows) for rows in x.reshape(2, -1, 3)]).mean(),
        lambda w, x: jnp.where(w[0] > 0, sum(losses(w, x.reshape(2, -1, 3))), 0).mean() / 2,
        lambda w, x: (rows_added_up(w, x.reshape(2, -1, 3)) / 2).mean(),
        lambda w, x: (jax.grad(lambda x: losses(w, x.reshape(2, -1, 3)).sum())(x) ** 2).mean(),
        lambda w, x: losses(w, jnp.tanh(x.reshape(2, -1, 3).swapaxes(0, 1))).mean(),
        lambda w, x: losses(w, jnp.tanh(x.reshape(2, -1, 3).mT).mT.reshape(-1, 3)),
        lambda w, x: (x @ w) * jnp.tanh((x @ w).reshape(2, -1).T).T.reshape(-1),
        lambda w, x: (
            (x @ w) * jnp.tanh((x @ w).reshape(2, -1).T.reshape(-1)).reshape(-1, 2).T.ravel()
        ),
        lambda w, x: (
            (x @ w) * jnp.tanh((x @ w).reshape(-1, 2).T.reshape(-1)).reshape(2, -1).T.ravel()
        ),
        lambda w, x: (x @ w) * jnp.tanh((x @ w).reshape(2, -1)[::-1])[::-1].reshape(-1),
        lambda w, x: (
            (x @ w) * jnp.tanh((x @ w).reshape(2, -1)[::-1].ravel()).reshape(2, -1)[::-1].ravel()
        ),
        lambda w, x: jnp.prod((x @ w).reshape(-1, 2).T, axis=0).mean(),
        lambda w, x: jax.lax.map(lambda z: z[0] @ z[1], (x * w).reshape(-1, 2, 3)).mean(),
        lambda w, x: jax.lax.map(jnp.sum, (x * w).reshape(2, -1, 3).swapaxes(0, 1)).mean(),
        lambda w, x: jnp.einsum("bvd,bvd->b", x.reshape(-1, 2, 3), x.reshape(-1, 2, 3) * w).mean(),
        lambda w, x: jnp.einsum(
            "vbd,vbd->vb", (x * w).reshape(2, -1, 3), x.reshape(2, -1, 3)
        ).mean(),
    ],
    ids=[
        "neighbours",
        "pairs",
        "chunks",
        "alike in chunks",
        "weights of neighbours",
        "mean",
        "data set",
        "ratio",
        "views of a row",
        "loop of Python",
        "loop that stacks",
        "sum of chunks",
        "scan that adds",
        "gradient",
        "beside each other",
        "other axes",
        "beside and back",
        "in turn and back",
        "even first and back",
        "second half first and back",
        "reversed rows and back",
        "product of pairs",
        "one pair after another",
        "sums one after another",
        "pairs by einsum",
        "views by einsum",
    ],
)
def test_nothing_is_said_of_groups_of_rows(loss):
    look_at(mt.grad(loss, devices=2), X)  # warnings are errors


def in_turn(w, x):
    total = 0.0
    for rows in x.reshape(4, -1, 3):
        total = total + losses(w, rows).mean() + 0.1 * jnp.abs(rows @ w).mean()
    return total / 4 + (w**2).sum()


def running_mean(w, x):
    mean = jnp.zeros(())
    for number, rows in enumerate(x.reshape(4, -1, 3)):
        mean += (losses(w, rows).mean() - mean) / (number + 1)
    return mean


def term_by_term(w, x):
    chunks = list(zip(x.reshape(2, -1, 3), x[:, 0].reshape(2, -1), strict=True))
    errors = sum(((rows @ w - y) ** 2).mean() for rows, y in chunks)
    return (errors + sum(jax.jit(losses)(w, rows).mean() for rows, _ in chunks)) / 2


def with_noise_of_its_own(w, x):
    keys = jax.random.split(jax.random.PRNGKey(0), 2)
    rows = zip(keys, x.reshape(2, -1, 3), strict=True)
    return sum(losses(w * jax.random.normal(key, (3,)), z).mean() for key, z in rows) / 2


def beside_the_whole(w, x):
    of_chunks = [losses(w, rows).astype(jnp.bfloat16) for rows in x.reshape(2, -1, 3)]
    return losses(w, x).mean() + jnp.concatenate(of_chunks).astype(jnp.float32).mean()


def rounded_now_and_then(w, x):
    one, two, three, four = (losses(w, rows).mean() for rows in x.reshape(4, -1, 3))
    narrow = lambda loss: loss.astype(jnp.bfloat16)
    return (narrow(one + two) + narrow(three) + narrow(four)).astype(jnp.float32) / 4


@pytest.mark.parametrize(
    "loss",
    [
        in_turn,
        running_mean,
        term_by_term,
        with_noise_of_its_own,
        beside_the_whole,
        rounded_now_and_then,
    ],
)
def test_nothing_is_said_of_chunks_that_are_treated_alike(loss):
    # The lie: gradient accumulation by hand is two losses of two parts.
    look_at(mt.grad(loss, devices=2), X)  # warnings are errors


def test_a_state_may_follow_chunk_after_chunk():
    # The lie: statistics that a loop over chunks updates are no statistics.
    def loss(w, x, *, model_state):
        for rows in x.reshape(2, -1, 3):
            model_state = 0.9 * model_state + 0.1 * rows.mean(0)
        return losses(w, x), {}, model_state

    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=2)
    step(step.init(W, model_state=jnp.zeros(3)), X)  # warnings are errors


def test_nothing_is_said_of_groups_that_a_library_makes():
    # The lie: Optax reshapes the rows, and a reshape without a line of the user's was no reshape.
    mean, kind = lambda w, x: losses(w, x).mean(), optax.microbatching.AccumulationType.MEAN
    loss = optax.microbatching.microbatch(mean, 1, microbatch_size=2, accumulator=kind)
    look_at(mt.grad(loss, devices=2), X)


def test_a_matrix_that_mixes_rows():
    # The lie: the sums up to each row begin anew in every tower.
    with pytest.warns(mt.MultitowerWarning, match=r"result \(dot_general .*\): rows are brought"):
        mt.make_parallel(lambda x: jnp.tril(jnp.ones((len(x), len(x)))) @ x, devices=2)(X)


def test_make_parallel_warns_of_rows_that_meet():
    with pytest.warns(mt.MultitowerWarning, match=r"result \(reduce_max .*\): rows are brought"):
        mt.make_parallel(lambda x: x - x.max(0), devices=2)(X)


@pytest.mark.parametrize(
    ("fn", "said"),
    [
        (lambda x: (x, x.sum()), r"result\[1\] \(reduce_sum .*\): it depends on the rows.*psum"),
        (lambda x: (x, {"rows": x}), r"result\[1\]\['rows'\]: it depends on the rows"),
    ],
)
def test_make_parallel_warns_of_a_result_that_is_one_tower_s(fn, said):
    # The lie: the sum of a batch is that of the first tower's rows.
    with pytest.warns(mt.MultitowerWarning, match=said):
        mt.make_parallel(fn, out_axes=(0, None), devices=2)(X)


def test_make_parallel_warns_of_rows_on_any_axis():
    with pytest.warns(mt.MultitowerWarning, match=r"result \(reduce_max .*\): rows are brought"):
        mt.make_parallel(lambda x: x - x.max(1, keepdims=True), 1, 1, devices=2)(X.T)


def test_nothing_is_said_of_a_result_that_towers_share():
    def fn(key, x):
        whole = jax.lax.psum(x.sum(), "towers"), mt.all_rows(x).max(0)
        return x, (*whole, jnp.ones(3), jax.random.split(key))

    mt.make_parallel(fn, out_axes=(0, None), devices=2)(jax.random.key(0), X)  # warnings are errors


def test_nothing_is_said_of_what_is_meant():
    # The lie: a warning at every random number, until nobody reads them.
    with warnings.catch_warnings():
        warnings.simplefilter("error", mt.MultitowerWarning)
        noisy = mt.value_and_grad(
            lambda w, key, x: losses(w, x + jax.random.normal(key, x.shape)), devices=2
        )
        noisy(W, jax.random.key(0), X)
        shared = mt.make_parallel(
            lambda key, x: x + jax.random.normal(key, x.shape), in_axes=(None, 0), devices=2
        )
        shared(jax.random.key(0), X)


def normalised(w, batch, *, model_state):
    mean = batch.mean(0)
    return losses(w, batch - mean), {}, 0.9 * model_state + 0.1 * mean


def normalised_with_aux(w, mean, x):
    return losses(w, x - x.mean(0)).mean(), 0.9 * mean + 0.1 * x.mean(0)


def step_with_statistics(devices=2, **options):
    step = mt.train_step(normalised, optax.sgd(0.1), devices=devices, **options)
    state, metrics = step(step.init(W, model_state=jnp.zeros(3)), X)
    step(state, X)
    return metrics["loss"]


def value_with_statistics(devices=2, **options):
    run = mt.value_and_grad(
        normalised_with_aux, has_aux=True, in_axes=(None, None, 0), devices=devices, **options
    )
    (value, _), _ = run(W, jnp.zeros(3), X), run(W, jnp.zeros(3), X)
    return value[0]


def step_with_those_of_tower_0(**options):
    return step_with_statistics(model_state_from="first", **options)


@pytest.mark.parametrize(
    "run",
    [
        step_with_statistics,
        pytest.param(step_with_those_of_tower_0, marks=pytest.mark.slow),
        value_with_statistics,
    ],
)
def test_batch_norm_without_towers_is_told_once(run):
    # The lie: another model on another number of devices, and nobody is told.
    said = r"loss \(.*mean\(0\).*\): rows are normalised with statistics of their own tower's rows"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run()
    assert len(ours(told)) == 1
    assert "towers=2 gives the same" in ours(told)[0]
    run(towers=2)  # as it says, and nothing is left to be told: warnings are errors here
    whole = losses(W, X - X.mean(0)).mean()
    np.testing.assert_allclose(run(devices=1), whole, rtol=1e-6)  # as it says


def test_two_batch_norms_whose_statistics_the_loss_closes_over():
    # The lie: Flax's ImageNet example is told, five times, that it brings rows together.
    def gradient(old, **options):
        def loss(w):  # as with TrainState.batch_stats
            first = X.mean(0)
            hidden = jnp.tanh(X - first)
            second = hidden.mean(0)
            new = [0.9 * a + 0.1 * b for a, b in zip(old, (first, second), strict=True)]
            return losses(w, hidden - second).mean(), new

        return mt.grad(loss, has_aux=True, in_axes={"X": 0}, devices=2, **options)(W)

    old = [jnp.zeros(3), jnp.zeros(3)]
    gradient(old, towers=2)  # warnings are errors here
    with pytest.warns(mt.MultitowerWarning, match="rows are normalised with statistics") as told:
        gradient(old)
    assert len(ours(told)) == 1


def turned_around(x):
    return x * x[::-1]


def compared_with_all(x):
    return jax.nn.softmax(x @ x.T) @ x


def largest_first(x):
    return jnp.sort(x, axis=0)


def divided_by_their_norm(x):
    return x / jnp.linalg.norm(x)


def decayed_by_a_scan(x):
    decay = lambda carry, row: (0.5 * carry + row, 0.5 * carry + row)
    return jax.lax.scan(decay, jnp.zeros(3), x)[1]


def summed_up(x):
    return jnp.cumsum(x, axis=0)


MEETINGS = [turned_around, divided_by_their_norm, summed_up]
MEETINGS_TOO = [compared_with_all, largest_first, decayed_by_a_scan]  # much as the others


@pytest.mark.slow
@pytest.mark.parametrize(
    "mixed", [*MEETINGS, *(pytest.param(fn, marks=pytest.mark.slow) for fn in MEETINGS_TOO)]
)
def test_rows_that_meet_before_a_batch_norm_are_no_statistics(mixed):
    # The lie: a model keeps a running mean of what it makes of rows that met, so that nobody is
    # told of a loss that is not that of one device.
    def loss(w, x, *, model_state):
        hidden = mixed(x)
        mean = hidden.mean(0)
        return losses(w, hidden - mean), {}, 0.9 * model_state + 0.1 * mean

    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        after_a_step(loss)


def a_median(x):
    middle = jnp.median(x, axis=0)
    return x - middle, middle


def a_variance_by_the_mean_of_squares(x):
    mean = x.mean(0)
    variance = (x**2).mean(0) - mean**2
    return (x - mean) / jnp.sqrt(variance + 1e-5), jnp.stack([mean, variance])


def one_in_every_layer(x):
    def layer(h, scale):
        mean = h.mean(0)
        return jnp.tanh(h - mean) * scale, mean

    return jax.lax.scan(layer, x, jnp.array([1.0, 2, 3]))


def folded_into_a_factor_and_a_shift(x):
    mean, variance = x.mean(0), x.var(0)
    deviation = jnp.maximum(jnp.sqrt(variance), 1e-3)
    return x * (1 / deviation) - mean / deviation, jnp.stack([mean, variance])


@pytest.mark.parametrize(
    "norm",
    [
        a_median,
        a_variance_by_the_mean_of_squares,
        folded_into_a_factor_and_a_shift,
        pytest.param(one_in_every_layer, marks=pytest.mark.slow),
    ],
)
def test_statistics_that_are_kept_are_meant(norm):
    def loss(w, x, *, model_state):
        hidden, kept = norm(x)
        return losses(w, hidden), {}, 0.9 * model_state + 0.1 * kept

    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    step(step.init(W, model_state=jnp.zeros_like(norm(X)[1])), X)  # warnings are errors here


def divided_by_their_running_means(w, x, *, model_state):
    each = (losses(w, x)[:, None] * x**2).mean(0)
    running = 0.5 * model_state + 0.5 * each
    return (each / running).sum(), {}, running


def entropy_of_the_mean(w, x, *, model_state):
    mean = jax.nn.softmax(x * w).mean(0)
    return losses(w, x) + (mean * jnp.log(mean)).sum(), {}, 0.9 * model_state + 0.1 * mean


def rows_divided_by_the_mean(w, x, *, model_state):
    running = 0.5 * model_state + 0.5 * (x**2).mean(0)
    return losses(w, x / running), {}, running


def a_masked_mean_on_the_line_of_the_state(w, x, *, model_state):
    mask = x[:, 0] > 0
    # fmt: off
    return (losses(w, x) * mask).sum() / jnp.maximum(mask.sum(), 1), {}, model_state + x.mean(0)
    # fmt: on


def the_load_of_experts(w, x, *, model_state):
    """Experts of a mixture should get as many rows each (Fedus et al. 2021)."""
    gates = jax.nn.softmax(x * w)
    load, share = jax.nn.one_hot(gates.argmax(-1), 3).mean(0), gates.mean(0)
    kept = 0.9 * model_state + 0.1 * (load + share)
    return losses(w, x) + 3 * (load * share).sum(), {}, kept


def a_mean_beside_the_running_mean(w, x, *, model_state):
    running = 0.9 * model_state + 0.1 * (x * w).mean(0)
    return losses(w, x) + ((running - 1) ** 2).sum(), {}, running


def a_product_of_means(w, x, *, model_state):
    first, last = (x * w).mean(0), (x**2).mean(0)
    return losses(w, x) + first @ last, {}, 0.9 * model_state + first + last


@pytest.mark.parametrize(
    "loss",
    [
        divided_by_their_running_means,
        entropy_of_the_mean,
        the_load_of_experts,
        pytest.param(a_mean_beside_the_running_mean, marks=pytest.mark.slow),
        pytest.param(a_product_of_means, marks=pytest.mark.slow),
        pytest.param(rows_divided_by_the_mean, marks=pytest.mark.slow),
        a_masked_mean_on_the_line_of_the_state,
    ],
)
def test_a_kept_mean_that_normalises_no_rows_is_told(loss):
    """Lie: a mean that goes into a state is a statistic, whatever else the loss makes of it."""
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        after_a_step(loss)


def test_a_kept_mean_that_is_only_added_up_is_right():
    def loss(w, x, *, model_state):
        mean = (x * w).mean(0)
        return losses(w, x) + mean.sum(), {}, 0.9 * model_state + 0.1 * mean

    after_a_step(loss)  # warnings are errors here


def test_statistics_that_a_scan_makes_are_meant():
    def loss(w, x, *, model_state):
        total, _ = jax.lax.scan(lambda total, row: (total + row, None), jnp.zeros(3), x)
        mean = total / len(x)
        return losses(w, x - mean), {}, 0.9 * model_state + 0.1 * mean

    after_a_step(loss)  # warnings are errors here


# ---------------------------------------------------------------- a state that adds up rows


def counting(w, batch, *, model_state):
    return losses(w, batch), {}, model_state + (batch > 0).sum(0).astype(model_state.dtype)


def counting_in_place(w, batch, *, model_state):
    above = (batch > 0).sum().astype(model_state.dtype)
    return losses(w, batch), {}, model_state.at[1].set(model_state[1] + above)


def counting_all(w, batch, *, model_state):
    every = jax.lax.psum((batch > 0).sum(0), "towers")
    return losses(w, batch), {}, model_state + every.astype(model_state.dtype)


def averaging_in_place(w, batch, *, model_state):
    return losses(w, batch), {}, model_state.at[1].set(batch.mean())


def revived_by_where(counts):  # codes that nobody uses get the count of the one that most use
    return jnp.where(counts < 0.1, counts.max() / 2, counts)


def revived_by_a_condition(counts):
    return jax.lax.cond((counts < 0.1).any(), revived_by_where, lambda counts: counts, counts)


def revived_in_a_loop(counts):
    is_unused = lambda counts: (counts < 0.1).any()
    split = lambda counts: counts.at[counts.argmin()].set(counts.max() / 2)
    return jax.lax.while_loop(is_unused, split, counts)


def after_a_step(loss, dtype=jnp.float32):
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.zeros(3, dtype)), X)
    return state.model_state


def moments(w, batch, *, model_state):
    """The running mean of observations, as reinforcement learning keeps it."""
    seen, mean = model_state
    rows = batch.shape[0]
    total = seen + rows
    return losses(w, batch), {}, (total, mean + (batch.mean(0) - mean) * rows / total)


def state_after(loss, before, batch=X):
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    return step(step.init(W, model_state=before), batch)[0].model_state


def test_a_state_that_counts_the_rows_of_a_tower_is_told():
    # The lie: every tower counts its own rows, so that the number grows T times too slowly.
    count = lambda w, x, *, model_state: (losses(w, x), {}, model_state + len(x))
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(add .*\): it depends on the num"):
        state_after(count, jnp.int32(0))
    said = r"model_state\[0\] and model_state\[1\] \(add .*seen \+ rows\): it depends on the number"
    with pytest.warns(mt.MultitowerWarning, match=said):
        state_after(moments, (jnp.float32(1), jnp.zeros(3)))
    elements = lambda w, x, *, model_state: (losses(w, x), {}, model_state + x.size)
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(add .*\): it depends on the num"):
        state_after(elements, jnp.int32(0))


@pytest.mark.parametrize(
    "totals",
    [
        lambda state, x: state.at[0].add(len(x)),
        lambda state, x: state + jnp.array([len(x), 1.0]),
    ],
    ids=["in place", "beside another"],
)
def test_rows_that_are_counted_in_one_entry_of_a_state_are_told(totals):
    count = lambda w, x, *, model_state: (losses(w, x), {}, totals(model_state, x))
    with pytest.warns(
        mt.MultitowerWarning, match=r"model_state \((scatter-)?add .*: it depends on"
    ):
        state_after(count, jnp.zeros(2))


def test_a_place_in_a_buffer_that_moves_by_the_rows_of_a_tower_is_told():
    """Lie: the next rows are written over those of this step, as the place has hardly moved."""

    def loss(rows, w, x, *, model_state):
        buffer, place = model_state
        new = mt.all_rows(x)
        buffer = jax.lax.dynamic_update_slice_in_dim(buffer, new, place, 0)
        return losses(w, x), {}, (buffer, (place + len(rows(x))) % len(buffer))

    before = jnp.zeros((4096, 3)), jnp.int32(0)
    with pytest.warns(mt.MultitowerWarning, match=r"model_state\[1\] \(.*: it depends on the num"):
        state_after(functools.partial(loss, lambda x: x), before)
    assert state_after(functools.partial(loss, mt.all_rows), before)[1] == len(X)  # as it says
    # Places in two buffers stop no look.
    turns = lambda w, x, *, model_state: (losses(w, x), {}, (model_state + 1) % np.array([3, 2]))
    np.testing.assert_array_equal(state_after(turns, jnp.ones(2, jnp.int32)), [2, 0])


@pytest.mark.parametrize(
    "change",
    [
        lambda seen, x: seen + len(x) / 1000,
        lambda seen, x: seen + (x.mean() - seen) * (len(x) / 256),
        lambda seen, x: seen * 0.99 ** len(x) + x.mean(),
    ],
    ids=["thousands", "a part of the way", "a half-life"],
)
def test_a_state_that_depends_on_the_rows_of_a_tower_is_told(change):
    # The lie: 0.008 thousand rows of a tower are 0.064 thousand rows of the batch.
    keep = lambda w, x, *, model_state: (losses(w, x), {}, change(model_state, x))
    with pytest.warns(mt.MultitowerWarning, match=r"model_state \(.*\): it depends on the number"):
        state_after(keep, jnp.float32(0))


@pytest.mark.slow
def test_a_state_that_counts_calls_or_the_rows_of_the_batch_is_not_told():
    calls = lambda w, x, *, model_state: (losses(w, x), {}, model_state + 1)
    assert state_after(calls, jnp.int32(0)) == 1
    of_all = lambda w, x, *, model_state: (losses(w, x), {}, model_state + len(mt.all_rows(x)))
    assert state_after(of_all, jnp.int32(0)) == len(X)
    by_size = lambda x: float(len(x) * jax.lax.axis_size("towers"))
    of_sizes = lambda w, x, *, model_state: (losses(w, x), {}, model_state + by_size(x))
    assert state_after(of_sizes, jnp.float32(0)) == len(X)
    thousands = lambda x: jax.lax.psum(len(x), "towers") / 1000
    kept = lambda w, x, *, model_state: (losses(w, x), {}, model_state + thousands(x))
    np.testing.assert_allclose(state_after(kept, jnp.float32(0)), len(X) / 1000)
    given = lambda w, b, *, model_state: (losses(w, b["x"]), {}, model_state + b["rows"])
    assert state_after(given, jnp.int32(0), {"x": X, "rows": np.int32(len(X))}) == len(X)
    last = lambda w, x, *, model_state: (losses(w, x), {}, 0.9 * model_state + x[:, -1].mean())
    state_after(last, jnp.float32(0))


def count_in_aux(w, seen, x):
    return losses(w, x), {"seen": seen["seen"] + x.sum(0)}


@pytest.mark.parametrize("loss", [counting, counting_in_place])
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.int32, marks=pytest.mark.slow)])
def test_a_state_that_adds_up_rows_is_told(loss, dtype):
    # The lie: counts of a codebook or of classes that are T times too small, and nobody is told.
    said = r"model_state \(reduce_sum .*batch > 0.*\): it is kept for the next step, and it adds up"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        after_a_step(loss, dtype)
    # Not those of Python, such as of a file that an earlier test has left open.
    (only,) = [str(one.message) for one in told if one.category is mt.MultitowerWarning]
    assert 'jax.lax.psum(x.sum(0), "towers") to the old value' in only
    np.testing.assert_array_equal(after_a_step(counting_all, dtype), (X > 0).sum(0))  # as it says


@pytest.mark.parametrize("revived", [revived_by_where, revived_by_a_condition, revived_in_a_loop])
@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_state_of_sums_is_told_when_unused_entries_are_replaced(revived, towers):
    # The lie: replacing the codes that nobody uses makes a mean of the counts of a codebook.
    def with_state(update):
        loss = lambda w, kept, x: (
            losses(w, x),
            {"seen": revived(0.9 * kept["seen"] + update(x))},
        )
        run = mt.value_and_grad(
            loss, has_aux=True, in_axes=(None, None, 0), devices=2, towers=towers
        )
        look_at(run, {"seen": jnp.ones(3)}, X)

    with pytest.warns(mt.MultitowerWarning, match="state.* and it adds up rows"):
        with_state(lambda x: (x > 0).sum(0))
    # Of means it adds up nothing, and yet every tower decides by its own.
    with pytest.warns(mt.MultitowerWarning, match="state.* no mean over rows.*decision") as told:
        with_state(lambda x: (x > 0).mean(0))
    assert not [one for one in told if "adds up rows" in str(one.message)]
    with_state(lambda x: jax.lax.psum((x > 0).sum(0), "towers"))


def queueing(rows, w, batch, *, model_state):
    """A queue of the newest rows, as momentum contrast keeps one."""
    return losses(w, batch), {}, jnp.concatenate([rows(batch), model_state])[:300]


def queueing_in_place(rows, w, batch, *, model_state):
    new = rows(batch)
    return losses(w, batch), {}, model_state.at[jnp.arange(len(new))].set(new)


def largest(rows, w, batch, *, model_state):
    top = jnp.full((300, 3), rows(batch).max())
    return losses(w, batch), {}, jnp.maximum(model_state, top)


def high(rows, w, batch, *, model_state):
    """A running percentile, as an agent keeps one to scale its returns."""
    top = jnp.percentile(rows(batch), 95)
    return losses(w, batch), {}, 0.9 * model_state + 0.1 * top


def worst_of_each_class(rows, w, batch, *, model_state):
    """The largest loss of each class so far, as hard examples are looked for."""
    new = rows(batch)
    return losses(w, batch), {}, model_state.at[(new[:, 0] > 0).astype(int)].max(new)


@pytest.mark.parametrize(
    "loss",
    [
        queueing,
        largest,
        worst_of_each_class,
        *(pytest.param(fn, marks=pytest.mark.slow) for fn in (queueing_in_place, high)),
    ],
)
def test_a_state_that_holds_rows_is_told(loss):
    # The lie: a queue of rows that no batch has, means of different rows; a largest or a
    # percentile that is none.
    def queue(rows):
        step = mt.train_step(functools.partial(loss, rows), optax.sgd(0.1), devices=1, towers=4)
        return step(step.init(W, model_state=before), X)[0].model_state

    before = jnp.zeros(() if loss is high else (300, 3))
    said = r"model_state \((concat\w+|scatter|scatter-max|reduce_max|gather) .*\): .* holds rows"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        wrong = queue(lambda x: x)
    assert len(ours(told)) == 1
    on_one_device = loss(lambda x: x, W, X, model_state=before)[2]
    np.testing.assert_allclose(queue(mt.all_rows), on_one_device, rtol=1e-5)  # as it says
    assert (wrong != on_one_device).any()


def test_a_short_queue_that_takes_the_rows_of_all_towers_is_read():
    # The lie: a queue of 64 rows has no room for those that are tried, so nothing is known of it.
    def run(more):
        def loss(w, batch, *, model_state):
            new = jax.lax.dynamic_update_slice(model_state, mt.all_rows(batch), (0, 0))
            return losses(w, batch) + more(batch), {}, new

        step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=2)
        step(step.init(W, model_state=jnp.zeros((64, 3))), np.tile(X, (4, 1)))

    run(lambda x: 0.0)  # warnings are errors
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(.*\): rows are brought together"):
        run(jnp.std)


@pytest.mark.parametrize(
    ("new", "said"),
    [
        (lambda old, z, k: jnp.maximum(old, jax.ops.segment_max(z, k, 2)), "scatter-max"),
        (lambda old, z, k: old.at[k].mul(z), "scatter-mul"),
        (lambda old, z, k: old + jax.lax.reduce(z, 0.0, lambda a, b: a * b + 1, (0,)), "reduce"),
        (
            lambda old, z, k: (
                old + jax.lax.reduce_window(z, 0.0, jax.lax.max, (len(z),), (1,), "VALID")
            ),
            "reduce_window",
        ),
    ],
)
def test_a_state_that_is_no_mean_over_rows_is_told(new, said):
    # The lie: check_parallel says that it is safe, and the state is that of no batch.
    def loss(w, batch, *, model_state):
        found = losses(w, batch)
        kept = jax.lax.stop_gradient(found)
        return found, {}, new(model_state, kept, (batch[:, 0] > 0).astype(int))

    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    with pytest.warns(mt.MultitowerWarning, match=rf"model_state \({said} .*\): it is kept"):
        step(step.init(W, model_state=jnp.zeros(2)), X)


def first(w, batch, *, model_state):
    return losses(w, batch), {}, model_state.at[: len(batch)].set(batch)


def shifted(w, batch, *, model_state):
    return losses(w, batch), {}, jnp.concatenate([batch, model_state[: -len(batch)]])


@pytest.mark.parametrize("loss", [first, shifted])
def test_a_state_that_holds_rows_and_is_short_is_told(loss):
    # The lie: the mean of different rows; and it cannot be read with more rows than it has.
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    state = step.init(W, model_state=jnp.zeros((16, 3)))
    with pytest.warns(mt.MultitowerWarning, match="it is kept .* holds rows"):
        step(state, X)
    report = mt.check_parallel(loss, W, X, model_state=jnp.zeros((16, 3)))
    assert "holds rows" in str(report)


APART = {"towers": 4, "sync_every": 2, "outer_optimizer": optax.sgd(1.0)}
IN_TURNS = {"towers": 4, "updates": "asynchronous"}


@pytest.mark.slow
@pytest.mark.parametrize("options", [APART, IN_TURNS])
def test_towers_that_exchange_nothing_are_not_told_to_add_up_a_state(options):
    # The lie: an advice that the same step refuses.
    step = mt.train_step(counting, optax.sgd(0.1), devices=2, **options)
    with pytest.warns(mt.MultitowerWarning, match="adds up rows.*Keep a mean instead"):
        step(step.init(W, model_state=jnp.zeros(3)), X)


def test_a_state_in_aux_that_adds_up_rows_is_told():
    run = mt.value_and_grad(count_in_aux, has_aux=True, in_axes=(None, None, 0), devices=2)
    with pytest.warns(
        mt.MultitowerWarning, match=r"state\['seen'\] .*it is kept for the next step"
    ):
        look_at(run, {"seen": jnp.zeros(3)}, X)


def test_a_mean_that_is_written_into_a_state_is_right():
    np.testing.assert_allclose(after_a_step(averaging_in_place)[1], X.mean(), rtol=1e-6)


def per_group(losses, groups):
    members = jax.nn.one_hot(groups, 3)
    return members.T @ losses / (members.sum(0) + 1e-6)


def worst_group(w, batch, *, model_state):
    """Distributionally robust: groups of examples with larger losses get larger weights."""
    x, groups = batch
    of_groups = per_group(losses(w, x), groups)
    weights = model_state * jnp.exp(0.1 * jax.lax.stop_gradient(of_groups))
    return (weights / weights.sum()) @ of_groups, {}, weights / weights.sum()


def prototypes(w, batch, *, model_state):
    x, groups = batch
    return losses(w, x), {}, 0.9 * model_state + 0.1 * per_group(x[:, 0], groups)


def multiplier(w, batch, *, model_state):
    return losses(w, batch[0]), {}, jnp.maximum(0, model_state + batch[0].mean())


def soft_maximum(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state * 0.9 + jnp.log(jnp.exp(batch[0]).mean(0))


def adapted(w, batch, *, model_state):
    change = jnp.where(batch[0].mean() > 0.1, 1.5, 1 / 1.5)
    return losses(w, batch[0]), {}, model_state * change


def over_a_norm(w, batch, *, model_state):
    return losses(w, batch[0]), {}, 2 / jnp.linalg.norm(model_state + batch[0].mean(0)) + W


def logarithm_of_a_size(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.log(jnp.abs(batch[0].mean(0)))


def inverse_root(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jax.lax.rsqrt((batch[0] ** 2).mean(0))


def cube(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + batch[0].mean(0) ** 3


def inverse(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + batch[0].var(0) ** -1


def whitening(w, batch, *, model_state):
    covariance = batch[0].T @ batch[0] / len(batch[0])
    return losses(w, batch[0]), {}, jnp.linalg.inv(covariance) @ model_state


def which(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.argmax(batch[0], 0)


def phase(w, batch, *, model_state):
    x = batch[0]
    return losses(w, x), {}, model_state + jnp.arctan2(jnp.sin(x).mean(0), jnp.cos(x).mean(0))


def size_of_all_rows(w, batch, *, model_state):
    return losses(w, batch[0]), {}, model_state + jnp.linalg.norm(batch[0], axis=0)


def power_iteration(w, batch, *, model_state):
    direction = batch[0].T @ (batch[0] @ model_state)
    return losses(w, batch[0]), {}, direction / jnp.linalg.norm(direction)


@pytest.mark.parametrize(
    "loss",
    [
        worst_group,
        prototypes,
        multiplier,
        soft_maximum,
        adapted,
        power_iteration,
        over_a_norm,
        logarithm_of_a_size,
        inverse_root,
        cube,
        inverse,
        whitening,
        which,
        phase,
        size_of_all_rows,
    ],
)
def test_a_state_that_is_made_of_sums_and_no_mean_of_them(loss):
    """Lies: the mean of the towers' quotients or decisions; and no word on the loss beside it."""
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    with pytest.warns(mt.MultitowerWarning) as told:
        step(step.init(W, model_state=jnp.ones(3)), (X, Y))
    found = [str(one.message) for one in told if one.category is mt.MultitowerWarning]
    assert ["no mean over rows" in one for one in found].count(True) == 1
    assert any(one.startswith("loss") for one in found) == (loss is worst_group)


def clipped_variance(w, batch, *, model_state):
    x = batch[0]
    return losses(w, x), {}, jnp.maximum(0, ((x - x.mean(0)) ** 2).mean(0)) + 0.0 * model_state


def test_a_variance_that_is_kept_from_being_negative_is_meant():
    """A false alarm: Equinox's BatchNorm clips a variance that never is negative."""
    step = mt.train_step(clipped_variance, optax.sgd(0.1), devices=1, towers=4)
    step(step.init(W, model_state=jnp.ones(3)), (X, Y))


def test_a_system_with_a_matrix_of_no_rows_is_solved_for_a_mean():
    """A false alarm: the solution for a mean over rows is a mean over rows, as a product is."""
    matrix = np.eye(3, dtype=np.float32) + 0.5
    solved = lambda batch: jnp.linalg.solve(matrix, batch[0].mean(0))
    loss = lambda w, batch, *, model_state: (losses(w, batch[0]), {}, model_state + solved(batch))
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.zeros(3)), (X, Y))
    np.testing.assert_allclose(state.model_state, solved((X, Y)), rtol=1e-4)


class OfMasked(nnx.Module):
    def __init__(self):
        self.norms = nnx.List([nnx.BatchNorm(3, rngs=nnx.Rngs(0)) for _ in range(2)])

    def __call__(self, x, mask):
        for norm in self.norms:
            x = norm(x, mask=mask)
        return x


@pytest.mark.slow
def test_states_of_one_module_are_named_once():
    """A mean of the rows that a mask leaves is a quotient, of four leaves by the same line."""
    loss = lambda model, x, mask: model(x, mask[:, None]).mean(1) ** 2
    run = mt.value_and_grad(loss, devices=2, towers=4)
    with pytest.warns(mt.MultitowerWarning) as told:
        run(OfMasked(), X, Y > 0)
    assert any(str(one.message).startswith("the state of the module (div at") for one in told)


def test_prototypes_of_all_rows_as_the_warning_says():
    def of_all(w, batch, *, model_state):
        x, members = batch[0], jax.nn.one_hot(batch[1], 3)
        total, number = jax.lax.psum((members.T @ x[:, 0], members.sum(0)), "towers")
        return losses(w, x), {}, 0.9 * model_state + 0.1 * total / (number + 1e-6)

    step = mt.train_step(of_all, optax.sgd(0.1), devices=1, towers=4)
    state, _ = step(step.init(W, model_state=jnp.ones(3)), (X, Y))
    expected = 0.9 + 0.1 * per_group(X[:, 0], Y)
    np.testing.assert_allclose(state.model_state, expected, rtol=1e-6)


@pytest.mark.parametrize("towers", [None, 4])
def test_a_loop_whose_number_of_turns_depends_on_rows(towers):
    """Lie: each tower has its own number of turns, in a value that has no rows itself."""

    def loss(w, x):
        fits = lambda scale: jnp.any(jnp.abs(x) * scale > 1)
        scale = jax.lax.while_loop(fits, lambda scale: scale * 0.5, jnp.float32(1))
        return (losses(w, x) - scale) ** 2

    def counted(w, x):
        half = lambda _, scale: scale * 0.5
        return jax.lax.fori_loop(0, jnp.int32(x.sum()), half, jnp.float32(1)) * losses(w, x)

    for one in (loss, counted):
        with pytest.warns(mt.MultitowerWarning, match="loss .while at .*rows are brought together"):
            look_at(mt.value_and_grad(one, devices=2, towers=towers), X)


# ---------------------------------------------------------------- what it used to miss

Y = np.arange(8) % 3
KERNEL = jnp.ones((3, 1))


def run_of(loss, *arguments, **options):
    return mt.value_and_grad(loss, devices=2, **options)(W, *arguments)


def look_at(run, *arguments):
    """Traces a call, and compiles nothing: that the first look comes is shown above."""
    jax.eval_shape(run, W, *arguments)


def contrast(z):
    return -jnp.diagonal(jax.nn.log_softmax(z @ z.T))


def contrast_beside_statistics(w, x):
    z = x * w
    mean = z.mean(0)
    return contrast(z - mean).mean(), mean


def sum_beside_a_vector(w, x):
    return losses(w, x).sum(), x.mean(0)


def neighbours(w, x):
    z = jnp.convolve(x @ w, jnp.ones(3), mode="same")
    return (z - 1) ** 2


def spectrum(w, x):
    return jnp.abs(jnp.fft.fft(x @ w)) ** 2


def until_all_are_small(w, x):
    z = jax.lax.while_loop(lambda z: jnp.any(z > 1), lambda z: z / 2, (x @ w) ** 2 + 2)
    return z


def permuted(w, x):
    return losses(w, x)[jnp.argsort(x[:, 0])] * jnp.arange(x.shape[0])


def inverse(w, x):
    z = x @ x.T + jnp.eye(x.shape[0])
    return jnp.linalg.cholesky(z).sum(1) * w.sum()


@pytest.mark.parametrize(
    ("loss", "options", "said"),
    [
        (contrast_beside_statistics, {"has_aux": True}, r"loss \(.*z @ z.T\)"),
        (sum_beside_a_vector, {"has_aux": True}, "loss .*it is a sum over rows"),
        (neighbours, {}, "rows are brought together"),
        (spectrum, {}, r"loss \(fft .*rows are brought"),
        (permuted, {}, "rows are brought|looks things up"),
        (inverse, {}, "rows are brought together"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_mixes_rows_is_told(loss, options, said):
    # The lie: 4.12 becomes 2.16, and nobody is told.
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.value_and_grad(loss, devices=2, **options), X)


def in_a_buffer(w, x):
    z = x * w
    buffer = jnp.zeros((16, 3)).at[: len(x)].set(z - z.mean(0))
    return buffer[: len(x)].sum(1) ** 2


def with_labels(w, x):
    z = x * w
    return optax.softmax_cross_entropy_with_integer_labels(z @ z.T, jnp.arange(16)[: len(x)])


@pytest.mark.parametrize("loss", [in_a_buffer, with_labels])
@pytest.mark.parametrize("run", [ENTRIES["value_and_grad"], step_of], ids=["gradient", "step"])
def test_what_takes_no_more_rows_than_a_batch_has_is_looked_at(run, loss):
    # The lie: 1.27 becomes 0.53, and nobody is told, because a buffer has the size of a batch.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        run(loss)(W, X)


def solved(w, x):
    z = x * w
    found, _ = jax.scipy.sparse.linalg.cg(lambda v: z @ (z.T @ v) + v, x[:, 0])
    return (found - x[:, 0]) ** 2


def solved_by_row(w, x):
    of_row = lambda row: jax.scipy.sparse.linalg.cg(lambda v: row @ v * row + v, row * w)[0]
    return jax.vmap(of_row)(x).sum(1)


def test_an_iterative_solver_over_rows_is_told():
    # The lies: a kernel matrix of a tower's rows alone; or a warning where each row is solved.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(solved, devices=2), X)
    look_at(mt.value_and_grad(solved_by_row, devices=2), X)


def test_arrays_that_are_copied_together_are_not_taken_for_each_other():
    def loss(w, x):
        x, w = jax.device_put((x, w))
        return jnp.broadcast_to(w, (2, 3)).sum() * losses(w, x)

    look_at(mt.value_and_grad(loss, devices=2), X)


def beside_the_next(w, x):
    return losses(w, x - x[(jnp.arange(len(x)) + 1) % len(x)])


def beside_the_one_before(w, x):
    before = np.mod(np.arange(len(x)) - 1, len(x))
    return losses(w, x - jnp.take(x, before, axis=0))


def beside_the_other_end(w, x):
    return losses(w, x - x[len(x) - 1 - jnp.arange(len(x))])


def beside_the_reversed(w, x):
    return losses(w, x - x[jnp.arange(len(x))[::-1]])


def beside_the_one_behind(w, x):
    return losses(w, x - x[-jnp.arange(len(x))])


def of_all_pairs(w, x):
    one, other = jnp.triu_indices(len(x), 1)
    return (((x @ w)[one] - (x @ w)[other]) ** 2).mean()


@pytest.mark.parametrize(
    "loss",
    [
        beside_the_next,
        beside_the_one_before,
        beside_the_other_end,
        beside_the_reversed,
        beside_the_one_behind,
        of_all_pairs,
        lambda w, x: losses(w, x - x[jnp.arange(len(x)) - 1]),
        lambda w, x: losses(w, x - x[jnp.maximum(jnp.arange(len(x)) - 1, 0)]),
        lambda w, x: losses(w, x[jnp.arange(len(x))[:, None] + jnp.arange(2)].mean(1)),
        lambda w, x: jax.vmap(lambda i: losses(w, x[i] - x[i + 1]))(jnp.arange(len(x))),
    ],
)
def test_rows_that_are_found_by_numbers_of_others_are_told(loss):
    # The lie: an index that is made of the numbers of the rows finds row i.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(gather .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x) - x[jnp.arange(len(x)), jnp.argmax(x, 1)],
        lambda w, x: losses(w, x) - x.reshape(-1)[3 * jnp.arange(len(x)) + jnp.argmax(x, 1)],
        lambda w, x: losses(w, x) - x.reshape(-1)[3 * jnp.arange(len(x)) + 1],
        lambda w, x: losses(w, x) - x.reshape(-1)[3 * np.arange(len(x)) + 1],
        lambda w, x: losses(w, x) - x[jnp.arange(len(x)), (x[:, 0] > 0).astype(int) + 1],
        pytest.param(
            lambda w, x: losses(w, x - jnp.repeat(x, 2, 0)[2 * jnp.arange(len(x)) + 1]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda w, x: losses(w, jnp.asarray(x).at[jnp.arange(len(x)), 1].set(0.0)),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_rows_that_are_found_by_their_own_numbers(loss):
    value, _ = mt.value_and_grad(loss, devices=2, towers=4)(W, X)  # warnings are errors
    np.testing.assert_allclose(value, loss(W, X).mean(), rtol=1e-5)


@pytest.mark.parametrize(
    "turn",
    [
        lambda w, x, i, out: out.at[0].set(losses(w, x[i])),
        lambda w, x, i, out: out.at[i].set(losses(w, x[i]) + out[i - 1]),
        lambda w, x, i, out: (out + losses(w, x[i])).at[i].set(0.0),
        lambda w, x, i, out: out.at[i].set(0.0) + losses(w, x[i]),
    ],
)
def test_a_loop_that_does_more_than_put_a_row_in_its_place_is_told(turn):
    def loss(w, x):
        return jax.lax.fori_loop(0, len(x), lambda *now: turn(w, x, *now), jnp.zeros(len(x)))

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), X)


def test_a_loop_whose_last_row_stays_is_told():
    def loss(w, x):
        put = lambda i, out: out.at[0].set(losses(w, x[i]))
        return jax.lax.fori_loop(0, len(x), put, jnp.zeros(2)).sum()

    with pytest.warns(mt.MultitowerWarning, match=r"loss \(scan .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2, towers=2), X)


def test_a_loop_until_all_rows_are_done_is_told():
    # The lie: rows that are worked on for as long as the slowest one of their tower needs.
    with pytest.warns(mt.MultitowerWarning, match=r"result \(while .*rows are brought"):
        mt.make_parallel(until_all_are_small, in_axes=(None, 0), devices=2)(W, X)  # not traced


def by_class(w, x, y, weights):
    return losses(w, x) * weights[y]


def positions(w, x, y, table):
    return losses(w, x) * table[jnp.arange(3)].sum()


@pytest.mark.parametrize("loss", [by_class, positions])
@pytest.mark.parametrize("towers", [None, pytest.param(4, marks=pytest.mark.slow)])
def test_a_table_as_long_as_the_batch_is_told(loss, towers):
    # The lie: half a table, where an index that is too large is clamped.
    table = np.arange(8.0, dtype=np.float32)
    said = r"(weights|table) \(gather .*like in a table.*: in_axes=\(None, 0, 0, None\)"
    with pytest.warns(mt.MultitowerWarning, match=said) as told:
        run_of(loss, X, Y, table, towers=towers)
    assert len(ours(told)) == 1
    whole = run_of(loss, X, Y, table, towers=towers, in_axes=(None, 0, 0, None))  # as it says
    expected = jax.jit(jax.value_and_grad(lambda *a: loss(*a).mean()))(W, X, Y, table)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), whole, expected)


def test_a_quantile_is_no_table():
    # The lie: an advice to hand every tower the whole of what is a statistic of its own rows.
    loss = lambda w, x, y: losses(w, x) * jnp.quantile(y.astype(float), 0.5)
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2, in_axes=(None, 0, 0)), X, Y)
    assert not any("like in a table" in str(one.message) for one in told)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x[jnp.nonzero(x[:, 0] > 0, size=4, fill_value=0)[0]]).mean(),
        lambda w, x: losses(w, x) * jnp.searchsorted(jnp.sort(x[:, 0]), x[:, 0]),
    ],
    ids=["chosen by a mask", "ranks"],
)
def test_rows_that_rows_choose_are_no_table(loss):
    # The lie: if every tower gets the whole of x, the loss is right.
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert not any("table" in str(one.message) for one in told)


def test_a_table_in_a_batch_is_told():
    def loss(w, batch):
        return losses(w, batch["x"]) * batch["weights"][batch["y"]]

    batch = {"x": X, "y": Y, "weights": np.ones(8, np.float32)}
    step = mt.train_step(loss, optax.sgd(0.1), devices=2)
    with pytest.warns(mt.MultitowerWarning, match=r"batch\['weights'\] \(gather .*like in a table"):
        step(step.init(W), batch)


def test_a_callback_without_a_result_keeps_no_loss_from_being_looked_at():
    """Lie: a counter of rows in a loss, and nothing is said of the mean beside it."""

    def loss(w, x):
        io_callback(lambda x: None, None, x)
        return centred(w, x)

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert len(ours(told)) == 1


def of_the_batch(w, x):
    return losses(w, x) / x.shape[0]


def of_the_data_set(w, x):
    return 60_000 / len(x) * losses(w, x)


def as_a_sum(w, x):
    return jnp.tanh(losses(w, x)) * len(x) + 1


def with_a_share_of_a_penalty(w, x):
    return losses(w, x) + jnp.sum(w**2) / len(x)


def mean_with_a_share(w, x):
    return 2 * (losses(w, x).mean() - jnp.sum(w**2) / len(x))


def mean_divided_again(w, x):
    return losses(w, x).mean() / len(x)


def mean_as_a_sum(w, x):
    return losses(w, x).mean() * len(x)


def mean_over_attacked_rows(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)  # / rows
    return losses(w, x + attack).mean()


MEANS = [mean_with_a_share, mean_divided_again, mean_as_a_sum, mean_over_attacked_rows]


@pytest.mark.parametrize(
    "loss",
    [
        of_the_batch,
        of_the_data_set,
        as_a_sum,
        with_a_share_of_a_penalty,
        *MEANS[:-1],
        pytest.param(MEANS[-1], marks=pytest.mark.slow),
    ],
)
def test_what_is_divided_by_the_number_of_rows_is_told(loss):
    # The lie: a loss that grows with the number of towers, and nobody is told.
    said = r"(loss|result) \((mul|div) .*\): it depends on the number of rows.*undivided"
    runs = [mt.value_and_grad(loss, devices=2)]
    if loss not in MEANS:
        runs.append(mt.make_parallel(loss, in_axes=(None, 0), devices=2))
    for run in runs:
        with pytest.warns(mt.MultitowerWarning, match=said) as told:
            look_at(run, X)
        assert len(ours(told)) == 1
    (problem,) = mt.check_parallel(loss, W, X).problems
    assert problem.kind == ("sum" if loss is mean_as_a_sum else "row count")
    assert "x" in problem.where


def test_a_share_of_a_penalty_is_told_if_its_value_is_known():
    # The lie: outside of jit a few parameters are constants of the program that is looked at, and
    # what was made of constants alone was not followed any further.
    loss = lambda w, x: losses(w, x).mean() + jnp.sum(w) / len(x)
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        mt.value_and_grad(loss, devices=2)(W, X)


def test_a_sum_that_is_given_to_every_row_is_told():
    # The lie: the mean of it over all rows, which is the sum, was taken for a mean.
    loss = lambda w, x: jnp.full(len(x), losses(w, x).sum())
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.grad(loss, devices=2), X)


# ---------------------------------------------------------------- what it used to cry wolf at


def scaled_by_the_data_set(w, x):
    return 60_000 / x.shape[0] * losses(w, x).sum()


def summed_after_it_was_divided(w, x):
    return (losses(w, x) / len(x)).sum()


def weighted(w, x):
    shares = jnp.ones(len(x)) / len(x)
    return (losses(w, x) * shares).sum() + jnp.vdot(x @ w, shares)


def divided_and_multiplied(w, x):
    return jnp.abs(losses(w, x) / len(x)) * len(x)


def mean_multiplied_and_divided(w, x):
    return losses(w, x).mean() * len(x) / len(x) + (losses(w, x) / len(x)).mean() * len(x)


def attacked_by_signs(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    return losses(w, x + 0.1 * jnp.sign(attack)).mean()


def attacked_by_directions(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    norms = jnp.linalg.norm(attack, axis=1, keepdims=True)
    other = jax.lax.rsqrt((attack * attack).sum(1, keepdims=True) + 1e-12)
    return losses(w, x + attack / jnp.maximum(norms, 1e-12) + attack * other).mean()


def attacked_within_limits(w, x):
    attack = jax.grad(lambda x: losses(w, x).mean())(x)
    norms = jnp.linalg.norm(attack, axis=1, keepdims=True)
    is_known = jnp.log(norms) > -30  # asked of it, and not part of it
    within = jnp.where(is_known, attack / jnp.clip(norms, 1e-12, 1e12), 0.0)
    return losses(w, x + within).mean()


def discounted(w, x):
    return losses(w, x) * 0.9 ** mt.row_index(x) * (1 + mt.row_index(x))


def divided_by_a_number(w, x):
    other = x[:, 0] * 1234.5678 / 223
    return losses(w, x) / 211 + other  # numbers of rows that the reader tries


def with_strange_numbers(w, x):
    found = losses(w, x)
    for number in (jnp.nan, jnp.inf, -1e38, 1e-44, 1j, True):
        factor = jnp.asarray(number).real.astype(jnp.float32)
        row = losses(w, x) / number if number else losses(w, x)
        x = x * jnp.abs(row * number * factor)[:, None]
    strange = jnp.abs(x.sum(1) / jnp.float32(0) * jnp.complex64(1j))
    return found + jnp.nan_to_num(strange, posinf=1.0)


def averaged_with_weights(w, x):
    return jnp.average(losses(w, x), weights=jnp.ones(x.shape[0]))


def guarded(w, x):
    mean = losses(w, x).mean()
    small = jax.lax.cond(jnp.isfinite(mean), lambda mean: 0.1 * mean, jnp.zeros_like, mean)
    return jnp.where(jnp.isnan(mean), 0.0, mean) + jnp.nan_to_num(mean) + small


def guarded_by_rows(w, x):
    found = losses(w, x)
    mean = jnp.where(jnp.isnan(found.mean()) & ~jnp.any(jnp.isnan(found)), 0.0, found.mean())
    small = jax.lax.cond(jnp.isfinite(x).all(), lambda: 0.1 * mean, lambda: 0.0 * mean)
    return small + optax.losses.ranking_softmax_loss(x * w, x)


def with_a_full_mask(w, x):
    mask = jnp.ones(x.shape[0], bool)
    return jnp.where(mask, losses(w, x), 0).sum() / mask.sum()


def summed_by_a_scan(w, x):
    total, _ = jax.lax.scan(lambda total, row: (total + losses(w, row), None), 0.0, x)
    return total / x.shape[0]


def with_split(w, x):
    first, second = jnp.split(x @ jnp.ones((3, 4)), 2, axis=1)
    mean = jnp.split((first - second).mean(0), 2)
    return mean[0].sum() * w.sum()


def picked_by_class(w, x):
    logits = x * w
    return -jax.nn.log_softmax(logits)[jnp.arange(x.shape[0]), (x[:, 0] > 0).astype(int)]


def picked_by_numbers_of_numpy(w, x):
    return -jax.nn.log_softmax(x * w)[np.arange(len(x)), (x[:, 0] > 0).astype(int)]


def picked_along_axis(w, x):
    largest = jnp.argmax(x, axis=1)
    return jnp.take_along_axis(x * w, largest[:, None], axis=1)[:, 0]


def looked_up(w, x):
    return w[(x[:, 0] > 0).astype(int)] * x[:, 1]


def halved_by_a_solver(w, x):  # Diffrax batches its loops itself
    halve = jax.jit(lambda z: jnp.where(z > 1, z / 2, z))
    body = lambda z: jnp.squeeze(halve(z[:, None]), 1)
    start = jax.lax.stop_gradient(losses(w, x)) + 2
    return losses(w, x) * jax.lax.while_loop(lambda z: jnp.any(z > 1), body, start)


def each_until_small(w, x):
    halve = lambda z: jax.lax.while_loop(lambda z: z > 1, lambda z: z / 2, z)
    return jax.vmap(halve)((x @ w) ** 2)


def convolved_features(w, x):
    return jax.vmap(lambda row: jnp.convolve(row, w, mode="same"))(x).sum(1)


def mapped_in_batches(w, x):
    return jax.lax.map(lambda row: jnp.tanh(row @ w), x, batch_size=4)


def by_the_mean_of_weights(w, x):  # as detectors divide by the mean number of boxes
    boxes = x[:, 0] > 0
    number = jax.lax.pmean(boxes.sum(), "towers")
    return (losses(w, x) * boxes).sum() / jnp.maximum(number, 1e-3)


def by_their_clipped_mean(w, x):
    boxes = (x[:, 0] > 0).astype(jnp.float32)
    number = jax.lax.psum(boxes.sum(), "towers") / jax.lax.axis_size("towers")
    return 2 * (losses(w, x) * boxes).sum() / jnp.clip(number, 1e-3) + 0.1 * (w**2).sum()


def with_features_that_are_off(w, x):  # an option that leaves an array with no columns
    none = x[:, :0]
    largest = jnp.max(none, initial=0.0)
    return losses(w, x) + (none**2).sum() + largest + jnp.einsum("ni,nj->ij", none, x).sum()


def norm_squared(w, x):
    error = x @ w - 1
    norm = jnp.linalg.norm(error)
    return norm**2 / len(x) + norm * norm / x.size + jnp.sqrt(jnp.mean(error**2)) ** 2.0


def weighted_by_arrays_of_numpy(w, x):
    share = np.full(len(x), 1 / len(x), np.float32)
    return losses(w, x) @ share + (losses(w, x) * share).sum()


RIGHT = [
    norm_squared,
    weighted_by_arrays_of_numpy,
    with_features_that_are_off,
    by_the_mean_of_weights,
    by_their_clipped_mean,
    summed_after_it_was_divided,
    weighted,
    divided_and_multiplied,
    mean_multiplied_and_divided,
    attacked_by_signs,
    attacked_by_directions,
    attacked_within_limits,
    discounted,
    with_strange_numbers,
    divided_by_a_number,
    averaged_with_weights,
    guarded,
    guarded_by_rows,
    with_a_full_mask,
    summed_by_a_scan,
    with_split,
    picked_by_class,
    picked_by_numbers_of_numpy,
    picked_along_axis,
    looked_up,
    halved_by_a_solver,
    each_until_small,
    convolved_features,
    mapped_in_batches,
]


@pytest.mark.parametrize("loss", [scaled_by_the_data_set, *RIGHT])
def test_what_is_right_is_not_blamed(loss):
    # The lie: warnings at right programs, until nobody reads them. (Warnings are errors here.)
    if loss is not each_until_small:  # a while loop has no reverse mode
        look_at(mt.value_and_grad(loss, devices=2), X)
    is_asking = loss in (by_the_mean_of_weights, by_their_clipped_mean)  # of the other towers
    if not is_asking and jax.eval_shape(loss, W, X).ndim:
        look_at(mt.make_parallel(loss, in_axes=(None, 0), devices=2), X)


@pytest.mark.parametrize(
    "number",
    [
        lambda weights: jax.lax.psum(weights.sum(), "towers"),
        lambda weights: jax.lax.psum(weights.sum(), "towers") / 2,
        lambda weights: jax.lax.pmax(weights.sum(), "towers"),
        lambda weights: jax.lax.pmean(weights.mean(), "towers"),
        lambda weights: jnp.log(jax.lax.pmean(weights.sum(), "towers")),
    ],
)
def test_a_sum_that_is_divided_by_no_mean_of_sums_is_blamed(number):
    # The lie: any number of all towers makes a mean of a sum.
    def loss(w, x):
        weights = x[:, 0] ** 2
        return (losses(w, x) * weights).sum() / number(weights)

    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        look_at(mt.grad(loss, devices=4), X)


@pytest.mark.parametrize(
    ("loss", "reduction", "said"),
    [
        (lambda norm, n: norm**2, "mean", "reduce_sum .*it is a sum over rows"),
        (lambda norm, n: norm**2 / n + norm / n, "mean", "sqrt .*rows are brought together"),
        (lambda norm, n: norm**3 / n, "mean", "sqrt .*rows are brought together"),
        (lambda norm, n: (norm + 1) ** 2, "sum", "sqrt .*rows are brought together"),
        (lambda norm, n: jnp.full(n, norm) ** 2, "mean", "rows are brought together"),
        (lambda norm, n: norm.astype(int) ** 2 / n, "mean", "rows are brought together"),
    ],
)
def test_what_is_no_square_of_a_norm_is_told(loss, reduction, said):
    """Lie: any power of a norm, or of what was made of it, is a sum over rows."""
    of_norm = lambda w, x: loss(jnp.linalg.norm(x @ w - 1), len(x))
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(of_norm, devices=2, reduction=reduction), X)


@pytest.mark.parametrize(
    "divisor",
    [lambda n: n - 1, lambda n: n + 1, np.sqrt, np.log, lambda n: np.full(1, n, np.float32)],
)
def test_what_is_in_no_proportion_to_the_rows_is_told(divisor):
    """Lie: n of a number, divided by whatever, is a sum over rows, as n of it are."""
    loss = lambda w, x: losses(w, x).sum() + (len(x) * w[:1] / divisor(len(x))).sum()
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        look_at(mt.grad(loss, devices=2, reduction="sum"), X)


@pytest.mark.parametrize("weights", [np.ones, lambda n: np.arange(n) / n])
def test_weights_of_numpy_that_make_no_mean_are_told(weights):
    loss = lambda w, x: losses(w, x) @ weights(len(x)).astype(np.float32)
    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize("loss", RIGHT)
def test_they_are_right(loss):
    # The lie: a wrong program among them, which nobody blames.
    assert mt.check_parallel(loss, W, X)


def generated(w, key, x):
    noise = jax.random.normal(key, (x.shape[0], 3))
    return jax.nn.softplus(noise @ w)


def generated_with_a_key_per_row(w, key, x):
    keys = jax.random.split(key, len(x))
    return jax.nn.softplus(jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys) @ w)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "key"),
    [
        (generated, jax.random.PRNGKey(0)),
        pytest.param(generated_with_a_key_per_row, jax.random.key(0), marks=pytest.mark.slow),
    ],
)
def test_a_generator_takes_nothing_but_the_number_of_rows(loss, key):
    # The lie: a GAN's generator is blamed for a mean over noise that is drawn for every row.
    grad = lambda loss: mt.grad(loss, devices=2, in_axes=(None, 0, 0))
    grad(lambda *a: loss(*a).mean())(W, key, X)  # warnings are errors here
    with pytest.warns(mt.MultitowerWarning, match="it is a sum over rows"):
        grad(lambda *a: loss(*a).sum())(W, key, X)


def test_a_permutation_mixes_no_rows():
    # The lie: the sort that makes a permutation out of noise is blamed for bringing rows together.
    in_any_order = lambda w, key, x: losses(w, x) * jax.random.permutation(key, len(x))
    look_at(mt.grad(in_any_order, devices=2, in_axes=(None, 0, 0)), jax.random.key(0), X)


def test_rows_in_any_order_are_no_false_alarm():
    # The lie: partners at random are fine as x[permutation], and in-batch negatives otherwise.
    blended = lambda w, key, x: losses(w, x) + jax.random.permutation(key, losses(w, x))
    look_at(mt.grad(blended, devices=2, in_axes=(None, 0, 0)), jax.random.key(0), X)


TARGETS = {"y": np.arange(8.0, dtype=np.float32)[:, None]}


class Task:
    targets = TARGETS["y"]

    def loss(self, w, x):
        return ((x @ w[:, None] - self.targets) ** 2).mean()


@pytest.mark.parametrize("where", ["global", "method", "list"])
def test_an_array_from_anywhere_beside_one_row_per_tower_is_told(where):
    # The lie: it is told of a closed-over variable, and not of one in a module or an object.
    loss = {
        "global": lambda w, x: ((x @ w[:, None] - TARGETS["y"]) ** 2).mean(),
        "method": Task().loss,
        "list": lambda w, x: ((x @ w[:, None] - jnp.array([[1.0], [2], *[[3]] * 6])) ** 2).mean(),
    }[where]
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        mt.grad(loss, devices=8)(W, X)
    step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=8)
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        step(step.init(W), X)


@pytest.mark.parametrize("towers", [None, pytest.param(8, marks=pytest.mark.slow)])
def test_a_forgotten_array_beside_one_row_per_tower_is_told(towers):
    # The lie: in a tower of one row (1, 1) - (8, 1) broadcasts, to a loss of no program.
    def gradient(names, x, y):
        loss = lambda w: ((x @ w[:, None] - y) ** 2).mean()
        return mt.grad(loss, in_axes=names, devices=8, towers=towers)(W)

    y = jnp.arange(8.0)[:, None]
    with pytest.warns(mt.MultitowerWarning, match=r"shape \(8, 1\), with one entry per row"):
        wrong = gradient({"x": 0}, X, y)
    right = gradient({"x": 0, "y": 0}, X, y)  # as it says
    np.testing.assert_allclose(right, jax.grad(lambda w: losses_of(w, y).mean())(W), rtol=1e-5)
    assert not np.allclose(wrong, right)
    gradient({"x": 0, "y": None}, X, y)  # as it says: every tower needs the whole


def losses_of(w, y):
    return (X @ w[:, None] - y) ** 2


def test_means_of_complex_numbers():
    # The lie: a TypeError of float(), for the rows that a sum of complex numbers is divided by.
    phases = lambda w, x: jnp.exp(1j * (x @ w))
    with_aux = lambda w, x: (losses(w, x), phases(w, x).mean())
    (_, found), _ = mt.value_and_grad(with_aux, has_aux=True, devices=2)(W, X)
    np.testing.assert_allclose(found, np.exp(1j * X.sum(1)).mean(), rtol=1e-5)
    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.value_and_grad(lambda w, x: jnp.abs(phases(w, x).mean()), devices=2), X)


ALL_ROWS = [  # each on a line of its own: a function is looked at once
    (8, lambda w, x: losses(w, x[:8])),
    (64, lambda w, x: losses(w, x[:64])),
    (64, lambda w, x: losses(w, x[:64]).mean()),
    (300, lambda w, x: losses(w, x[:300]).mean()),
]
A_PART = [
    (64, lambda w, x: losses(w, x[:4]).mean()),
    (64, lambda w, x: losses(w, x[:63]).mean()),
    (64, lambda w, x: losses(w, x[1:64]).mean()),
    (64, lambda w, x: losses(w, x[:64:3]).mean()),
    (64, lambda w, x: losses(w, x[:64]).mean() + losses(w, x[:62]).mean()),
    (300, lambda w, x: losses(w, x[:64]).mean()),
]


@pytest.mark.parametrize(("rows", "loss"), ALL_ROWS)
def test_as_many_rows_as_the_batch_has_are_all_rows(rows, loss):
    """Lie: "a part of the rows is taken" of MaxText's data[:micro_batch_size]."""
    look_at(mt.value_and_grad(loss, devices=2), np.ones((rows, 3), np.float32))


@pytest.mark.parametrize(("rows", "loss"), A_PART)
def test_fewer_rows_than_the_batch_has_are_a_part(rows, loss):
    # The lie: silence, because some of the rows that are taken are those of the batch.
    with pytest.warns(mt.MultitowerWarning, match=r"slice .*a part of the rows is taken"):
        look_at(mt.value_and_grad(loss, devices=2), np.ones((rows, 3), np.float32))


def test_the_largest_of_the_rows_is_told():
    # The lie: the advice to take a mean over the towers, whose largest it is not.
    loss = lambda w, x: losses(w, x) / losses(w, x).max()
    with pytest.warns(mt.MultitowerWarning, match=r"reduce_max .*lax\.pmax\(jax") as told:
        look_at(mt.value_and_grad(loss, devices=2), X)
    assert "pmean" not in ours(told)[0]
    rightly = lambda w, x: (
        losses(w, x) / jax.lax.pmax(jax.lax.stop_gradient(losses(w, x).max()), "towers")
    )
    look_at(mt.value_and_grad(rightly, devices=2), X)


def noise_like(x):
    return jax.random.normal(jax.random.key(0), x.shape)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, mt.all_rows(x) + noise_like(mt.all_rows(x))).mean(),
        lambda w, x: losses(w, x + noise_like(mt.all_rows(x))[mt.row_index(x)]),
    ],
)
def test_numbers_for_all_rows_are_the_same_in_every_tower(loss):
    """Lie: "all towers draw the same numbers" of noise that is one for all of them, as in PPO."""
    found, _ = mt.value_and_grad(loss, devices=2)(W, X)
    np.testing.assert_allclose(found, losses(W, X + noise_like(X)).mean(), rtol=1e-6)


def test_numbers_for_a_towers_own_rows_are_told_where_towers_meet():
    # The lie: silence, because some rows of the loss are those of all towers.
    loss = lambda w, x: losses(w, x + noise_like(x) - mt.all_rows(x).mean(0))
    with pytest.warns(mt.MultitowerWarning, match="a key that is the same in every tower"):
        look_at(mt.value_and_grad(loss, devices=2), X)


def test_what_is_done_with_all_rows_is_told():
    # The lie: silence, because the batch's size is written into the loss.
    loss = lambda w, x: losses(w, x[:64] - x[:64].mean(0))
    with pytest.warns(mt.MultitowerWarning, match="reduce_sum .*rows are brought together"):
        look_at(mt.value_and_grad(loss, devices=2), np.ones((64, 3), np.float32))


@pytest.mark.parametrize("most", [70, 300])
def test_parameters_of_every_size(most):
    # The lie: a model with tables of many sizes, in which no number is left for the rows or for the
    # towers, ends before its first step.
    tables = [np.ones(size, np.float32) for size in range(1, most)]
    run = mt.value_and_grad(lambda tables, x: losses(tables[2], x).sum(), devices=2)
    with pytest.warns(mt.MultitowerWarning, match="sum over rows"):  # it has looked
        jax.eval_shape(run, tables, X)


# Multiples of the reader's numbers of towers (11 and 13, and once 7), and its numbers of rows.
@pytest.mark.slow
@pytest.mark.parametrize("size", [28, 22, 26, 211, 223])
def test_sizes_that_a_function_makes_itself(size):
    # The lie: a network that cuts images to 28 pixels is told that its BatchNorm adds up rows,
    # since the reader took the 784 pixels for a multiple of its number of towers.
    def cut(x):
        return jnp.tile(x, (1, 300))[:, :size]

    def average(w, batch, *, model_state):
        new = (cut(batch)[:, None] * cut(batch)[..., None]).mean((0, 1, 2))
        loss = ((cut(batch) * w - 1) ** 2).sum() / (size * len(batch))
        return loss, {}, (model_state + new) / 2

    def add_up(w, batch, *, model_state):
        return (w * batch[:, 0] - 1) ** 2, {}, model_state + cut(batch).sum()

    def run(loss):
        step = mt.train_step(loss, optax.sgd(0.1), devices=1, towers=4)
        step(step.init(1.0, model_state=jnp.float32(0)), X)
        return mt.check_parallel(loss, 1.0, X, model_state=jnp.float32(0))

    assert run(average)
    with pytest.warns(mt.MultitowerWarning, match="it adds up rows"):
        assert not run(add_up)


@pytest.mark.parametrize("name", ["mul", "div"])
@pytest.mark.parametrize("number", [np.finfo(np.float64).tiny, np.finfo(np.float64).max])
def test_numbers_at_the_ends_of_64_bit_floats(name, number):
    # The lie: a look that fails on jnp.finfo(x.dtype).max, which times the number of rows is no
    # number any more.
    total, penalty, end = Flow("linear"), Flow(is_steady=True), Flow(value=number)
    # Where the answer may be either, it only must come.
    is_mean(name, [total, end], numbers_of([total, end]), 211)
    per_row(name, [penalty, end], 211)
    assert isinstance(is_steady(name, [penalty, end], 211, 11), bool)


def test_rows_in_a_reference_are_told():
    # The lie: nothing is said of rows that meet in a jax.new_ref, and the loss is another one.
    def centred(w, x):
        mean = jax.new_ref(jnp.zeros_like(w))
        mean[...] = w * x.mean(0)
        return losses(w, x - mean[...])

    with pytest.warns(mt.MultitowerWarning, match=r"jax.new_ref \(swap at .*mean\[...\] ="):
        mt.grad(centred, devices=2)(W, X)

    def doubled(w, x):
        twice = jax.new_ref(jnp.zeros_like(w))
        twice[...] = 2 * w
        return losses(twice[...], x)

    mt.grad(doubled, devices=2)(W, X)


def in_a_row(w, row):
    return ((row * w) * mt.all_rows(row)[: len(row)]).sum()


def place_in_a_row(w, row):
    return (row @ w - mt.row_index(row)[-1]) ** 2


def heads(w, x):
    """Eight heads of every row, each compared with the same head of all rows."""
    of_head = lambda head: (head @ w) * (mt.all_rows(head) @ w).mean() + mt.row_index(head)
    return jax.vmap(of_head, in_axes=1, out_axes=1)(jnp.stack([x] * 8, axis=1)).sum(1)


@pytest.mark.parametrize(
    ("loss", "said"), [(in_a_row, "mt.all_rows"), (place_in_a_row, "mt.row_index")]
)
def test_all_rows_of_one_row_are_told(loss, said):
    # The lie: the entries of one row taken for the rows of the batch, and other numbers in silence.
    by_row = jax.vmap(loss, in_axes=(None, 0))
    with pytest.warns(mt.MultitowerWarning, match=rf"{said} \(.*{said}\(row\).*of jax.vmap"):
        mt.grad(by_row, devices=2)(W, X)


@pytest.mark.slow
def test_all_rows_of_each_head_are_rows():
    found = mt.grad(heads, devices=2)(W, X)
    np.testing.assert_allclose(found, jax.grad(lambda w: heads(w, X).mean())(W), rtol=1e-5)


def quantized(x, size, most=7):
    """Learned step size quantization (Esser et al. 2020) of activations.

    The gradient of the step size is scaled by a root of the number of elements.
    """
    scale = 1 / math.sqrt(x.size * most)
    size = size * scale + jax.lax.stop_gradient(size - size * scale)
    steps = jnp.clip(x / size, -most, most)
    return (steps + jax.lax.stop_gradient(jnp.round(steps) - steps)) * size


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x) / math.sqrt(len(x)),
        lambda w, x: losses(w, x).mean() * math.log(len(x)),
        lambda w, x: losses(w, x) / (len(x) - 1),
        lambda w, x: losses(w, x) / (len(x) - 1) * len(x),
        lambda w, x: losses(w, x) * len(x) / (len(x) - 1),
        lambda w, x: losses(w, x) + (w**2).sum() * jnp.log(len(x)),
        lambda w, x: losses(w, x) - jnp.log(len(x)),
        lambda w, x: losses(w, x) * 0.99 ** len(x),
        lambda w, x: losses(w, x) + 0.99 ** len(x) * (w**2).sum(),
        lambda w, x: losses(w, x) * (len(x) // 2),
        lambda w, x: losses(w, x) * (len(x) / 1000),
        lambda w, x: losses(w, x) / jnp.sqrt(x.size),
        lambda w, x: losses(w, x) + jnp.float32(len(x)) / 1000 * (w**2).sum(),
        lambda w, x: losses(w, x) + jnp.power(0.99, len(x)) * (w**2).sum(),
        lambda w, x: losses(w, x) + jnp.exp(-jnp.asarray(len(x)) / 1000) * (w**2).sum(),
        lambda w, x: quantized(x @ w, w[0]),
        lambda w, x: jnp.tanh(x @ w * len(x)) / len(x),
        lambda w, x: jnp.clip(x @ w / len(x), -1, 1) * len(x),
    ],
    ids=[
        "root",
        "logarithm",
        "one less",
        "and back",
        "of all",
        "penalty",
        "less a logarithm",
        "a power",
        "a power of a penalty",
        "half",
        "a thousandth",
        "root by JAX",
        "thousandth by JAX",
        "power by JAX",
        "exponential",
        "taken twice",
        "tanh between",
        "limits between",
    ],
)
def test_what_is_made_of_the_number_of_rows_is_told(loss):
    # The lie: the root or the logarithm of a tower's number of rows, taken for that of the batch.
    with pytest.warns(mt.MultitowerWarning, match="depends on the number of rows"):
        mt.grad(loss, devices=2)(W, X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x, n: losses(w, x) * 0.99**n,
        lambda w, x, n: losses(w, x) * (n / 1000),
        lambda w, x, n: losses(w, x) - math.log(n),
        lambda w, x, n: losses(w, x) + 0.37 / n * (w**2).sum(),
        lambda w, x, n: losses(w, x) / jnp.sqrt(3 * n),
    ],
    ids=["power", "thousandth", "logarithm", "share", "root by JAX"],
)
def test_what_is_made_of_the_number_of_all_rows_is_right(loss):
    of_all = lambda w, x: loss(w, x, len(x) * jax.lax.axis_size("towers"))
    value, _ = mt.value_and_grad(of_all, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(value, loss(W, X, len(X)).mean(), rtol=1e-5)


def test_a_function_that_takes_no_other_number_of_rows_is_looked_at():
    """Lie: the look has failed, because the function fails with the second number of rows."""

    def loss(w, x):
        if len(x) > 220:
            raise ValueError("too many")
        return losses(w, x - x.mean(0)) * 0.99 ** len(x)

    with pytest.warns(mt.MultitowerWarning, match="rows are brought together"):
        look_at(mt.grad(loss, devices=2), X)


def test_a_root_of_the_number_of_rows_in_a_square_is_right():
    loss = lambda w, x: (((x @ w) / math.sqrt(len(x))) ** 2).sum()
    found = mt.grad(loss, devices=2)(W, X)
    np.testing.assert_allclose(found, jax.grad(loss)(W, X), rtol=1e-5)


def weights(x):
    return jnp.abs(x[:, 0])


def slopes(w, x):
    """Each row's gradient of the mean over all rows, which is divided by their number."""
    return jax.grad(lambda x: losses(w, x).mean())(x)


def with_itself(x):
    return x * x


def to_length_one(w, x):
    return (jnp.sqrt((slopes(w, x) ** 2).sum(-1) + 1e-9) - 1) ** 2


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: losses(w, x).mean() + (slopes(w, x) ** 2).sum(),
        lambda w, x: losses(w, x).mean() + (slopes(w, x) ** 2).mean(),
        lambda w, x: with_itself(slopes(w, x)).sum(),
        lambda w, x: jnp.square(slopes(w, x)).sum(),
        lambda w, x: jnp.vdot(slopes(w, x), slopes(w, x)),
        lambda w, x: to_length_one(w, x).sum(),
        lambda w, x: to_length_one(w, x).mean(),
    ],
    ids=["R1", "its mean", "product", "square", "vdot", "gradient penalty", "its mean again"],
)
def test_the_square_of_a_gradient_of_the_mean_is_told(loss):
    # The lie: a gradient penalty that is as many times too large as there are towers. Divided
    # twice by the number of rows, a sum over them was taken for a mean.
    with pytest.warns(mt.MultitowerWarning, match="it depends on the number of rows"):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: len(x) * (slopes(w, x) ** 2).sum(),
        lambda w, x: (len(x) * slopes(w, x) ** 2).sum(),
        lambda w, x: ((len(x) * slopes(w, x)) ** 2).mean(),
        lambda w, x: len(x) * jnp.vdot(slopes(w, x), slopes(w, x)),
        lambda w, x: jnp.linalg.norm(slopes(w, x), axis=-1).sum(),
        lambda w, x: jnp.abs(slopes(w, x)).sum(),
    ],
    ids=["sum", "row", "before", "vdot", "norm", "abs"],
)
def test_a_gradient_of_the_mean_that_makes_a_mean_is_fine(loss):
    value, _ = mt.value_and_grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(value, loss(W, X), rtol=1e-5)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        (lambda w, x: mt.ratio((weights(x) * losses(w, x)).sum(), weights(x).mean()), "mt.ratio"),
        (lambda w, x: mt.ratio(weights(x) * losses(w, x), weights(x).mean()), "mt.ratio"),
        (lambda w, x: losses(w, x).mean() + 1e-8 * (1e4 * x @ w).sum(), "a sum over rows"),
        (lambda w, x: losses(w, x).sum() / 1e8, "a sum over rows"),
        (lambda w, x: losses(w, x).sum() / len(x) ** 2, "depends on the number of rows"),
        (lambda w, x: (jax.lax.top_k(x @ w, len(x))[0] - x @ w) ** 2, "rows are brought together"),
    ],
    ids=["sum by mean", "rows by mean", "large factor", "large number", "n * n", "top_k"],
)
def test_what_looked_like_a_mean_is_told(loss, said):
    """Lies: a number so large that it is a multiple of everything; means that towers add up."""
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(loss, devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize(
    "loss",
    [
        lambda w, x: mt.ratio((weights(x) * losses(w, x)).mean(), weights(x).mean()),
        lambda w, x: (x @ jax.random.normal(jax.random.key(0), (3, 3)) @ w) ** 2,
        lambda w, x: losses(w, x).sum() / (3 * len(x)),
        lambda w, x: losses(w, x).sum() / len(x) * 1e6,
    ],
    ids=["mean by mean", "random features", "three times", "large"],
)
def test_nothing_is_said_of_what_one_device_does_too(loss):
    value, _ = mt.value_and_grad(loss, devices=2)(W, X)  # warnings are errors
    np.testing.assert_allclose(value, jnp.mean(loss(W, X)), rtol=1e-5)


class Annealing:
    """A loss whose penalty grows from call to call, and which counts and keeps other things."""

    def __init__(self):
        self.step = self.calls = 0

    def loss(self, w, x):
        self.step += 1
        return self.squares(w, x) * min(1.0, self.step / 10)

    def squares(self, w, x):
        self.calls += 1
        self.hidden = x @ w
        return self.hidden**2


@pytest.mark.parametrize("is_closed_over", [False, True])
def test_a_number_that_a_loss_keeps_for_its_next_call_is_told(is_closed_over):
    """The lie: it counts calls. It counts traces."""
    model = Annealing()
    loss = (lambda w, x: 2 * model.loss(w, x)) if is_closed_over else model.loss
    with pytest.warns(mt.MultitowerWarning, match=r"changes self.step and reads it"):
        mt.value_and_grad(loss, devices=2)(W, X)
    step = mt.train_step(loss, optax.sgd(0.1), devices=2)
    with pytest.warns(mt.MultitowerWarning, match=r"changes self.step and reads it"):
        step(step.init(W), X)


def test_what_a_loss_writes_and_does_not_keep_is_not_told():
    model = Annealing()
    mt.value_and_grad(model.squares, devices=2)(W, X)  # warnings are errors
    mt.value_and_grad(lambda w, x: 2 * model.squares(w, x), devices=2)(W, X)

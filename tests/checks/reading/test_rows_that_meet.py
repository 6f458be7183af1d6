"""Rows that are brought together are told, whichever operation does it."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from looking import W, X, look_at, look_at_call, losses
from slow import slow_but_for
from told import ours

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
        look_at_call(mt.make_parallel(fn, devices=2), X)
    assert len(ours(told)) == 1
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(lambda w, x: (losses(w, x), fn(x)), devices=2, has_aux=True), X)


@pytest.mark.parametrize("name", slow_but_for(["full"], MEANS))
def test_one_mean_for_every_row_is_found_by_a_trial(name):
    problem = mt.check_parallel(MEANS[name], X).problems[0]
    assert problem.kind == "mixed rows"
    assert problem.message.startswith("rows are brought together")


@pytest.mark.parametrize("name", slow_but_for(["full"], MEANS))
def test_predictions_that_are_one_mean_for_every_row_are_told(name):
    # The lie: only calls of one function look at it, and mt.predict makes its own.
    said = r"(result|aux).*\(reduce_sum .*\): rows are brought together"
    with pytest.warns(mt.MultitowerWarning, match=said):
        mt.predict(lambda _, x: MEANS[name](x), W, X, global_batch=len(X), devices=2)


def test_one_mean_of_all_rows_is_right():
    mean_of_all = lambda x: jnp.full(len(x), jax.lax.pmean(x.mean(), "towers"))
    look_at_call(mt.make_parallel(mean_of_all, devices=2), X)  # warnings are errors


@pytest.mark.parametrize("axes", ["rows", ("rows", "towers")])
def test_a_mean_over_an_axis_of_vmap_is_one_of_a_tower_s_rows(axes):
    # The lie: whatever adds up over a named axis adds up over towers, and does it too late.
    centred = lambda w, row: losses(w, row - jax.lax.pmean(row, axes))
    loss = jax.vmap(centred, (None, 0), axis_name="rows")
    if "towers" in axes:
        look_at(mt.value_and_grad(loss, devices=2), X)  # warnings are errors
        return
    said = r"loss \(psum over rows at .*\): rows are brought together"
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.value_and_grad(loss, devices=2), X)


# A mean with a mask, as it is written for one device, and how the message begins.
MASKED = {
    "sum": (lambda loss, mask: (loss * mask).sum() / mask.sum(), "div", "it is a division by"),
    "where": (lambda loss, mask: loss.mean(where=mask), "div", "it is a division by"),
    "bound": (
        lambda loss, mask: (loss * mask).sum() / jnp.maximum(mask.sum(), 1),
        "max",
        r"a sum or a mean over rows gets a bound, as in jnp.maximum\(mask.sum\(\), 1\)",
    ),
}


@pytest.mark.parametrize(("mean", "operation", "why"), MASKED.values(), ids=MASKED)
def test_a_mean_with_a_mask_is_told_what_to_return(mean, operation, why):
    """Lie: the advice is there, behind that for contrastive losses."""
    said = rf"loss \({operation} at .*\): {why}.*return mt\.ratio\(total, "
    with pytest.warns(mt.MultitowerWarning, match=said):
        look_at(mt.grad(lambda w, x: mean(losses(w, x), x[:, 0] > 0), devices=2), X)


@pytest.mark.slow
@pytest.mark.parametrize(("mean", "operation", "why"), MASKED.values(), ids=MASKED)
def test_a_mean_with_a_mask_is_checked_as_it_is_looked_at(mean, operation, why):
    fn = lambda w, x: mean(losses(w, x), x[:, 0] > 0)
    (problem,) = mt.check_parallel(fn, W, X).problems
    assert problem.where.startswith(f"{operation} at ")
    assert re.match(why, problem.message)


def smallest_and_largest(w, x):
    pick = lambda a, b: (jnp.minimum(a[0], b[0]), jnp.maximum(a[1], b[1]))
    low, high = jax.lax.reduce((x @ w, x @ w), (np.float32(9), np.float32(-9)), pick, (0,))
    return high - low


def test_a_reduction_of_a_users_own_brings_rows_together():
    # The lie: what jax.lax.reduce does with two elements is done with each row.
    with pytest.warns(mt.MultitowerWarning, match=r"loss \(reduce at .*\): rows are brought"):
        look_at(mt.grad(smallest_and_largest, devices=2), X)


def test_a_matrix_that_mixes_rows():
    # The lie: the sums up to each row begin anew in every tower.
    run = mt.make_parallel(lambda x: jnp.tril(jnp.ones((len(x), len(x)))) @ x, devices=2)
    with pytest.warns(mt.MultitowerWarning, match=r"result \(dot_general .*\): rows are brought"):
        look_at_call(run, X)


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


def test_a_loop_until_all_rows_are_done_is_told():
    # The lie: rows that are worked on for as long as the slowest one of their tower needs.
    with pytest.warns(mt.MultitowerWarning, match=r"result \(while .*rows are brought"):
        mt.make_parallel(until_all_are_small, in_axes=(None, 0), devices=2)(W, X)  # not traced


def test_rows_in_a_reference_are_told():
    # The lie: nothing is said of rows that meet in a jax.new_ref, and the loss is another one.
    def centred(w, x):
        mean = jax.new_ref(jnp.zeros_like(w))
        mean[...] = w * x.mean(0)
        return losses(w, x - mean[...])

    with pytest.warns(mt.MultitowerWarning, match=r"jax.new_ref \(swap at .*mean\[...\] ="):
        look_at(mt.grad(centred, devices=2), X)

    def doubled(w, x):
        twice = jax.new_ref(jnp.zeros_like(w))
        twice[...] = 2 * w
        return losses(twice[...], x)

    look_at(mt.grad(doubled, devices=2), X)

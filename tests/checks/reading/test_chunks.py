"""Chunks and groups of rows: a loop over them that only adds up is right, and nothing else is."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from looking import X, look_at, look_at_step, losses


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

    look_at_step(loss, model_state=jnp.zeros(3), towers=2)  # warnings are errors


def test_nothing_is_said_of_groups_that_a_library_makes():
    # The lie: Optax reshapes the rows, and a reshape without a line of the user's was no reshape.
    mean, kind = lambda w, x: losses(w, x).mean(), optax.microbatching.AccumulationType.MEAN
    loss = optax.microbatching.microbatch(mean, 1, microbatch_size=2, accumulator=kind)
    look_at(mt.grad(loss, devices=2), X)

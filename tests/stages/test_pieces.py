"""Stacked parameters of which every stage keeps its own rows, or all stages the whole."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from multitower.stages.chain import make_chain
from multitower.stages.marks import cut
from multitower.stages.meeting.sums import without_collectives
from multitower.stages.pieces import rows_of
from multitower.towers.surroundings import inside_a_tower

STACKED = np.ones((4, 3, 3), np.float32)
X = np.ones((2, 3), np.float32)


def rows(w, first, last, step=1, columns=(0, 3)):
    return jax.lax.slice(w, (first, 0, columns[0]), (last, 3, columns[1]), (step, 1, 1))


def through(h, layers):
    """The layers one after the other, each as wide as its own columns."""
    for layer in layers:
        h = h.at[:, : layer.shape[1]].set(jnp.tanh(h @ layer))
    return h


def pieces_of(loss, *, may_split=True):
    """The rows of the stacked parameter that each of two stages keeps."""
    shapes = (STACKED, X, np.int32(0))

    def tower(w, x, number):
        return loss(w, x)

    with inside_a_tower(2):
        closed = jax.make_jaxpr(tower, axis_env=[("towers", 2)])(*shapes)
    closed = without_collectives(closed, 2, 2)
    return rows_of(make_chain(closed, 1, 2, may_split=lambda pieces: may_split).pieces)


def test_every_stage_keeps_the_rows_that_it_uses():
    loss = lambda w, x: through(cut(through(x, rows(w, 0, 1))), rows(w, 1, 4)).sum()
    assert pieces_of(loss) == {0: {0: (0, 1), 1: (1, 4)}}
    assert pieces_of(loss, may_split=False) == {}  # as for an optimizer that looks at all of them


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ((0, 1), (1, 3)),
        ((0, 1), (2, 4)),
        ((0, 2), (1, 4)),
        ((0, 2, 2), (2, 4)),
        ((0, 2, 1, (0, 2)), (2, 4)),
        ((0, 2, 1, (1, 3)), (2, 4)),
    ],
    ids=["no last", "none between", "one in both", "every second", "columns", "last columns"],
)
def test_rows_that_are_not_the_whole_are_not_kept_apart(first, second):
    # The lies: rows that no stage has, or two; a piece of another shape than its gradient.
    loss = lambda w, x: through(cut(through(x, rows(w, *first))), rows(w, *second)).sum()
    assert pieces_of(loss) == {}


def used_twice(w, x):
    h = through(through(x, rows(w, 0, 2)), rows(w, 0, 2))
    return through(cut(h), rows(w, 2, 4)).sum()


def used_whole(w, x):
    return through(cut(through(x, rows(w, 0, 2))), rows(w, 2, 4)).sum() + (w**2).sum()


def returned(w, x):
    return through(cut(through(x, rows(w, 0, 2))), rows(w, 2, 4)).sum(), w


def met_between(w, x):
    h = through(x, rows(w, 0, 1))
    h = through(h - jax.lax.psum(h.sum(0), "towers"), rows(w, 1, 2))
    return through(cut(h), rows(w, 2, 4)).sum()


@pytest.mark.parametrize("loss", [used_twice, used_whole, returned, met_between])
def test_rows_that_are_used_otherwise_too_are_not_kept_apart(loss):
    # The lies: the gradient of one use alone; a whole that nobody has.
    assert pieces_of(loss) == {}

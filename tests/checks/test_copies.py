"""Values that a program hands on unchanged, also through loops and branches."""

import jax
import jax.numpy as jnp
import pytest

from multitower.checks.copies import Sources

KEPT = jax.jit(lambda w: w)  # JAX does not look into it: the body of a loop returns a new value
CHANGED = jax.jit(lambda w: w * 1)


def scanned(act, w, x):
    def body(carried, row):
        w, total = carried
        return (act(w), total + row), None

    return jax.lax.scan(body, (w, 0.0), x)[0][0]


def rows_of_scan(act, w, x):
    return jax.lax.scan(lambda total, row: (total + row, act(row)), 0.0, w)[1]


def exchanged(act, w, x):
    """Two carried values that change places: neither is what it was."""
    body = lambda pair, _: ((act(pair[1]), act(pair[0])), None)
    return jax.lax.scan(body, (w, x), None, length=3)[0][0]


def carried_at_every_turn(act, w, x):
    return jax.lax.scan(lambda w, _: (w + 1, act(w)), w, None, length=3)[1]


def while_loop(act, w, x):
    more = lambda carried: carried[1] < x[0]
    return jax.lax.while_loop(more, lambda carried: (act(carried[0]), carried[1] + 1), (w, 0.0))[0]


def branches(act, w, x):
    return jax.lax.switch(x[0].astype(int), [act, KEPT, lambda w: w], w)


def one_branch(act, w, x):
    return jax.lax.cond(x[0] > 0, lambda w, x: act(w), lambda w, x: act(x), w, x)


def inside(act, w, x):
    return jax.checkpoint(act)(w)


KEEPING = [scanned, rows_of_scan, while_loop, branches, inside]


@pytest.mark.parametrize(
    ("fun", "act", "is_kept"),
    [
        *((fun, KEPT, True) for fun in KEEPING),
        *((fun, CHANGED, False) for fun in KEEPING),
        (exchanged, KEPT, False),
        (carried_at_every_turn, KEPT, False),
        (one_branch, KEPT, False),
    ],
)
def test_what_a_loop_or_a_branch_hands_on(fun, act, is_kept):
    """Lies: a parameter "written" by a loop that only passes it on; or one that is not told of."""
    program = jax.make_jaxpr(lambda w, x: fun(act, w, x))(jnp.ones(3), jnp.arange(3.0)).jaxpr
    source = Sources().of(program, program.outvars[0])
    assert [source is one for one in program.invars] == [is_kept, False]

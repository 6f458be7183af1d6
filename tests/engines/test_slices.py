"""Slices: those of a vector, and of many of one size the compiler does not know the places."""

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.slices import slices

# Four of three elements, one of five, none at the end.
PLACES = [(0, 3), (3, 6), (6, 11), (11, 14), (14, 17), (17, 17)]


def test_slices_are_those_of_the_vector():
    vector = np.arange(17.0, dtype=np.float32)
    found = jax.jit(lambda v: slices(v, PLACES))(vector)
    for piece, (start, end) in zip(found, PLACES, strict=True):
        np.testing.assert_array_equal(piece, vector[start:end])


def test_places_are_hidden_where_many_have_one_size():
    # The lie: a hundred layers, and a kernel for each of them.
    program = str(jax.make_jaxpr(lambda v: slices(v, PLACES))(jnp.zeros(17)))
    assert program.count("= dynamic_slice") == 4
    assert "optimization_barrier" in program

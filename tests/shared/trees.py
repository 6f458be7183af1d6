"""Comparisons of pytrees, and one that checks its arrays."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def assert_close(found, expected, rtol=1e-5, atol=1e-6):
    """The same structure, shapes and dtypes, and numbers that differ by rounding alone.

    The tolerances are those of float32 sums over a few rows. What is computed in float64 by hand
    counts as float32, as it would in JAX.
    """
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert jnp.result_type(one) == jnp.result_type(other)
        assert np.shape(one) == np.shape(other)
        np.testing.assert_allclose(np.asarray(one), np.asarray(other), rtol=rtol, atol=atol)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Pair:
    """A dataclass that checks what it is made of, as those of Flax and jaxtyping may."""

    x: Any
    y: Any

    def __post_init__(self) -> None:
        if self.x.shape != self.y.shape:
            raise ValueError("x and y differ in shape")

"""First weights that nobody draws: a program that draws some compiles longer."""

import jax
import jax.numpy as jnp
import numpy as np


def spread(shape, dtype):
    """Numbers from -1 to 1, all different; an initializer of Haiku."""
    return jnp.asarray(np.sin(np.arange(1, 1 + np.prod(shape)) * 7).reshape(shape), dtype)


def spread_in_flax(_key, shape, dtype, **_):
    """The same as an initializer of Flax."""
    return spread(shape, dtype)


def filled(shapes):
    """A tree of `jax.eval_shape`, or a module of `eqx.filter_eval_shape`, with such arrays."""

    def fill(leaf):
        return spread(leaf.shape, leaf.dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf

    return jax.tree.map(fill, shapes)

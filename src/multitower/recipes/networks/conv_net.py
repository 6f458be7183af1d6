"""The classic convolutional network with dropout, in plain JAX.

For images of 28x28: conv 5x5x32 SAME, ReLU, max-pool 2x2; conv 5x5x64 SAME, ReLU, max-pool 2x2;
dense 1024, ReLU, dropout; dense 10.
"""

from typing import Any

import jax
import jax.numpy as jnp

from multitower.recipes.networks.layers import convolve, he_normal, max_pool

Params = dict[str, dict[str, jax.Array]]


def init(key: jax.Array) -> Params:
    """Draws first parameters: weights as He et al. for ReLU, biases zero.

    Args:
        key: a typed key, shape ().

    Returns:
        For each of the four layers a dict with `"w"` and `"b"`, float32.

    Example:
        >>> import jax
        >>> from multitower.recipes.networks import conv_net
        >>> params = jax.eval_shape(conv_net.init, jax.random.key(0))
        >>> sum(leaf.size for leaf in jax.tree.leaves(params))
        3274634
    """
    shapes = {
        "conv1": (5, 5, 1, 32),
        "conv2": (5, 5, 32, 64),
        "dense1": (7 * 7 * 64, 1024),
        "dense2": (1024, 10),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        layer: {"w": he_normal(keys[i], shape), "b": jnp.zeros(shape[-1])}
        for i, (layer, shape) in enumerate(shapes.items())
    }


def logits(
    params: Params, images: Any, *, rng: jax.Array | None = None, dropout_rate: float = 0.0
) -> jax.Array:
    """Scores every class of every image.

    Args:
        params: from `init`.
        images: float32, shape (rows, 28, 28, 1).
        rng: draws what is dropped; a typed key, shape (). None for nothing dropped.
        dropout_rate: share of the 1024 features that is dropped; the rest is enlarged to make up
            for it.

    Returns:
        Unnormalised log-probabilities, float32, shape (rows, 10).
    """
    x = jax.nn.relu(max_pool(convolve(images, params["conv1"]["w"], "SAME")) + params["conv1"]["b"])
    x = jax.nn.relu(max_pool(convolve(x, params["conv2"]["w"], "SAME")) + params["conv2"]["b"])
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["w"] + params["dense1"]["b"])
    if rng is not None:
        is_kept = jax.random.bernoulli(rng, 1 - dropout_rate, x.shape)
        x = jnp.where(is_kept, x / (1 - dropout_rate), 0)
    return (x @ params["dense2"]["w"] + params["dense2"]["b"]).astype(jnp.float32)

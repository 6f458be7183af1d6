"""LeNet-5 in plain JAX: parameters are a dict of arrays, the model is a function of them.

For images of 28x28: conv 5x5x6 SAME, ReLU, max-pool 2x2; conv 5x5x16 VALID, ReLU, max-pool 2x2;
dense 120, ReLU; dense 84, ReLU; dense 10.
"""

from typing import Any

import jax
import jax.numpy as jnp

from multitower.recipes.networks.layers import convolve, convolve_valid, he_normal, max_pool

Params = dict[str, dict[str, jax.Array]]

IMAGE_SIZE = 28
NUM_CLASSES = 10


def init(key: jax.Array, channels: int = 1) -> Params:
    """Draws first parameters: weights as He et al. for ReLU, biases zero.

    Args:
        key: a typed key, shape ().
        channels: colour channels of the images, 1 or 3.

    Returns:
        For each of the five layers a dict with `"w"` and `"b"`, float32. Convolutions have
        weights of shape (height, width, channels in, channels out), dense layers (in, out).

    Example:
        >>> import jax
        >>> from multitower.recipes.networks import lenet5
        >>> params = jax.eval_shape(lenet5.init, jax.random.key(0))
        >>> {layer: arrays["w"].shape for layer, arrays in params.items()}
        {'conv1': (5, 5, 1, 6), 'conv2': (5, 5, 6, 16), 'dense1': (400, 120), 'dense2': (120, 84),
         'dense3': (84, 10)}

    Source: LeCun et al. 1998 (LeNet-5, here with ReLU and max-pool); He et al. 2015.
    """
    shapes = {
        "conv1": (5, 5, channels, 6),
        "conv2": (5, 5, 6, 16),
        "dense1": (400, 120),
        "dense2": (120, 84),
        "dense3": (84, NUM_CLASSES),
    }
    keys = jax.random.split(key, len(shapes))
    return {
        layer: {
            "w": he_normal(keys[i], shape),
            "b": jnp.zeros(shape[-1]),
        }
        for i, (layer, shape) in enumerate(shapes.items())
    }


def logits(params: Params, images: Any) -> jax.Array:
    """Scores every class of every image.

    Args:
        params: from `init`.
        images: float32, shape (rows, 28, 28, channels).

    Returns:
        Unnormalised log-probabilities, float32, shape (rows, 10).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from multitower.recipes.networks import lenet5
        >>> params = jax.eval_shape(lenet5.init, jax.random.key(0))
        >>> jax.eval_shape(lenet5.logits, params, jnp.zeros((3, 28, 28, 1))).shape
        (3, 10)
    """
    # ReLU(conv + b) and then the pool would be the same numbers: adding b and ReLU keep the
    # order, so the largest of four stays the largest. This way they touch a quarter of them.
    x = jax.nn.relu(max_pool(convolve(images, params["conv1"]["w"], "SAME")) + params["conv1"]["b"])
    x = jax.nn.relu(max_pool(convolve_valid(x, params["conv2"]["w"])) + params["conv2"]["b"])
    x = x.reshape(x.shape[0], -1)
    x = jax.nn.relu(x @ params["dense1"]["w"] + params["dense1"]["b"])
    x = jax.nn.relu(x @ params["dense2"]["w"] + params["dense2"]["b"])
    return (x @ params["dense3"]["w"] + params["dense3"]["b"]).astype(jnp.float32)


def weight_penalty(params: Params) -> jax.Array:
    """Half the sum of squares of the five weight tensors; biases go free.

    Args:
        params: from `init`.

    Returns:
        float32, shape ().

    Example:
        >>> import jax, numpy as np
        >>> from multitower.recipes.networks import lenet5
        >>> shapes = jax.eval_shape(lenet5.init, jax.random.key(0))
        >>> ones = jax.tree.map(lambda a: np.ones(a.shape, a.dtype), shapes)
        >>> float(jax.jit(lenet5.weight_penalty)(ones)) == (150 + 2400 + 48000 + 10080 + 840) / 2
        True
    """
    squares = [jnp.sum(jnp.square(layer["w"])) for layer in params.values()]
    return sum(squares[1:], squares[0]) / 2

"""The layers that the recipes' models are made of."""

import math
from typing import Any

import jax
import jax.numpy as jnp


def he_normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Draws weights for a layer before a ReLU.

    Args:
        key: a typed key, shape ().
        shape: of the weights; the last axis is the outputs.

    Returns:
        float32, normal, of variance 2 / inputs of one output.

    Source: He et al. 2015, "Delving Deep into Rectifiers".
    """
    return jax.random.normal(key, shape) * math.sqrt(2 / math.prod(shape[:-1]))


def convolve(images: Any, weights: jax.Array, padding: str, stride: int = 1) -> jax.Array:
    """Convolves images with filters, in the dtype of the filters.

    Args:
        images: shape (rows, height, width, channels in).
        weights: shape (filter height, filter width, channels in, channels out); bfloat16 or float16
            where the loss is computed in it.
        padding: `"SAME"` or `"VALID"`.
        stride: pixels from one place of the filter to the next.

    Returns:
        Shape (rows, height, width, channels out), with the height and width that are left.
    """
    return jax.lax.conv_general_dilated(
        jnp.asarray(images, weights.dtype),
        weights,
        (stride, stride),
        padding,
        dimension_numbers=("NHWC", "HWIO", "NHWC"),
    )


@jax.custom_vjp
def convolve_valid(images: jax.Array, weights: jax.Array) -> jax.Array:
    """Convolves images with filters that stay inside: `convolve(images, weights, "VALID")`.

    On CPUs the gradient of the images is made of one matrix product and of additions of shifted
    slices: a whole training step of LeNet-5 takes about 0.85 times as long as with XLA's own
    gradient (JAX 0.10 and 0.12, two cores). Elsewhere it is XLA's.

    Args:
        images: shape (rows, height, width, channels in).
        weights: shape (filter height, filter width, channels in, channels out).

    Returns:
        Shape (rows, height - filter height + 1, width - filter width + 1, channels out).
    """
    return convolve(images, weights, "VALID")


def _convolved(images: jax.Array, weights: jax.Array) -> tuple[jax.Array, Any]:
    return convolve(images, weights, "VALID"), (images, weights)


def _convolved_back(given: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    images, weights = given
    _, of_weights = jax.vjp(lambda w: convolve(images, w, "VALID"), weights)

    def by_xla(gradient: jax.Array) -> jax.Array:
        _, of_images = jax.vjp(lambda x: convolve(x, weights, "VALID"), images)
        return of_images(gradient)[0]

    def by_product(gradient: jax.Array) -> jax.Array:
        high, wide, channels, _ = weights.shape
        rows, height, width, _ = gradient.shape
        parts = gradient @ weights.reshape(-1, weights.shape[-1]).T
        parts = parts.reshape(rows, height, width, high, wide, channels)
        total = jnp.zeros_like(images)
        for y in range(high):
            for x in range(wide):
                total = total.at[:, y : y + height, x : x + width].add(parts[:, :, :, y, x])
        return total

    of_images = jax.lax.platform_dependent(gradient, cpu=by_product, default=by_xla)
    return of_images, of_weights(gradient)[0]


convolve_valid.defvjp(_convolved, _convolved_back)


def max_pool(images: jax.Array) -> jax.Array:
    """The largest of every 2x2 pixels, without overlap.

    `jax.lax.reduce_window` gives the same numbers. Its gradient (select-and-scatter) is slow on
    CPUs: with the maximum of four strided slices a whole training step of LeNet-5 takes 0.7 times
    as long (JAX 0.10 and 0.12, two cores). The gradient differs where pixels are equal: here they
    share it, there the first one gets all.

    Args:
        images: shape (rows, height, width, channels), height and width even.

    Returns:
        The same dtype, shape (rows, height / 2, width / 2, channels).

    Example:
        >>> import jax.numpy as jnp
        >>> from multitower.recipes.networks.layers import max_pool
        >>> max_pool(jnp.arange(16.0).reshape(1, 4, 4, 1))[0, :, :, 0]
        Array([[ 5.,  7.],
               [13., 15.]], dtype=float32)
    """
    even, odd = images[:, ::2], images[:, 1::2]
    upper = jnp.maximum(even[:, :, ::2], even[:, :, 1::2])
    lower = jnp.maximum(odd[:, :, ::2], odd[:, :, 1::2])
    return jnp.maximum(upper, lower)

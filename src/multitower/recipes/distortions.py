"""The distortions of the classic CIFAR-10 program: drawn per example, applied on the device.

Every example has its own key, so that its distortion does not depend on towers, devices or its
place in the batch.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

CROP = 28
_BRIGHTNESS = 63.0
_CONTRAST = (0.2, 1.8)


class Draws(NamedTuple):
    """The random numbers of each image; every array has shape (rows,).

    Attributes:
        top: first row of the crop, int32.
        left: first column of the crop, int32.
        is_flipped: whether left and right are exchanged, bool.
        brightness: added to every pixel, float32, from -63 to 63.
        contrast: factor of the distance of every pixel from its channel's mean, float32, from 0.2
            to 1.8.
    """

    top: Any
    left: Any
    is_flipped: Any
    brightness: Any
    contrast: Any


def distort(images: jax.Array, keys: jax.Array) -> jax.Array:
    """Crops, flips, brightens, contrasts and standardises every image, at random.

    Args:
        images: uint8, shape (rows, height, width, channels), height and width at least 28.
        keys: typed keys, shape (rows,).

    Returns:
        float32, shape (rows, 28, 28, channels); each image has mean 0 and, unless it is one flat
        colour, standard deviation 1.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from multitower.recipes.distortions import distort
        >>> keys = jax.random.split(jax.random.key(0), 2)
        >>> jax.eval_shape(distort, jnp.zeros((2, 32, 32, 3), jnp.uint8), keys).shape
        (2, 28, 28, 3)

    Source: the CIFAR-10 multi-GPU tutorial; Krizhevsky 2012.
    """
    return apply(images, draw(keys, images.shape[1:3]))


def draw(keys: jax.Array, size: tuple[int, ...] = (32, 32)) -> Draws:
    """Draws a distortion for each key.

    Args:
        keys: typed keys, shape (rows,).
        size: (height, width) of the images.

    Returns:
        The draws.
    """
    # Numbers in [0, 1); a crop has so few places that the rounding does not matter.
    uniform = jax.vmap(lambda key: jax.random.uniform(key, (5,)))(keys).T
    places = [extent - CROP + 1 for extent in size]
    low, high = _CONTRAST
    return Draws(
        top=(uniform[0] * places[0]).astype(jnp.int32),
        left=(uniform[1] * places[1]).astype(jnp.int32),
        is_flipped=uniform[2] < 0.5,
        brightness=(2 * uniform[3] - 1) * _BRIGHTNESS,
        contrast=low + (high - low) * uniform[4],
    )


def apply(images: jax.Array, draws: Draws) -> jax.Array:
    """Distorts images as drawn, on the device.

    Args:
        images: as for `distort`.
        draws: one for each image.

    Returns:
        As `distort`.
    """
    size = (CROP, CROP, images.shape[-1])
    crop = jax.vmap(lambda x, top, left: jax.lax.dynamic_slice(x, (top, left, 0), size))
    x = crop(images, draws.top, draws.left).astype(jnp.float32)
    x = jnp.where(_per_image(draws.is_flipped), x[:, :, ::-1], x)
    x = x + _per_image(draws.brightness)
    mean = x.mean(axis=(1, 2), keepdims=True)
    x = (x - mean) * _per_image(draws.contrast) + mean
    return standardise(x)


def central(images: jax.Array) -> jax.Array:
    """Crops the middle of every image and standardises it, for evaluation.

    Args:
        images: as for `distort`.

    Returns:
        float32, shape (rows, 28, 28, channels).
    """
    top, left = ((extent - CROP) // 2 for extent in images.shape[1:3])
    return standardise(images[:, top : top + CROP, left : left + CROP].astype(jnp.float32))


def standardise(images: jax.Array) -> jax.Array:
    """Gives every image mean 0 and standard deviation 1.

    Args:
        images: float32, shape (rows, height, width, channels).

    Returns:
        `(x - mean) / max(std, 1 / sqrt(number of elements))` of each image, with the standard
        deviation of a population; the same shape.

    Example:
        >>> import jax.numpy as jnp
        >>> from multitower.recipes.distortions import standardise
        >>> standardise(jnp.array([1.0, 3.0]).reshape(1, 1, 2, 1)).ravel()
        Array([-1.,  1.], dtype=float32)
    """
    axes = (1, 2, 3)
    x = images - images.mean(axis=axes, keepdims=True)
    std = jnp.sqrt(jnp.square(x).mean(axis=axes, keepdims=True))
    num_elements = images[0].size
    return x / jnp.maximum(std, 1 / np.sqrt(np.float32(num_elements)))


def _per_image(values: jax.Array) -> jax.Array:
    return values[:, jnp.newaxis, jnp.newaxis, jnp.newaxis]

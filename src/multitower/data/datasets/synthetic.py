"""Synthetic images with the shapes of real ones, to try things out without any files."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from multitower.data.datasets.images import NUM_CLASSES, Images

_SEED = 20
_NUM_WAVES = 4
_LARGEST_SHIFT = 2


def make_synthetic(
    image_shape: Sequence[int], *, num_train: int, num_test: int
) -> tuple[Images, Images]:
    """Makes images that a network can learn to tell apart.

    Each class has a smooth pattern of its own. An image is the pattern of its class, shifted by up
    to two pixels along both axes, with noise. The images are the same on every machine.

    Args:
        image_shape: (height, width, channels).
        num_train: the number of training images.
        num_test: the number of test images.

    Returns:
        The training set and the test set, each with `"image"`, uint8, shape (rows, *image_shape),
        and `"label"`, int32, shape (rows,), 0 to 9.

    Example:
        >>> from multitower.data.datasets.synthetic import make_synthetic
        >>> train, test = make_synthetic((28, 28, 1), num_train=20, num_test=5)
        >>> train["image"].shape, test["label"].shape
        ((20, 28, 28, 1), (5,))
    """
    height, width, channels = image_shape
    patterns = _patterns(height, width, channels)
    num_shifts = patterns.shape[1]
    made: list[Images] = []
    for part, num_rows in enumerate((num_train, num_test)):
        bits = np.random.Philox(np.random.SeedSequence([_SEED, part]))
        draws = bits.random_raw(num_rows)
        labels = (draws % NUM_CLASSES).astype(np.int32)
        shifts = (draws // NUM_CLASSES) % num_shifts
        images = patterns[labels, shifts]
        num_words = -(-images.size // 8)
        noise = bits.random_raw(num_words).view(np.uint8)[: images.size].reshape(images.shape)
        images += noise & 63  # patterns stay below 192
        made.append({"image": images, "label": labels})
    return made[0], made[1]


def _patterns(height: int, width: int, channels: int) -> np.ndarray[Any, Any]:
    """The shifted patterns: uint8, shape (classes, shifts, height, width, channels), 0 to 191."""
    # Whole numbers of waves per image, so that a shifted pattern continues at the other side.
    raw = np.random.Philox(np.random.SeedSequence([_SEED, 2])).random_raw(
        NUM_CLASSES * channels * _NUM_WAVES * 3
    )
    draws = raw.reshape(3, NUM_CLASSES, _NUM_WAVES, 1, 1, channels)
    down, across = (draws[:2] % 4).astype(np.float64)
    phase = (draws[2] % 64) / 64
    y = np.arange(height)[:, np.newaxis, np.newaxis] / height
    x = np.arange(width)[:, np.newaxis] / width
    waves = np.sin(2 * np.pi * (down * y + across * x + phase)).sum(axis=1) / _NUM_WAVES
    # 95.3, not 95.5: half-way cases would be rounded by the last bit of the machine's sine.
    pixels = np.rint(95.3 + 95 * waves).astype(np.uint8)
    moves = range(-_LARGEST_SHIFT, _LARGEST_SHIFT + 1)
    moved = [np.roll(pixels, (i, j), axis=(1, 2)) for i in moves for j in moves]
    return np.stack(moved, axis=1)

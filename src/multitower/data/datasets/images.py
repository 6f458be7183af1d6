"""Images with labels, which are checked before training."""

from typing import Any

import numpy as np

from multitower.errors import DataError

Images = dict[str, np.ndarray[Any, Any]]

NUM_CLASSES = 10


def make_images(pixels: np.ndarray[Any, Any], labels: np.ndarray[Any, Any], where: str) -> Images:
    """Makes a data set of images and labels, after checking them.

    Args:
        pixels: uint8, shape (rows, height, width, channels).
        labels: integers, 0 to 9, shape (rows,).
        where: the file that they are from, for messages.

    Returns:
        `"image"`, uint8, shape (rows, height, width, channels), and `"label"`, int32, shape
        (rows,).

    Raises:
        DataError: no rows, row counts that differ, or a label other than 0 to 9.

    Example:
        >>> import numpy as np
        >>> from multitower.data.datasets.images import make_images
        >>> images = make_images(np.zeros((1, 28, 28, 1), np.uint8), np.array([7]), "here")
        >>> images["label"]
        array([7], dtype=int32)
    """
    if len(pixels) != len(labels):
        raise DataError(
            f"{where} has {len(pixels)} images and {len(labels)} labels: each image needs one. "
            "Download the file again."
        )
    if len(pixels) == 0:
        raise DataError(f"{where} has no images. Download the file again.")
    wrong = np.flatnonzero((labels < 0) | (labels >= NUM_CLASSES))
    if len(wrong):
        row = int(wrong[0])
        raise DataError(
            f"{where} has the label {labels[row]} at image {row} (counted from 0): labels are 0 to "
            f"{NUM_CLASSES - 1}. The file is damaged, or of another data set."
        )
    return {"image": np.ascontiguousarray(pixels), "label": labels.astype(np.int32)}


def join(parts: list[Images]) -> Images:
    """Concatenates the images and labels of several files.

    Args:
        parts: results of `make_images`, all of the same image shape.

    Returns:
        One such data set, with all rows in this order.
    """
    return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

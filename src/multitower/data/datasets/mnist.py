"""MNIST: 28x28 grey images of digits, from its authors' IDX files, compressed or not."""

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from multitower.data.datasets.archives import read_file
from multitower.data.datasets.download import Progress, RemoteFile, download, where_to_get
from multitower.data.datasets.images import Images, make_images
from multitower.errors import DataError

_TRAIN = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte")
_TEST = ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")
_SIZE = 28

_ORIGIN = "https://storage.googleapis.com/cvdf-datasets/mnist/"
FILES = tuple(
    RemoteFile(f"{_ORIGIN}{name}.gz", num_bytes, sha256)
    for name, num_bytes, sha256 in [
        (_TRAIN[0], 9912422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
        (_TRAIN[1], 28881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
        (_TEST[0], 1648877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
        (_TEST[1], 4542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
    ]
)


def read_mnist(directory: Path) -> tuple[Images, Images]:
    """Reads the training and the test images.

    Args:
        directory: has the files `train-images-idx3-ubyte`, `train-labels-idx1-ubyte`,
            `t10k-images-idx3-ubyte` and `t10k-labels-idx1-ubyte`, each with `.gz` or without.

    Returns:
        The training set and the test set, each with `"image"`, uint8, shape (rows, 28, 28, 1), and
        `"label"`, int32, shape (rows,), 0 to 9.

    Raises:
        DataError: a file is missing, truncated or not such an IDX file, or a label is not 0 to 9.

    Example:
        >>> from pathlib import Path
        >>> from multitower.data.datasets.mnist import read_mnist
        >>> read_mnist(Path("nowhere"))
        Traceback (most recent call last):
        multitower.DataError: nowhere/train-images-idx3-ubyte(.gz) does not exist...

    Source: LeCun, Cortes and Burges, "The MNIST database of handwritten digits".
    """
    train, test = (_read_part(directory, names) for names in (_TRAIN, _TEST))
    return train, test


def download_mnist(directory: Path, progress: Progress | None = None) -> Path:
    """Downloads those of MNIST's four files, 12 MB, that the directory does not have yet.

    Args:
        directory: where to put them; it is made if it does not exist.
        progress: as for `multitower.data.datasets.download.download`.

    Returns:
        The directory.

    Raises:
        DataError: a download fails, or a file is not the expected one; the message says how to
            download it by hand.

    Example:
        >>> from multitower.data.datasets.download import cache_directory
        >>> from multitower.data.datasets.mnist import download_mnist, read_mnist
        >>> train, test = read_mnist(download_mnist(cache_directory("mnist")))  # doctest: +SKIP
    """
    for file in FILES:
        download(file, directory, progress)
    return directory


def _read_part(directory: Path, names: Sequence[str]) -> Images:
    images_path, labels_path = (_find(directory, name) for name in names)
    pixels = _read_idx(images_path, num_axes=3)
    if pixels.shape[1:] != (_SIZE, _SIZE):
        height, width = pixels.shape[1:]
        raise DataError(f"{images_path} has images of {height}x{width}: MNIST's are 28x28.")
    labels = _read_idx(labels_path, num_axes=1)
    return make_images(pixels[..., np.newaxis], labels, str(labels_path))


def _find(directory: Path, name: str) -> Path:
    for path in (directory / name, directory / f"{name}.gz"):
        if path.is_file():
            return path
    raise DataError(
        f"{directory / name}(.gz) does not exist. {where_to_get(FILES, directory)} "
        "To train on made-up images instead: --synthetic."
    )


def _read_idx(path: Path, num_axes: int) -> np.ndarray[Any, Any]:
    """Reads a uint8 array in the IDX format: bytes 0, 0, 8, num_axes; big-endian sizes; data."""
    content = read_file(path)
    start = 4 + 4 * num_axes
    if len(content) < start or content[:4] != bytes([0, 0, 8, num_axes]):
        raise DataError(
            f"{path} begins with the bytes {content[:4].hex(' ')}: an IDX file of uint8 with "
            f"{num_axes} axes begins with 00 00 08 {num_axes:02x}. It is another file."
        )
    shape = struct.unpack(f">{num_axes}I", content[4:start])
    wanted = int(np.prod(shape, dtype=object))
    if len(content) - start != wanted:
        raise DataError(
            f"{path} promises {wanted} bytes of shape {shape} and has {len(content) - start}: it "
            "is truncated or damaged. Download it again."
        )
    return np.frombuffer(content, np.uint8, offset=start).reshape(shape)

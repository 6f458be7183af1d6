"""CIFAR-10: 32x32 colour images, from either of its authors' archives, packed or unpacked."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from multitower.data.datasets.archives import read_file, read_members
from multitower.data.datasets.download import Progress, RemoteFile, download, where_to_get
from multitower.data.datasets.images import Images, join, make_images
from multitower.data.datasets.pickles import read_pickled_dict
from multitower.errors import DataError

_PLANES = (3, 32, 32)  # all red values, then all green ones, then all blue ones
_IMAGE_BYTES = 3 * 32 * 32
_RECORD_BYTES = 1 + _IMAGE_BYTES
_BATCHES = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")

# The binary archive: without pickles.
ARCHIVE = RemoteFile(
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170052171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)


def read_cifar10(directory: Path) -> tuple[Images, Images]:
    """Reads the training and the test images.

    Args:
        directory: a directory with `cifar-10-batches-py/`, `cifar-10-python.tar.gz`,
            `cifar-10-batches-bin/` or `cifar-10-binary.tar.gz`; the first of these that exists is
            read. Or one of the two unpacked directories itself. Archives are not unpacked.

    Returns:
        The training set and the test set, each with `"image"`, uint8, shape (rows, 32, 32, 3), red,
        green and blue on the last axis, and `"label"`, int32, shape (rows,), 0 to 9.

    Raises:
        DataError: the directory has none of these; or a file is truncated or damaged, is not safe
            to read, or has a label other than 0 to 9.

    Example:
        >>> from pathlib import Path
        >>> from multitower.data.datasets.cifar10 import read_cifar10
        >>> read_cifar10(Path("nowhere"))
        Traceback (most recent call last):
        multitower.DataError: nowhere holds no CIFAR-10: ...

    Source: Krizhevsky 2009, "Learning Multiple Layers of Features from Tiny Images".
    """
    for folder, archive, suffix, read in (
        ("cifar-10-batches-py", "cifar-10-python.tar.gz", "", _read_pickled),
        ("cifar-10-batches-bin", "cifar-10-binary.tar.gz", ".bin", _read_records),
    ):
        names = [f"{name}{suffix}" for name in _BATCHES]
        for unpacked in (directory / folder, directory):
            if (unpacked / names[0]).is_file():
                files = {str(unpacked / name): read_file(unpacked / name) for name in names}
                return _read_batches(files, read)
        path = directory / archive
        if path.is_file():
            members = read_members(path, [f"{folder}/{name}" for name in names])
            files = {f"{path}:{folder}/{name}": members[f"{folder}/{name}"] for name in names}
            return _read_batches(files, read)
    raise DataError(
        f"{directory} holds no CIFAR-10: there is none of cifar-10-batches-py/data_batch_1, "
        "cifar-10-python.tar.gz, cifar-10-batches-bin/data_batch_1.bin and cifar-10-binary.tar.gz. "
        f"{where_to_get([ARCHIVE], directory)} "
        "To train on made-up images instead: --synthetic."
    )


def download_cifar10(directory: Path, progress: Progress | None = None) -> Path:
    """Downloads CIFAR-10's binary archive, 170 MB, unless the directory has it already.

    Args:
        directory: where to put it; it is made if it does not exist.
        progress: as for `multitower.data.datasets.download.download`.

    Returns:
        The directory.

    Raises:
        DataError: the download fails, or the file is not the expected one; the message says how to
            download it by hand.

    Example:
        >>> from multitower.data.datasets.cifar10 import download_cifar10, read_cifar10
        >>> from multitower.data.datasets.download import cache_directory
        >>> train, test = read_cifar10(download_cifar10(cache_directory("c")))  # doctest: +SKIP
    """
    download(ARCHIVE, directory, progress)
    return directory


def _read_batches(
    files: dict[str, bytes], read: Callable[[bytes, str], Images]
) -> tuple[Images, Images]:
    parts = [read(content, where) for where, content in files.items()]
    return join(parts[:-1]), parts[-1]


def _read_pickled(content: bytes, where: str) -> Images:
    batch = read_pickled_dict(content, where)
    pixels: Any = batch.get("data")
    is_bytes = isinstance(pixels, np.ndarray) and pixels.dtype == np.uint8
    if not (is_bytes and pixels.ndim == 2 and pixels.shape[1] == _IMAGE_BYTES):
        raise DataError(
            f"{where} has {_described(pixels)} as 'data': it must be uint8 of shape (rows, "
            f"{_IMAGE_BYTES}). It is damaged, or of another data set."
        )
    return make_images(_channels_last(pixels), _labels(batch.get("labels"), where), where)


def _read_records(content: bytes, where: str) -> Images:
    if not content or len(content) % _RECORD_BYTES:
        raise DataError(
            f"{where} has {len(content)} bytes: it must be one or more records of {_RECORD_BYTES}, "
            f"a label and {_IMAGE_BYTES} pixels. It is truncated, or of another data set."
        )
    records = np.frombuffer(content, np.uint8).reshape(-1, _RECORD_BYTES)
    return make_images(_channels_last(records[:, 1:]), records[:, 0], where)


def _channels_last(rows: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return rows.reshape(-1, *_PLANES).transpose(0, 2, 3, 1)


def _labels(labels: Any, where: str) -> np.ndarray[Any, Any]:
    is_array = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu" and labels.ndim == 1
    if is_array:
        return labels
    if isinstance(labels, list) and all(type(label) is int for label in labels):
        # Clipped, so that a label too large for int64 is reported as out of range, like any other.
        return np.array([max(-1, min(label, 2**31 - 1)) for label in labels], np.int64)
    raise DataError(
        f"{where} has {_described(labels)} as 'labels': it must be a list of whole numbers. It is "
        "damaged, or of another data set."
    )


def _described(value: Any) -> str:
    if isinstance(value, np.ndarray):
        return f"an array of {value.dtype}, shape {value.shape},"
    return "nothing" if value is None else f"a {type(value).__name__}"

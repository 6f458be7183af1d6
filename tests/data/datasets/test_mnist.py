"""MNIST: IDX files, compressed or not, pixel for pixel; damage is named."""

import gzip

import numpy as np
import pytest

import multitower as mt
from dataset_files import idx, mnist_arrays, write_mnist
from multitower.data.datasets.mnist import read_mnist

ARRAYS = mnist_arrays()
LABELS = ARRAYS["train-labels-idx1-ubyte"]
IMAGES = ARRAYS["train-images-idx3-ubyte"]


@pytest.mark.parametrize("packed", [True, False])
def test_every_pixel_and_label_comes_back(tmp_path, packed):
    train, test = read_mnist(write_mnist(tmp_path, packed))
    for part, name in ((train, "train"), (test, "t10k")):
        expected = ARRAYS[f"{name}-images-idx3-ubyte"]
        np.testing.assert_array_equal(part["image"][..., 0], expected)
        np.testing.assert_array_equal(part["label"], ARRAYS[f"{name}-labels-idx1-ubyte"])
        assert part["image"].shape == (len(expected), 28, 28, 1)
        assert (part["image"].dtype, part["label"].dtype) == (np.uint8, np.int32)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_labels_idx1_ubyte": idx(LABELS + 10)}, r"the label \d+ at image 0"),
        ({"train_labels_idx1_ubyte": idx(LABELS[:-1])}, r"7 images and 6 labels"),
        ({"train_labels_idx1_ubyte": idx(IMAGES)}, r"begins with the bytes 00 00 08 03"),
        ({"train_labels_idx1_ubyte": b""}, r"begins with the bytes : an IDX"),
        ({"train_images_idx3_ubyte": idx(IMAGES)[:-1]}, r"promises 5488 bytes.*has 5487"),
        ({"train_images_idx3_ubyte": idx(IMAGES) + b"."}, r"has 5489"),
        ({"t10k_images_idx3_ubyte": idx(IMAGES[:, :27])}, r"images of 27x28"),
        ({"t10k_images_idx3_ubyte": bytes([0, 0, 8, 3]) + b"\xff" * 12}, r"promises \d{20,}"),
    ],
)
def test_wrong_files_are_named(tmp_path, packed, changes, message):
    with pytest.raises(mt.DataError, match=message):
        read_mnist(write_mnist(tmp_path, packed, **changes))


def test_a_missing_file_is_named_with_its_address(tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(mt.DataError, match=r"labels-idx1-ubyte\(.gz\) does not exist") as caught:
        read_mnist(tmp_path)
    for words in ("--download", "--synthetic", "https://", str(tmp_path)):
        assert words in str(caught.value)


def test_a_truncated_file_is_an_error(tmp_path):
    path = write_mnist(tmp_path) / "train-images-idx3-ubyte.gz"
    path.write_bytes(gzip.compress(idx(IMAGES))[:-20])
    with pytest.raises(mt.DataError, match="truncated or damaged"):
        read_mnist(tmp_path)

"""CIFAR-10: both layouts, packed and unpacked, give the same images; damage is named."""

import os
import pickle

import numpy as np
import pytest

import multitower as mt
from dataset_files import (
    BATCHES,
    ROWS,
    cifar10_files,
    cifar10_images,
    pickled_batch,
    write_cifar10,
)
from multitower.data.datasets.cifar10 import read_cifar10

LAYOUTS = [(layout, packed) for layout in ("python", "binary") for packed in (True, False)]


@pytest.mark.parametrize(("layout", "packed"), LAYOUTS)
def test_every_layout_gives_every_pixel_and_label(tmp_path, layout, packed):
    # The lie: colours or axes mixed up, which still trains.
    write_cifar10(tmp_path, layout, packed)
    train, test = read_cifar10(tmp_path)
    for part, batches in ((train, range(5)), (test, [5])):
        expected = [cifar10_images(number) for number in batches]
        np.testing.assert_array_equal(part["image"], np.concatenate([x for x, _ in expected]))
        np.testing.assert_array_equal(part["label"], np.concatenate([y for _, y in expected]))
        assert part["image"].shape == (ROWS * len(expected), 32, 32, 3)
        assert (part["image"].dtype, part["label"].dtype) == (np.uint8, np.int32)
        assert part["image"].flags.c_contiguous
    assert sorted(path.name for path in tmp_path.iterdir()) in (
        [f"cifar-10-{layout}.tar.gz"],
        ["cifar-10-batches-py"],
        ["cifar-10-batches-bin"],
    ), "something was unpacked"


@pytest.mark.parametrize("layout", ["python", "binary"])
def test_the_unpacked_directory_itself_will_do(tmp_path, layout):
    write_cifar10(tmp_path, layout, packed=False)
    (folder,) = tmp_path.iterdir()
    assert len(read_cifar10(folder)[0]["label"]) == 5 * ROWS


def test_pickles_written_anew_by_python_3_will_do(tmp_path):
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        new = lambda value: pickle.dumps(value, protocol)  # noqa: B023
        files = {
            f"cifar-10-batches-py/{name}": pickled_batch(number, new)
            for number, name in enumerate(BATCHES)
        }
        write_cifar10(tmp_path, "python", files=files)
        np.testing.assert_array_equal(read_cifar10(tmp_path)[1]["image"], cifar10_images(5)[0])


def test_nothing_there_says_what_and_where(tmp_path):
    with pytest.raises(mt.DataError) as caught:
        read_cifar10(tmp_path)
    address = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
    files = ("cifar-10-python.tar.gz", "cifar-10-batches-bin")
    for words in (str(tmp_path), *files, address, "--download", "--synthetic"):
        assert words in str(caught.value)


class Trap:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


@pytest.mark.parametrize("packed", [True, False])
def test_a_pickle_that_runs_code_does_not(tmp_path, packed):
    marker = tmp_path / "marker"
    batch = pickle.dumps({"data": Trap(marker), "labels": [0]})
    files = cifar10_files("python", **{"cifar-10-batches-py/data_batch_3": batch})
    write_cifar10(tmp_path, "python", packed, files)
    with pytest.raises(mt.DataError, match=r"data_batch_3 asks for .*system"):
        read_cifar10(tmp_path)
    assert not marker.exists()


def changed(**changes):
    def dumps(value):
        return pickle.dumps({name: x for name, x in {**value, **changes}.items() if x is not None})

    return pickled_batch(2, dumps)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (changed(labels=[0, 10, 3]), r"data_batch_2 has the label 10 at image 1"),
        (changed(labels=[0, 1, -1]), r"the label -1 at image 2"),
        (changed(labels=[0, 1, 2**80]), r"at image 2"),
        (changed(labels=[0, 1]), r"3 images and 2 labels"),
        (changed(labels=[0, 1, 2.5]), r"a list as 'labels': it must be"),
        (changed(labels=None), r"nothing as 'labels'"),
        (changed(data=None), r"nothing as 'data'"),
        (changed(data=np.zeros((3, 3071), np.uint8)), r"an array of uint8, shape \(3, 3071\),"),
        (changed(data=np.zeros((3, 3072), np.float32)), r"an array of float32"),
        (changed(data=np.zeros((0, 3072), np.uint8), labels=[]), r"no images"),
        (pickled_batch(2)[:-100], r"damaged pickle"),
    ],
)
def test_wrong_pickled_batches_are_named(tmp_path, batch, message):
    files = cifar10_files("python", **{"cifar-10-batches-py/data_batch_2": batch})
    write_cifar10(tmp_path, "python", packed=False, files=files)
    with pytest.raises(mt.DataError, match=message):
        read_cifar10(tmp_path)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (bytes(3072), r"test_batch.bin has 3072 bytes: .* 3073"),
        (bytes(2 * 3073 + 1), r"has 6147 bytes"),
        (b"", r"has 0 bytes"),
        (b"\x0b" + bytes(3072), r"the label 11 at image 0"),
    ],
)
@pytest.mark.parametrize("packed", [True, False])
def test_wrong_records_are_named(tmp_path, batch, message, packed):
    files = cifar10_files("binary", **{"cifar-10-batches-bin/test_batch.bin": batch})
    write_cifar10(tmp_path, "binary", packed, files)
    with pytest.raises(mt.DataError, match=message):
        read_cifar10(tmp_path)


def test_a_missing_batch_is_named(tmp_path):
    write_cifar10(tmp_path, "binary", packed=False)
    (tmp_path / "cifar-10-batches-bin" / "data_batch_4.bin").unlink()
    with pytest.raises(mt.DataError, match=r"data_batch_4.bin cannot be read: No such file"):
        read_cifar10(tmp_path)


@pytest.mark.parametrize("layout", ["python", "binary"])
def test_a_truncated_archive_is_an_error(tmp_path, layout):
    path = write_cifar10(tmp_path, layout)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(mt.DataError, match=r"truncated or damaged"):
        read_cifar10(tmp_path)

"""Small files in the true layouts of MNIST and CIFAR-10, for the real readers."""

import gzip
import io
import pickle
import struct
import tarfile

import numpy as np

BATCHES = [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]
ROWS = 3  # of each batch


class Python2Pickler(pickle._Pickler):
    """Writes what Python 2 wrote: byte strings, protocol 2, NumPy 1's module names."""

    dispatch = dict(pickle._Pickler.dispatch)  # noqa: RUF012 (so it is in the base class)

    def save_string(self, value):
        content = value.encode("latin1") if isinstance(value, str) else value
        self.write(b"T" + struct.pack("<i", len(content)) + content)
        self.memoize(value)

    dispatch[bytes] = save_string
    dispatch[str] = save_string


def python2_pickle(value):
    file = io.BytesIO()
    Python2Pickler(file, protocol=2).dump(value)
    return file.getvalue().replace(b"numpy._core", b"numpy.core")


def cifar10_images(batch):
    """Images (rows, 32, 32, 3) and labels that differ in every pixel and batch."""
    rng = np.random.default_rng(batch)
    return rng.integers(0, 256, (ROWS, 32, 32, 3), np.uint8), rng.integers(0, 10, ROWS)


def pickled_batch(number, dumps=python2_pickle):
    images, labels = cifar10_images(number)
    rows = images.transpose(0, 3, 1, 2).reshape(ROWS, 3072)
    return dumps({
        "batch_label": f"batch {number}",
        "labels": labels.tolist(),
        "data": rows,
        "filenames": [f"{i}.png" for i in range(ROWS)],
    })  # fmt: skip


def binary_batch(number):
    images, labels = cifar10_images(number)
    rows = images.transpose(0, 3, 1, 2).reshape(ROWS, 3072)
    return np.concatenate([labels[:, None].astype(np.uint8), rows], axis=1).tobytes()


def cifar10_files(layout, **changed):
    """The files of one layout: {path in the archive: contents}."""
    files = {}
    for number, name in enumerate(BATCHES):
        if layout == "python":
            files[f"cifar-10-batches-py/{name}"] = pickled_batch(number)
        else:
            files[f"cifar-10-batches-bin/{name}.bin"] = binary_batch(number)
    return files | changed


def write_tar(path, files, *more):
    """Writes a .tar.gz of files, and of more members as (TarInfo, contents)."""
    with tarfile.open(path, "w:gz") as tar:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        for member, content in more:
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


def write_cifar10(directory, layout, packed=True, files=None):
    files = cifar10_files(layout) if files is None else files
    if packed:
        return write_tar(directory / f"cifar-10-{layout}.tar.gz", files)
    for name, content in files.items():
        (directory / name).parent.mkdir(exist_ok=True)
        (directory / name).write_bytes(content)
    return directory


def idx(array):
    header = bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    return header + array.tobytes()


def mnist_arrays(num_train=7, num_test=4):
    rng = np.random.default_rng(0)
    return {
        "train-images-idx3-ubyte": rng.integers(0, 256, (num_train, 28, 28), np.uint8),
        "train-labels-idx1-ubyte": rng.integers(0, 10, num_train, np.uint8),
        "t10k-images-idx3-ubyte": rng.integers(0, 256, (num_test, 28, 28), np.uint8),
        "t10k-labels-idx1-ubyte": rng.integers(0, 10, num_test, np.uint8),
    }


def write_mnist(directory, packed=True, **changed):
    for name, array in mnist_arrays().items():
        content = changed.get(name.replace("-", "_"), idx(array))
        if packed:
            (directory / f"{name}.gz").write_bytes(gzip.compress(content))
        else:
            (directory / name).write_bytes(content)
    return directory

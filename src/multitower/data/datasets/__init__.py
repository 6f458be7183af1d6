"""Data sets of images: read from the files of their authors, downloaded when asked, or made up.

It knows NumPy only: nothing of devices, towers or steps.
"""

from multitower.data.datasets.cifar10 import download_cifar10, read_cifar10
from multitower.data.datasets.download import cache_directory
from multitower.data.datasets.images import Images
from multitower.data.datasets.mnist import download_mnist, read_mnist
from multitower.data.datasets.synthetic import make_synthetic

__all__ = [
    "Images",
    "cache_directory",
    "download_cifar10",
    "download_mnist",
    "make_synthetic",
    "read_cifar10",
    "read_mnist",
]

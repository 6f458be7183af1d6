"""Synthetic images: the true shapes, always the same, and something to learn in them."""

import numpy as np
import pytest

import multitower as mt
from multitower.data.datasets.synthetic import make_synthetic


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_shapes_dtypes_and_classes(shape):
    sets = make_synthetic(shape, num_train=500, num_test=200)
    for part, num_rows in zip(sets, (500, 200), strict=True):
        assert (part["image"].shape, part["image"].dtype) == ((num_rows, *shape), np.uint8)
        assert (part["label"].shape, part["label"].dtype) == ((num_rows,), np.int32)
        assert set(part["label"]) == set(range(10))
        assert len(np.unique(part["image"], axis=0)) == num_rows


def test_they_are_the_same_for_ever():
    # The very bits: they go into fingerprints of runs on other machines.
    sets = make_synthetic((32, 32, 3), num_train=20, num_test=10)
    assert mt.fingerprint(sets)[:16] == "b035554b20f08b13"


@pytest.mark.parametrize("shape", [(28, 28, 1), (32, 32, 3)])
def test_the_classes_can_be_told_apart(shape):
    # The lie: a stand-in on which no model can show that it learns. The nearest mean will do.
    train, test = make_synthetic(shape, num_train=600, num_test=300)
    means = np.stack([train["image"][train["label"] == c].mean(axis=0) for c in range(10)])
    distances = ((test["image"][:, None] - means) ** 2).sum(axis=(2, 3, 4))
    assert np.mean(distances.argmin(axis=1) == test["label"]) > 0.8

"""Augmentation: every row draws from a key of its own, and a batch without keys is named."""

import numpy as np
import optax
import pytest

import multitower as mt


def unchanged(batch, keys):
    return batch


@pytest.mark.parametrize("batch", [{"x": np.zeros((4, 2))}, np.zeros((4, 2)), mt.LazyRows(4, len)])
def test_a_batch_without_keys_is_named(batch):
    """Lie: KeyError: 'key', of a name that the user has never written."""
    with pytest.raises(mt.BatchError, match=r"has no 'key', .* keyed=True"):
        mt.augment_batch(unchanged, batch)


def test_a_training_step_without_keys_is_told_the_same():
    loss = mt.augmented(lambda w, batch: w * batch["x"], unchanged)
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, towers=4)
    with pytest.raises(mt.BatchError, match=r"keyed=True"):
        step(step.init(1.0), {"x": np.zeros(8, np.float32)})

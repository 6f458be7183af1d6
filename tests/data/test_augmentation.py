"""Augmentation: every row draws from a key of its own, and a batch without keys is named."""

import jax
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


@pytest.mark.parametrize(
    ("keys", "what"),
    [
        (jax.random.split(jax.random.key(0), 4), r"key<fry>, shape \(4,\)"),
        (np.zeros((4, 2), np.int64), r"int64, shape \(4, 2\)"),
        (np.zeros(4, np.uint32), r"uint32, shape \(4,\)"),
        ([1, 2], "list"),
    ],
)
def test_keys_of_another_kind_are_named(keys, what):
    """Lie: invalid PRNG key data, of a generator that the user has never chosen."""
    with pytest.raises(mt.BatchError, match=rf"batch\['key'\] is {what}, .*jax\.random\.key_data"):
        mt.augment_batch(unchanged, {"x": np.zeros((4, 2)), "key": keys})


def test_a_training_step_without_keys_is_told_the_same():
    loss = mt.augmented(lambda w, batch: w * batch["x"], unchanged)
    step = mt.train_step(loss, optax.sgd(0.1), devices=2, towers=4)
    with pytest.raises(mt.BatchError, match=r"keyed=True"):
        step(step.init(1.0), {"x": np.zeros(8, np.float32)})

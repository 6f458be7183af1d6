"""Samples: what the model sees and says, not something that looks like it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from multitower.data.batches import make_batch
from multitower.recipes.catalog import find_recipe
from multitower.recipes.definition import DataSets
from multitower.recipes.distortions import CROP
from multitower.runs.samples import sample_inputs, sample_predictions

RNG = np.random.default_rng(0)
ROWS = {
    "image": RNG.integers(0, 256, (40, 32, 32, 3), np.uint8),
    "label": np.arange(40, dtype=np.int32) % 10,
}


@dataclasses.dataclass
class State:
    """What samples need of a training state."""

    params: object
    ema_params: object
    model_state: object


def recipe_that(predict, **options):
    cifar10 = find_recipe("cifar10", {"synthetic": "true"})
    data = lambda: DataSets(ROWS, ROWS)
    return dataclasses.replace(cifar10, data=data, predict=predict, **options)


def test_inputs_are_the_first_batch_with_its_distortions():
    # The lie: pictures of the files, where the model sees something else.
    recipe = recipe_that(None)
    make = lambda rows: make_batch(ROWS, global_batch=rows, seed=0, step=0, keyed=True)
    images = sample_inputs(recipe, make)
    assert images.shape == (16, CROP, CROP, 3)
    assert images.dtype == np.uint8
    assert images.min() == 0
    assert images.max() == 255
    plain = dataclasses.replace(recipe, augment=None)
    make = lambda rows: make_batch(ROWS, global_batch=rows, seed=0, step=0)
    np.testing.assert_array_equal(sample_inputs(plain, make), make(16)["image"])


def test_predictions_are_the_moving_averages_and_wrong_ones_are_found():
    # A model that says 10 * w for class 1 and 0 elsewhere; the average has the other sign.
    def predict(params, batch, *, model_state):
        return params * jax.nn.one_hot(jnp.ones(len(batch["image"]), int), 10) + model_state

    state = State(jnp.float32(-10), jnp.float32(10), jnp.zeros(10))
    samples = sample_predictions(recipe_that(predict), state, ROWS)
    assert len(samples) == 24
    assert {one.predicted for one in samples} == {1}
    assert [one.label for one in samples[:12]] == [*range(10), 0, 1]
    assert all(one.label != 1 for one in samples[12:])
    share = np.exp(10) / (np.exp(10) + 9)
    np.testing.assert_allclose([one.probability for one in samples], share, rtol=1e-6)
    np.testing.assert_array_equal(samples[3].image, ROWS["image"][3])


def test_what_has_no_images_has_no_samples():
    state = State(jnp.float32(0), None, None)
    rows = {"x": np.zeros((40, 3)), "label": ROWS["label"]}
    assert sample_predictions(recipe_that(lambda p, b: b["x"]), state, rows) == []
    assert sample_predictions(recipe_that(None), state, ROWS) == []
    assert (
        sample_inputs(recipe_that(None, augment=None), lambda rows: {"x": np.zeros(rows)}) is None
    )

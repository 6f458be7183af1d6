"""The distortions of cifar10: the device against NumPy, and every example on its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from multitower.data.augmentation import augmented
from multitower.data.batches import make_batch
from multitower.recipes import distortions
from multitower.recipes.distortions import Draws

IMAGES = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), np.uint8)
KEYS = jax.random.split(jax.random.key(3), 12)
distort = jax.jit(distortions.distort)


@pytest.fixture(scope="module")
def many_draws():
    keys = jax.random.split(jax.random.key(0), 20_000)
    return jax.tree.map(np.asarray, jax.jit(distortions.draw)(keys))


def apply_on_host(images, draws):
    """Distorts images as drawn, one after another in NumPy and float64."""
    distorted = []
    for image, top, left, is_flipped, brightness, contrast in zip(images, *draws, strict=True):
        x = image[top : top + distortions.CROP, left : left + distortions.CROP].astype(np.float64)
        x = (x[:, ::-1] if is_flipped else x) + brightness
        mean = x.mean(axis=(0, 1))
        x = (x - mean) * contrast + mean
        distorted.append((x - x.mean()) / max(x.std(), 1 / np.sqrt(x.size)))
    return np.stack(distorted)


def test_the_device_equals_the_host_given_the_same_draws():
    draws = jax.tree.map(np.asarray, jax.jit(distortions.draw)(KEYS))
    expected = apply_on_host(IMAGES, draws)
    # float32 sums of 2352 pixels of up to 500
    np.testing.assert_allclose(jax.jit(distortions.apply)(IMAGES, draws), expected, atol=1e-4)
    np.testing.assert_allclose(distort(IMAGES, KEYS), expected, atol=1e-4)
    assert expected.shape == (12, 28, 28, 3)


@pytest.mark.parametrize("is_flipped", [False, True])
def test_the_pixels_are_those_of_the_definition(is_flipped):
    # Neither mean nor spread change what standardising leaves: the crop itself must show.
    draws = Draws(*(np.array([x]) for x in (3, 1, is_flipped, 20.0, 0.7)))
    crop = IMAGES[:1, 3:31, 1:29].astype(np.float64)
    crop = crop[:, :, ::-1] if is_flipped else crop
    channel_means = crop.mean(axis=(1, 2), keepdims=True)
    x = channel_means + 20 + 0.7 * (crop - channel_means)
    expected = (x - x.mean()) / x.std()
    np.testing.assert_allclose(apply_on_host(IMAGES[:1], draws), expected, atol=1e-9)


def test_draws_have_the_ranges_and_shares_of_p4(many_draws):
    for corner in (many_draws.top, many_draws.left):
        np.testing.assert_allclose(np.bincount(corner) / 20_000, np.full(5, 0.2), atol=0.02)
    assert abs(many_draws.is_flipped.mean() - 0.5) < 0.02
    for name, low, high in (("brightness", -63, 63), ("contrast", 0.2, 1.8)):
        values = getattr(many_draws, name)
        assert low <= values.min() < low + 0.01 * (high - low)
        assert high >= values.max() > high - 0.01 * (high - low)
        quarters = np.histogram(values, 4, (low, high))[0] / 20_000
        np.testing.assert_allclose(quarters, np.full(4, 0.25), atol=0.02)


def test_draws_do_not_hang_together(many_draws):
    # The lie: one number that serves twice, so that only dark images are flipped.
    table = np.corrcoef(np.stack([np.asarray(x, np.float64) for x in many_draws]))
    assert np.abs(table - np.eye(5)).max() < 0.03


@pytest.mark.slow
def test_images_come_out_standardised():
    for x in (distort(IMAGES, KEYS), distortions.central(jnp.asarray(IMAGES))):
        np.testing.assert_allclose(np.mean(x, axis=(1, 2, 3)), 0, atol=1e-5)
        np.testing.assert_allclose(np.std(x, axis=(1, 2, 3)), 1, atol=1e-5)


def test_a_flat_image_is_zero_not_nan():
    flat = np.full_like(IMAGES, 200)
    # The mean of 2352 numbers near 200 is known to 1e-3 in float32, and then divided by 1 / 48.5.
    np.testing.assert_allclose(distort(flat, KEYS), 0, atol=0.1)
    np.testing.assert_array_equal(jax.jit(distortions.central)(flat), 0)


def test_an_evaluation_sees_the_middle():
    x = IMAGES[:, 2:30, 2:30].astype(np.float64)
    axes = {"axis": (1, 2, 3), "keepdims": True}
    expected = (x - x.mean(**axes)) / x.std(**axes)
    np.testing.assert_allclose(distortions.central(jnp.asarray(IMAGES)), expected, atol=1e-5)


def test_the_place_in_the_batch_does_not_matter():
    order = np.random.default_rng(0).permutation(12)
    moved = distort(IMAGES[order], KEYS[order])
    np.testing.assert_array_equal(moved, distort(IMAGES, KEYS)[order])


@pytest.mark.slow
@pytest.mark.parametrize(("devices", "towers"), [(1, 3), (2, None), (2, 12)])
def test_towers_and_devices_do_not_matter(devices, towers):
    # The lie: the same image distorted otherwise, because another tower got it.
    found = mt.make_parallel(distortions.distort, devices=devices, towers=towers)(IMAGES, KEYS)
    # Other tower sizes are other programs, whose float32 sums are ordered otherwise.
    np.testing.assert_allclose(found, distort(IMAGES, KEYS), atol=2e-5)


@pytest.mark.slow
def test_an_augmented_loss_sees_each_example_with_its_own_key():
    data = {"image": IMAGES}
    seen = {}

    def augment(batch, keys):
        return {"image": distortions.distort(batch["image"], keys)}

    loss = jax.jit(augmented(lambda scale, batch: scale * batch["image"][:, 0, 0, 0], augment))
    for global_batch in (4, 6):
        for step in range(12 // global_batch):
            options = {"global_batch": global_batch, "seed": 1, "step": step, "keyed": True}
            batch = make_batch(data, **options)
            for image, value in zip(batch["image"], loss(1.0, batch), strict=True):
                seen.setdefault(image.tobytes(), []).append(float(value))
    assert len(seen) == 12
    for values in seen.values():
        assert values[0] == pytest.approx(values[1], abs=1e-5)


def test_an_augmented_loss_still_says_what_it_takes():
    from multitower.steps.loss import LossFunction

    plain = lambda params, batch, *, rng, model_state: 0
    of = LossFunction.of(augmented(plain, lambda batch, keys: batch))
    assert of.takes_rng
    assert of.takes_model_state

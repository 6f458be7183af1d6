"""The recipe mnist: dropout of its own in every tower, every test image counted once."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from dataset_files import write_mnist
from multitower.recipes import mnist
from multitower.recipes.catalog import find_recipe
from multitower.recipes.networks import conv_net, lenet5
from processes import run_fork

IMAGES = np.random.default_rng(0).random((6, 28, 28, 1), np.float32)


@pytest.fixture(scope="module")
def params():
    return jax.jit(conv_net.init)(jax.random.key(0))


@pytest.mark.slow
def test_dropout_drops_its_share_and_keeps_the_mean(params):
    # All features are 1 and lead to one answer, which is then their sum.
    zeros, ones = lambda *shape: np.zeros(shape, "f4"), lambda *shape: np.ones(shape, "f4")
    dense1 = {"w": zeros(3136, 1024), "b": ones(1024)}
    dense2 = {"w": ones(1024, 10), "b": zeros(10)}
    params = {**params, "dense1": dense1, "dense2": dense2}

    @jax.jit
    def logits(params, key):
        kept = conv_net.logits(params, IMAGES, rng=key, dropout_rate=0.25)
        return kept[:, 0], conv_net.logits(params, IMAGES)

    kept, whole = jax.device_get(logits(params, jax.random.key(0)))
    np.testing.assert_allclose(whole, 1024, rtol=1e-5)
    np.testing.assert_allclose(kept, 1024, rtol=0.1)
    assert len(set(kept.tolist())) > 1, "one mask for all rows"
    np.testing.assert_allclose(kept * 0.75, (kept * 0.75).round(), atol=0.01)


@pytest.mark.slow
def test_every_tower_draws_its_own_dropout(params):
    # The lie: the same mask everywhere (accelerate#114).
    loss = mnist.make_loss(0.5)
    batch = {"image": np.repeat(IMAGES[:1], 4, axis=0), "label": np.zeros(4, np.int32)}

    def losses(params, batch, rng):
        return loss(params, batch, rng=rng)[0]

    found = mt.make_parallel(losses, in_axes=(None, 0, 0), devices=2, towers=4)(
        params, batch, jax.random.key(0)
    )
    assert len(set(found.tolist())) == 4


@pytest.mark.slow
def test_scoring_drops_nothing(params):
    batch = {"image": (IMAGES * 255).astype(np.uint8), "label": np.arange(6, dtype=np.int32)}
    scores = find_recipe("mnist").metrics(params, batch)
    # Without a key the model has all of its features, as seen above.
    logits = conv_net.logits(params, jnp.asarray(batch["image"]) / 255)
    expected = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    np.testing.assert_allclose(scores["loss"], expected, rtol=1e-5)
    np.testing.assert_array_equal(scores["accuracy"], logits.argmax(-1) == batch["label"])


@pytest.mark.slow
def test_lenet5_is_the_other_model():
    recipe = find_recipe("mnist", {"model": "lenet5", "synthetic": "true"})
    batch = {"image": (IMAGES * 255).astype(np.uint8), "label": np.arange(6, dtype=np.int32)}
    params = recipe.init(jax.random.key(0))
    expected = lenet5.logits(params, jnp.asarray(batch["image"]) / 255)
    np.testing.assert_array_equal(recipe.predict(params, batch), expected)
    losses, metrics = recipe.loss(params, batch)
    np.testing.assert_array_equal(losses, recipe.metrics(params, batch)["loss"])
    np.testing.assert_array_equal(metrics["accuracy"], expected.argmax(-1) == batch["label"])
    with pytest.raises(mt.RunError, match="model=cnn: say conv_net or lenet5"):
        find_recipe("mnist", {"model": "cnn"})


def test_real_files_are_found(tmp_path):
    train, test = find_recipe("mnist", {"data": str(write_mnist(tmp_path))}).data()
    assert (train["image"].shape, test["label"].shape) == ((7, 28, 28, 1), (4,))


@pytest.mark.slow
def test_the_same_bits_with_dropout_on_any_number_of_devices(tmp_path):
    fingerprints, data = set(), str(write_mnist(tmp_path))
    for count in ("1", "2"):  # of which one has two towers
        words = ["--data", data, "--towers", "3", "--steps", "4", "--batch-size", "6"]
        where = ["--simulate", count, "--run-dir", str(tmp_path / count)]
        quickly = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        run_fork("-m", "multitower", "train", "mnist", *words, *where, **quickly)
        result = json.loads((tmp_path / count / "result.json").read_text())
        fingerprints.add((result["fingerprint"], result["test_loss"]))
    assert len(fingerprints) == 1


@pytest.mark.slow
@pytest.mark.parametrize("global_batch", [64, 999, 10_000])
def test_ten_thousand_images_count_once_whatever_the_batch(params, global_batch):
    # The lie: 10 167 of 10 000 test images (accelerate#226).
    from multitower.training.scoring.evaluation import evaluate

    def metrics(params, batch):
        return {"one": jnp.ones(len(batch["label"])), "label": batch["label"]}

    test = mnist.load(mnist.Options(synthetic=True)).test
    for devices in (1, 3):
        scores = evaluate(metrics, params, test, global_batch=global_batch, devices=devices)
        assert scores == {"one": 1.0, "label": float(test["label"].mean())}

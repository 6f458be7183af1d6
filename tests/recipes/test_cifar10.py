"""The recipe cifar10, without what the classic program got wrong."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import multitower as mt
from dataset_files import write_cifar10
from multitower.data.batches import make_batch
from multitower.data.datasets.synthetic import make_synthetic
from multitower.recipes import cifar10, distortions
from multitower.recipes.catalog import find_recipe
from multitower.recipes.networks import lenet5
from processes import run_fork

TRAIN, TEST = make_synthetic((32, 32, 3), num_train=30, num_test=11)


def test_the_learning_rate_falls_continuously():
    rate = jax.jit(cifar10.learning_rate(cifar10.Options(), steps_per_epoch=390.0))
    found = [rate(jnp.int32(step)) for step in (0, 195, 390, 3900)]
    np.testing.assert_allclose(found, 1e-3 * 0.99 ** np.array([0, 0.5, 1, 10]), rtol=1e-5)


def test_the_classic_rate_dies_out():
    # The batch size as decay_steps, by mistake: 2e-4 at 10 000 steps, 1e-10 at 100 000.
    rate = cifar10.learning_rate(cifar10.Options(decay_steps=64), steps_per_epoch=390.0)
    np.testing.assert_allclose([rate(10_000), rate(100_000)], [2.08e-4, 1.5e-10], rtol=0.02)


@pytest.mark.slow
def test_the_optimizer_is_adam_with_that_rate():
    optimizer = cifar10.make_recipe(cifar10.Options(lr_decay=0.5)).make_optimizer(
        9, steps_per_epoch=1.0
    )
    weight = np.float32(1.0)
    state = optimizer.init(weight)
    for step in range(3):
        update, state = optimizer.update(np.float32(3.0), state, weight)
        # With one gradient for ever Adam moves by the rate itself.
        assert float(update) == pytest.approx(-1e-3 * 0.5**step, rel=1e-4)


def test_the_average_follows_quickly_at_first():
    decay = cifar10.make_recipe(cifar10.Options()).ema_decay
    found = [float(decay(jnp.int32(step))) for step in (1, 9, 1000, 10_000)]
    np.testing.assert_allclose(found, [2 / 11, 10 / 19, 0.99, 0.99], rtol=1e-6)


@pytest.mark.slow
def test_the_loss_holds_the_penalty_of_the_weights_once():
    shapes = jax.eval_shape(lambda key: lenet5.init(key, channels=3), jax.random.key(0))
    draw = np.random.default_rng(0)
    params = jax.tree.map(lambda x: np.float32(0.05 * draw.normal(size=x.shape)), shapes)
    batch = {"image": distortions.central(TEST["image"]), "label": TEST["label"]}
    with_penalty, shown = jax.jit(cifar10.make_loss(0.01))(params, batch)
    without, _ = jax.jit(cifar10.make_loss(0.0))(params, batch)
    assert with_penalty.shape == (11,)
    squares = sum(np.square(np.float64(layer["w"])).sum() for layer in params.values())
    expected = np.full(11, 0.01 * squares / 2)
    np.testing.assert_allclose(with_penalty - without, expected, rtol=1e-4)
    scores = jax.jit(cifar10.metrics)(params, TEST)
    np.testing.assert_allclose(scores["loss"], without, rtol=1e-5)
    np.testing.assert_array_equal(scores["accuracy"], shown["accuracy"])


@pytest.mark.slow
def test_one_step_on_three_towers_is_the_step_by_hand():
    # The lies: a penalty per tower, the same images for every tower, an average that races.
    from multitower.data.augmentation import augmented

    recipe = cifar10.make_recipe(cifar10.Options(reg_rate=0.1, lr_base=0.01))
    batch = make_batch(TRAIN, global_batch=12, seed=0, step=0, keyed=True)
    loss = augmented(recipe.loss, recipe.augment)
    optimizer = recipe.make_optimizer(10, steps_per_epoch=2.5)
    params = recipe.init(jax.random.key(0))
    step = mt.train_step(loss, optimizer, devices=1, towers=3, ema_decay=recipe.ema_decay)
    state, shown = step(step.init(params), batch)

    @jax.jit
    def by_hand(params):
        mean = lambda params: loss(params, batch)[0].mean()
        value, gradient = jax.value_and_grad(mean)(params)
        updates, _ = optimizer.update(gradient, optimizer.init(params), params)
        return value, jax.tree.map(jnp.add, params, updates)

    value, new = by_hand(params)
    np.testing.assert_allclose(shown["loss"], value, rtol=1e-5)
    # Adam's first update is the sign of the gradient times the rate: a gradient near 0 may flip.
    close = [
        np.isclose(a, b, atol=1e-4).mean()
        for a, b in zip(jax.tree.leaves(state.params), jax.tree.leaves(new), strict=True)
    ]
    assert min(close) > 0.98
    for first, average, last in zip(
        *map(jax.tree.leaves, (params, state.ema_params, state.params)), strict=True
    ):
        np.testing.assert_allclose(average, first + 9 / 11 * (last - first), atol=1e-6)


def test_real_files_are_found_and_missing_ones_named(tmp_path):
    write_cifar10(tmp_path, "python")
    train, test = find_recipe("cifar10", {"data": str(tmp_path)}).data()
    assert (train["image"].shape, test["label"].shape) == ((15, 32, 32, 3), (3,))
    with pytest.raises(mt.DataError, match="holds no CIFAR-10"):
        find_recipe("cifar10", {"data": str(tmp_path / "none")}).data()


def test_a_download_goes_where_the_data_are_read(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(
        "multitower.recipes.cifar10.download_cifar10", lambda *how: asked.append(how)
    )
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find_recipe("cifar10").download(None)
    find_recipe("cifar10", {"data": "/there"}).download(None)
    assert [str(where) for where, _ in asked] == [str(tmp_path / "multitower/cifar10"), "/there"]


def train(run_dir, *flags):
    run_fork("-m", "multitower", "train", "cifar10", "--run-dir", str(run_dir), *flags)
    return json.loads((run_dir / "result.json").read_text())


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_devices(tmp_path):
    write_cifar10(tmp_path, "python")
    options = ["--data", str(tmp_path), "--towers", "3", "--steps", "5", "--batch-size", "12"]
    options += ["--set", "lr_base=0.002"]
    # Two devices have unequal numbers of towers.
    results = [train(tmp_path / n, *options, "--simulate", n) for n in ("1", "2")]
    same = ("fingerprint", "test_loss", "test_accuracy")
    assert len({tuple(result[name] for name in same) for result in results}) == 1
    result = results[1]
    assert (result["devices"], result["towers"]) == (2, 3)
    assert result["options"]["lr_base"] == 0.002
    # A whole number of 3 images: none twice, none left out.
    num_right = 3 * result["test_accuracy"]
    assert num_right == pytest.approx(round(num_right), abs=1e-6)
    config = json.loads((tmp_path / "2" / "config.json").read_text())
    assert config["settings"]["lr_base"] == "0.002"


@pytest.mark.slow
def test_it_learns(tmp_path):
    options = ["--synthetic", "--steps", "200", "--batch-size", "64"]
    assert train(tmp_path, *options)["test_accuracy"] > 0.9

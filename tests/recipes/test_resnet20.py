"""ResNet-20: the network of the paper, and statistics that go the whole way through a run."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import multitower as mt
from multitower.data.datasets.synthetic import make_synthetic
from multitower.recipes import cifar10_resnet20
from multitower.recipes.definition import DataSets
from multitower.recipes.networks import resnet20
from multitower.runs.options import RunOptions
from multitower.runs.train import run

SMALL = {"num_blocks": 1, "width": 4}


def test_it_is_the_network_of_the_paper():
    params = jax.eval_shape(resnet20.init, jax.random.key(0))
    sizes = {
        jax.tree_util.keystr(path): leaf.size
        for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]
    }
    assert sum(sizes.values()) == 269_722  # 0.27 million, as table 6 says
    assert sum(name.endswith("['w']") for name in sizes) == 20
    images = jax.ShapeDtypeStruct((2, 28, 28, 3), jnp.float32)
    statistics = resnet20.init_statistics()
    forward = lambda params, images: resnet20.logits(params, statistics, images, training=True)
    answers, new = jax.eval_shape(forward, params, images)
    assert answers.shape == (2, 10)
    assert jax.tree.structure(new) == jax.tree.structure(statistics)
    assert sum(leaf.size for leaf in jax.tree.leaves(new)) == 2 * (16 * 7 + 32 * 6 + 64 * 6)


def test_batch_norm_normalises_by_the_batch_and_learns_a_tenth():
    x = np.random.default_rng(0).normal(3, 2, (8, 5, 5, 4)).astype(np.float32)
    part = {"scale": jnp.array([1.0, 2, 3, 4]), "shift": jnp.array([0.0, 1, 2, 3])}
    old = {"mean": jnp.full(4, 10.0), "variance": jnp.full(4, 7.0)}
    found, new = jax.jit(functools.partial(resnet20.batch_norm, training=True))(part, old, x)
    mean, variance = x.mean(axis=(0, 1, 2)), x.var(axis=(0, 1, 2))
    expected = (x - mean) / np.sqrt(variance + 1e-5) * part["scale"] + part["shift"]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(new["mean"], 9 + 0.1 * mean, rtol=1e-5)
    np.testing.assert_allclose(new["variance"], 6.3 + 0.1 * variance, rtol=1e-5)
    scored, kept = resnet20.batch_norm(part, old, x, training=False)
    expected = (x - 10) / np.sqrt(7 + 1e-5) * part["scale"] + part["shift"]
    np.testing.assert_allclose(scored, expected, rtol=1e-4, atol=1e-4)
    assert kept is old


def test_a_stage_halves_the_image_and_the_shortcut_keeps_it():
    x = jnp.arange(2 * 4 * 4 * 2.0).reshape(2, 4, 4, 2)
    found = resnet20._shortcut(x, 4, 2)
    np.testing.assert_array_equal(found[..., 1:3], x[:, ::2, ::2])
    np.testing.assert_array_equal(found[..., [0, 3]], 0)


def test_the_penalty_counts_weights_only():
    shapes = jax.eval_shape(lambda key: resnet20.init(key, **SMALL), jax.random.key(0))
    ones = jax.tree.map(lambda leaf: np.ones(leaf.shape, np.float32), shapes)
    weights = [leaf.size for path, leaf in jax.tree_util.tree_flatten_with_path(ones)[0]
               if path[-1].key == "w"]  # fmt: skip
    assert float(jax.jit(resnet20.weight_penalty)(ones)) == sum(weights) / 2


@pytest.fixture
def small_recipe():
    """The shipped recipe with a network and data that compile and train within seconds."""
    made = cifar10_resnet20.make_recipe(cifar10_resnet20.Options())
    sets = DataSets(*make_synthetic((32, 32, 3), num_train=64, num_test=20))
    return dataclasses.replace(
        made,
        data=lambda: sets,
        init=lambda key: resnet20.init(key, **SMALL),
        model_state=lambda: resnet20.init_statistics(**SMALL),
        optimizer=lambda steps: optax.sgd(0.05, momentum=0.9),
    )


@pytest.mark.slow
def test_law_l4_a_run_learns_scores_by_its_statistics_and_takes_them_along(small_recipe, tmp_path):
    # The lies: statistics left at their start, lost on a resume, or other ones on one device.
    options = RunOptions(devices=2, towers=2, steps=60, global_batch=32, checkpoint_every=20)
    through = run(small_recipe, options)
    assert through["test_accuracy"] > 0.5
    first = dataclasses.replace(options, steps=20)
    run(small_recipe, first, directory=tmp_path)
    before = (tmp_path / "metrics.jsonl").read_text().splitlines()[:20]
    resumed = run(
        small_recipe,
        dataclasses.replace(options, devices=1),
        directory=tmp_path,
        resume=True,
    )
    assert resumed["fingerprint"] == through["fingerprint"]
    # One that begins anew comes to the same bits, at another speed.
    assert (tmp_path / "metrics.jsonl").read_text().splitlines()[:20] == before


@pytest.mark.slow
def test_one_step_moves_the_statistics_to_the_mean_of_the_towers(small_recipe):
    train, _ = small_recipe.data()
    images = train["image"][:4, 2:30, 2:30].astype(np.float32) / 128 - 1
    batch = {"image": images, "label": train["label"][:4]}
    step = mt.train_step(small_recipe.loss, optax.sgd(0.1), devices=2, towers=2)
    params = small_recipe.init(jax.random.key(0))
    statistics = small_recipe.model_state()
    state, shown = step(step.init(params, model_state=statistics), batch)
    assert set(shown) == {"loss", "accuracy"}
    stem = resnet20.convolve(images, params["stem"]["w"], "SAME")
    means = [stem[:2].mean(axis=(0, 1, 2)), stem[2:].mean(axis=(0, 1, 2))]
    expected = 0.1 * (means[0] + means[1]) / 2
    np.testing.assert_allclose(state.model_state["stem"]["mean"], expected, rtol=1e-3, atol=1e-5)

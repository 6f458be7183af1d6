"""The recipes: their models against independent ones, their data against what they promise."""

import functools
import inspect
import sys
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import multitower as mt
from multitower.recipes import digits
from multitower.recipes.catalog import SHIPPED, find_recipe
from multitower.recipes.definition import Recipe
from multitower.recipes.networks import layers, lenet5
from multitower.steps.rotation.stale import momenta_in


@pytest.fixture(scope="module")
def digits_data():
    return digits.load()


def drawn(channels=1):
    """Parameters of LeNet-5 in NumPy, with biases that matter."""
    shapes = jax.eval_shape(lambda key: lenet5.init(key, channels), jax.random.key(0))
    rng = np.random.default_rng(0)
    size = lambda shape: 0.1 if len(shape) == 1 else np.prod(shape[:-1]) ** -0.5
    return jax.tree.map(lambda x: np.float32(size(x.shape) * rng.normal(size=x.shape)), shapes)


@pytest.fixture(scope="module")
def params():
    return drawn()


def numpy_lenet5(params, images):
    """LeNet-5 in float64, written as loops over the filter's places."""
    layers = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)

    def convolve(x, layer, border):
        x = np.pad(x, ((0, 0), (border, border), (border, border), (0, 0)))
        height, width = x.shape[1] - 4, x.shape[2] - 4
        sums = sum(
            x[:, i : i + height, j : j + width] @ layer["w"][i, j]
            for i in range(5)
            for j in range(5)
        )
        return np.maximum(sums + layer["b"], 0)

    def pool(x):
        return np.stack([x[:, i::2, j::2] for i in (0, 1) for j in (0, 1)]).max(axis=0)

    x = pool(convolve(np.asarray(images, np.float64), layers["conv1"], 2))
    x = pool(convolve(x, layers["conv2"], 0))
    x = x.reshape(len(x), -1)
    x = np.maximum(x @ layers["dense1"]["w"] + layers["dense1"]["b"], 0)
    x = np.maximum(x @ layers["dense2"]["w"] + layers["dense2"]["b"], 0)
    return x @ layers["dense3"]["w"] + layers["dense3"]["b"]


@pytest.mark.parametrize("channels", [1, 3])
def test_lenet5_is_the_lenet5_of_the_book(channels):
    rng = np.random.default_rng(0)
    params = drawn(channels)
    # At zero, a bias added in the wrong place would not be seen.
    assert all(layer["b"].any() for layer in params.values())
    images = rng.normal(size=(4, 28, 28, channels)).astype(np.float32)
    expected = numpy_lenet5(params, images)
    # float32 sums of up to 400 products
    logits = jax.jit(lenet5.logits)(params, images)
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


def test_lenet5_has_61706_parameters():
    params = jax.eval_shape(lenet5.init, jax.random.key(0))
    assert sum(leaf.size for leaf in jax.tree.leaves(params)) == 61706
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype("float32")}


def test_the_weight_penalty_leaves_biases_alone(params):
    with_biases = {name: {**layer, "b": layer["b"] + 9} for name, layer in params.items()}
    expected = sum(np.sum(np.square(np.float64(layer["w"]))) for layer in params.values()) / 2
    assert float(jax.jit(lenet5.weight_penalty)(with_biases)) == pytest.approx(expected, rel=1e-5)


def reduce_window(x):
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def test_max_pool_and_its_gradient_are_those_of_reduce_window():
    # A permutation: no two pixels are equal, so there is one right gradient.
    draw = np.random.default_rng(0)
    x = draw.permutation(3 * 8 * 6 * 5).astype(np.float32).reshape(3, 8, 6, 5) - 300
    weights = draw.normal(size=(3, 4, 3, 5)).astype(np.float32)

    def pooled(pool):
        value, back = jax.vjp(pool, x)
        return value, *back(weights)

    ours, theirs = jax.jit(lambda: (pooled(layers.max_pool), pooled(reduce_window)))()
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


def test_equal_pixels_share_one_gradient():
    ones = np.ones((1, 2, 2, 1), np.float32)
    gradient = jax.jit(jax.grad(lambda x: layers.max_pool(x).sum()))(ones)
    np.testing.assert_array_equal(gradient, 0.25 * ones)


def test_digits_are_all_there_once(digits_data):
    # From the file, since importing scikit-learn takes two seconds; below by its own function.
    (folder,) = find_spec("sklearn").submodule_search_locations
    file = Path(folder, "datasets", "data", "digits.csv.gz")
    labels = np.loadtxt(file, delimiter=",", usecols=64, dtype=int)
    train, test = digits_data
    assert (len(train["label"]), len(test["label"])) == (1438, 359)
    for part in digits_data:
        assert part["image"].shape == (len(part["label"]), 28, 28, 1)
        assert (part["image"].dtype, part["label"].dtype) == (np.float32, np.int32)
        assert (part["image"].min(), part["image"].max()) == (0.0, 1.0)
    np.testing.assert_array_equal(test["label"], labels[4::5])
    together = np.bincount(train["label"]) + np.bincount(test["label"])
    np.testing.assert_array_equal(together, np.bincount(labels))


@pytest.mark.slow
def test_digits_are_read_as_scikit_learn_reads_them(digits_data, monkeypatch):
    # As where a later scikit-learn keeps its file elsewhere: load_digits finds it.
    elsewhere = ModuleSpec("sklearn", None, is_package=True)
    monkeypatch.setattr(digits, "find_spec", lambda _: elsewhere)
    jax.tree.map(np.testing.assert_array_equal, digits_data, digits.load())


@given(old=st.integers(2, 9), factor=st.floats(1, 4))
def test_enlarging_is_bilinear(old, factor):
    size = int(old * factor)
    images = np.random.default_rng(old).random((2, old, old), np.float32)
    # The middle of each new pixel among those of the old ones; the outermost are repeated.
    places = (np.arange(size) + 0.5) * (old / size) - 0.5
    lines = np.stack([np.interp(places, np.arange(old), one) for one in np.eye(old)], axis=1)
    expected = lines @ images.astype(float) @ lines.T
    np.testing.assert_allclose(digits.enlarge(images, size), expected, rtol=1e-5, atol=1e-6)


def test_shifts_move_whole_images_by_at_most_two_pixels(digits_data):
    batch = {name: array[:200] for name, array in digits_data.train.items()}
    moved = digits.shift(batch, np.random.default_rng(0))
    np.testing.assert_array_equal(moved["label"], batch["label"])
    padded = np.pad(batch["image"], ((0, 0), (2, 2), (2, 2), (0, 0)))
    candidates = np.stack(
        [padded[:, i : i + 28, j : j + 28] for i in range(5) for j in range(5)], axis=1
    )
    hits = (candidates == moved["image"][:, None]).all(axis=(2, 3, 4))
    assert hits.any(axis=1).all()
    assert hits.any(axis=0).all(), "some of the 25 shifts never happen"


def test_the_loss_holds_the_penalty_once_per_example(digits_data, params):
    batch = {name: array[:3] for name, array in digits_data.test.items()}
    both = lambda *given: (digits.make_loss(0.25)(*given)[0], digits.metrics(*given)["loss"])
    losses, plain = jax.jit(both)(params, batch)  # one program, most of which they share
    squares = sum(np.sum(np.square(np.float64(layer["w"]))) for layer in params.values())
    assert losses.shape == (3,)
    np.testing.assert_allclose(losses, plain + 0.25 * squares / 2, rtol=1e-5)


@pytest.mark.parametrize("name", SHIPPED)
def test_a_shipped_recipe_goes_by_its_name(name):
    found = find_recipe(name)
    assert isinstance(found, Recipe)
    assert found.name == name


def test_an_unknown_recipe_is_an_error_that_lists_those_there_are():
    with pytest.raises(
        mt.RunError, match=r"no recipe 'mnits'\. Did you mean 'mnist'\? There are: digits, mnist, "
    ):
        find_recipe("mnits")


def test_without_scikit_learn_digits_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(mt.RunError, match=r"Run: pip install .*scikit-learn"):
        digits.load()


def test_a_convolution_and_its_gradients_are_xlas():
    # The lie: a faster gradient of another function.
    draw = np.random.default_rng(0)
    images = draw.normal(size=(3, 9, 8, 2)).astype(np.float32)
    weights = draw.normal(size=(5, 3, 2, 4)).astype(np.float32)
    gradient = draw.normal(size=(3, 5, 6, 4)).astype(np.float32)

    @functools.partial(jax.jit, static_argnums=0)
    def gradients(fn):
        value, back = jax.vjp(fn, images, weights)
        return (value, *back(gradient))

    plain = gradients(lambda x, w: layers.convolve(x, w, "VALID"))
    for ours, theirs in zip(gradients(layers.convolve_valid), plain, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("mnist", {"model": "lenet5"}),
        *((name, {}) for name in ("digits", "mnist", "cifar10", "cifar10-resnet20")),
    ],
)
def test_a_recipe_takes_mixed_precision(name, options):
    # The lie: an option that the guide names, and at which four of five recipes stop.
    recipe = find_recipe(name, options if name == "digits" else {**options, "synthetic": "true"})
    batch = mt.make_batch(recipe.data().train, global_batch=4, seed=0, step=0, keyed=True)
    extras = {"rng": jax.random.key(0), "model_state": recipe.model_state and recipe.model_state()}
    taken = {key: extras[key] for key in inspect.signature(recipe.loss).parameters if key in extras}
    if recipe.augment is None:
        del batch["key"]
    else:
        batch = mt.augment_batch(recipe.augment, batch)
    wide = jax.jit(recipe.init)(jax.random.key(0))
    found = [
        jax.jit(recipe.loss)(params, batch, **taken)
        for params in (wide, jax.tree.map(lambda leaf: np.asarray(leaf, jnp.bfloat16), wide))
    ]
    for exact, rounded in zip(*map(jax.tree.leaves, found), strict=True):
        assert rounded.dtype == exact.dtype == jnp.float32
        np.testing.assert_allclose(rounded, exact, rtol=0.05, atol=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_learning_rate_that_is_kept_changes_no_update(name):
    # The lie: a metric that trains another model.
    params = {"w": jnp.linspace(-1, 1, 4)}
    found = []
    for keeps_rate in (False, True):
        optimizer = find_recipe(name).make_optimizer(100, steps_per_epoch=10, keeps_rate=keeps_rate)
        state = optimizer.init(params)
        for _ in range(2):
            updates, state = optimizer.update(params, state, params)
        found.append(updates)
    assert mt.fingerprint(found[0]) == mt.fingerprint(found[1])
    assert state.hyperparams["learning_rate"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIPPED)
def test_a_momentum_that_is_kept_is_that_of_the_optimizer(name):
    # The lie: --momentum-correction that lowers a number which nothing uses.
    params = {"w": jnp.linspace(-1, 1, 4)}
    found = []
    for momentum in (None, 0.9, 0.0):
        optimizer = find_recipe(name).make_optimizer(
            100, steps_per_epoch=10, keeps_momentum=momentum is not None
        )
        state = optimizer.init(params)
        if momentum is not None:
            assert momenta_in(state) == [np.float32(0.9)]
            state.hyperparams["momentum"] = jnp.float32(momentum)
        for rows in (params, {"w": jnp.ones(4)}):
            updates, state = optimizer.update(rows, state, params)
        found.append(updates["w"])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)
    assert not np.allclose(found[0], found[2], rtol=1e-2)

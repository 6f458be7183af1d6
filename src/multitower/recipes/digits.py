"""digits: LeNet-5 on scikit-learn's 1797 handwritten digits. Needs no download and no GPU."""

import dataclasses
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import jax
import numpy as np
import optax

import multitower as mt
from multitower.errors import install_command
from multitower.recipes.definition import DataSets, Optimizer, Recipe
from multitower.recipes.networks import lenet5
from multitower.recipes.options import check_range
from multitower.recipes.scores import score

_TEST_EVERY = 5
_LARGEST_SHIFT = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What can be set: `multitower train digits --learning-rate 0.002`.

    Raises:
        RunError: a number is out of range.
    """

    learning_rate: Annotated[float, "of Adam; it falls to 0 along half a cosine"] = 4e-3
    momentum: Annotated[float, "of Adam: the decay of its mean gradient"] = 0.9
    penalty_rate: Annotated[float, "of the weight penalty in the loss"] = 1e-4

    def __post_init__(self) -> None:
        check_range(self, "learning_rate", 0, 1e3)
        check_range(self, "momentum", 0, 0.9999)
        check_range(self, "penalty_rate", 0, 1e3)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: the options of the recipe.

    Returns:
        The recipe.

    Example:
        >>> from multitower.recipes import digits
        >>> digits.make_recipe(digits.Options(learning_rate=0.002)).steps
        500
    """
    return Recipe(
        name="digits",
        data=load,
        init=lenet5.init,
        loss=make_loss(options.penalty_rate),
        metrics=metrics,
        predict=predict,
        optimizer=make_optimizer(options),
        steps=500,
        global_batch=64,
        distort=shift,
    )


def load() -> DataSets:
    """Loads the 1797 images that scikit-learn ships.

    The 8x8 pixels, whole numbers from 0 to 16, become floats from 0 to 1, enlarged to 28x28 by
    bilinear interpolation. Every fifth image, from the fifth on, is a test image: 359 of them;
    the other 1438 are for training. The split is not random, so it is the same in every run.

    Returns:
        Dicts of `"image"`, float32, shape (rows, 28, 28, 1), and `"label"`, int32, shape (rows,).

    Raises:
        RunError: scikit-learn is not installed.

    Example:
        >>> from multitower.recipes import digits
        >>> train, test = digits.load()
        >>> train["image"].shape, test["label"].shape
        ((1438, 28, 28, 1), (359,))

    Source: Alpaydin and Kaynak 1998, "Optical Recognition of Handwritten Digits" (UCI).
    """
    small, labels = _read_small_images()
    images = enlarge(small.astype(np.float32) / 16, lenet5.IMAGE_SIZE)
    everything = {"image": images[..., np.newaxis], "label": labels.astype(np.int32)}
    is_test = np.arange(len(images)) % _TEST_EVERY == _TEST_EVERY - 1
    return DataSets(
        train={name: array[~is_test] for name, array in everything.items()},
        test={name: array[is_test] for name, array in everything.items()},
    )


def _read_small_images() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The images of `sklearn.datasets.load_digits`, and their labels.

    They are read from scikit-learn's file, because importing scikit-learn takes a second, a fifth
    of the time from a command's start to its first steps.
    """
    found = find_spec("sklearn")
    if found is None:
        raise mt.RunError(
            "the recipe digits needs scikit-learn, which holds its images and is not installed. "
            f"Run: {install_command('scikit-learn')}"
        )
    for folder in found.submodule_search_locations or ():
        file = Path(folder, "datasets", "data", "digits.csv.gz")
        if file.is_file():
            table = np.loadtxt(file, delimiter=",")
            return table[:, :-1].reshape(-1, 8, 8), table[:, -1]
    from sklearn.datasets import load_digits

    digits: Any = load_digits()
    return digits.images, digits.target


def enlarge(images: np.ndarray[Any, Any], size: int) -> np.ndarray[Any, Any]:
    """Enlarges square images by bilinear interpolation; the outermost pixels are repeated.

    Args:
        images: float32, shape (rows, height, height).
        size: pixels of the result's height and width.

    Returns:
        float32, shape (rows, size, size). Only single numbers are multiplied and added, so that the
        bits are the same on every machine.

    Example:
        >>> import numpy as np
        >>> from multitower.recipes import digits
        >>> digits.enlarge(np.float32([[[0, 1], [0, 1]]]), 4)[0, 0]
        array([0.  , 0.25, 0.75, 1.  ], dtype=float32)
    """
    old = images.shape[1]
    centres = (np.arange(size) + 0.5) * old / size - 0.5  # in pixels of the small image
    position = np.clip(centres, 0, old - 1).astype(np.float32)
    left = np.minimum(position.astype(np.intp), old - 2)
    share = position - left.astype(np.float32)
    images = (
        images[:, left] * (1 - share)[:, np.newaxis] + images[:, left + 1] * share[:, np.newaxis]
    )
    return images[:, :, left] * (1 - share) + images[:, :, left + 1] * share


def shift(batch: dict[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Moves every image by up to two of its 28 pixels, up or down and left or right.

    With it about 2 of the 359 test images are misclassified, without it about 7.

    Args:
        batch: `"image"` and `"label"`, as `load` returns them.
        generator: draws the shifts.

    Returns:
        The same, with moved images; black pixels fill the gaps.

    Example:
        >>> import numpy as np
        >>> from multitower.recipes import digits
        >>> train, _ = digits.load()
        >>> digits.shift(train, np.random.default_rng(0))["image"].shape
        (1438, 28, 28, 1)
    """
    images = batch["image"]
    num_rows, size = images.shape[:2]
    border = (_LARGEST_SHIFT, _LARGEST_SHIFT)
    padded = np.pad(images, ((0, 0), border, border, (0, 0)))
    corners = generator.integers(0, 2 * _LARGEST_SHIFT + 1, (2, num_rows, 1))
    down, across = corners + np.arange(size)
    moved = padded[np.arange(num_rows)[:, None, None], down[:, :, None], across[:, None, :]]
    return {**batch, "image": moved}


def make_loss(penalty_rate: float) -> Callable[..., Any]:
    """Makes the loss to minimise: the cross-entropy of every example, plus the weight penalty.

    Args:
        penalty_rate: the factor of the weight penalty.

    Returns:
        `loss(params, batch)`. It returns the losses, shape (rows,), and a dict with `"accuracy"`,
        1 for a right answer, 0 for a wrong one, shape (rows,).
    """

    def loss(params: lenet5.Params, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        scores = metrics(params, batch)
        # The same penalty in every row, so that the mean over rows has it once, with any number of
        # towers.
        losses = scores["loss"] + penalty_rate * lenet5.weight_penalty(params)
        return losses, {"accuracy": scores["accuracy"]}

    return loss


def metrics(params: lenet5.Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Scores examples.

    Args:
        params: from `lenet5.init`.
        batch: `"image"` and `"label"`, as `load` returns them.

    Returns:
        `"loss"`, the cross-entropy without the weight penalty, and `"accuracy"`, 1 for a right
        answer, 0 for a wrong one; both float32, shape (rows,).
    """
    return score(predict(params, batch), batch["label"])


def predict(params: lenet5.Params, batch: dict[str, Any]) -> jax.Array:
    """Scores of the ten digits for every image.

    Args:
        params: from `lenet5.init`.
        batch: as for `metrics`.

    Returns:
        Logits, float32, shape (rows, 10).
    """
    return lenet5.logits(params, batch["image"])


def make_optimizer(options: Options) -> Callable[[int], Optimizer]:
    """Makes the function that makes the optimizer: Adam, with cosine decay of the learning rate.

    Args:
        options: the learning rate and the momentum.

    Returns:
        `optimizer(steps)`.
    """

    def optimizer(steps: int) -> Optimizer:
        rate = optax.cosine_decay_schedule(options.learning_rate, steps)
        return Optimizer(optax.adam, rate, options.momentum)

    return optimizer


recipe = make_recipe(Options())

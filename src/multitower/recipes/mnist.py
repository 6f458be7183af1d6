"""mnist: a convolutional network with dropout on 60 000 handwritten digits."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from multitower import datasets
from multitower.recipes import conv_net
from multitower.recipes.options import ImageOptions, check_range
from multitower.recipes.recipe import DataSets, Recipe
from multitower.recipes.scores import score

IMAGE_SHAPE = (28, 28, 1)
_NAME = "mnist"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ImageOptions):
    """What can be set: `multitower train mnist --set dropout_rate=0.5`.

    Raises:
        RunError: a number that makes no sense.
    """

    learning_rate: Annotated[float, "of Adam"] = 1e-3
    dropout_rate: Annotated[float, "share of the features dropped in training"] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "learning_rate", 0, 1e3)
        check_range(self, "dropout_rate", 0, 0.999)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: what is set.

    Returns:
        The recipe. Every tower draws its own dropout.

    Example:
        >>> from multitower.recipes import mnist
        >>> mnist.make_recipe(mnist.Options(synthetic=True)).data().test["image"].shape
        (10000, 28, 28, 1)
    """
    directory = options.data or datasets.cache_directory(_NAME)
    return Recipe(
        name=_NAME,
        data=lambda: load(options),
        download=lambda progress: datasets.download_mnist(directory, progress),
        init=conv_net.init,
        loss=make_loss(options.dropout_rate),
        metrics=metrics,
        optimizer=lambda steps: optax.adam(options.learning_rate),
        steps=1000,
        global_batch=128,
    )


def load(options: ImageOptions) -> DataSets:
    """Reads MNIST, or makes images of its shapes up.

    Args:
        options: where from.

    Returns:
        Dicts of `"image"`, uint8, shape (rows, 28, 28, 1), and `"label"`, int32, shape (rows,).

    Raises:
        DataError: the files are missing or damaged.
    """
    if options.synthetic:
        made = datasets.make_synthetic(IMAGE_SHAPE, num_train=60_000, num_test=10_000)
        return DataSets(*made)
    return DataSets(*datasets.read_mnist(options.data or datasets.cache_directory(_NAME)))


def make_loss(dropout_rate: float) -> Callable[..., Any]:
    """Makes the loss: the cross-entropy with dropout.

    Args:
        dropout_rate: share of the features that is dropped.

    Returns:
        `loss(params, batch, *, rng)`: the losses, shape (rows,), and a dict with `"accuracy"`,
        shape (rows,).
    """

    def loss(
        params: conv_net.Params, batch: dict[str, Any], *, rng: jax.Array
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        images = as_floats(batch["image"])
        answers = conv_net.logits(params, images, rng=rng, dropout_rate=dropout_rate)
        scores = score(answers, batch["label"])
        return scores["loss"], {"accuracy": scores["accuracy"]}

    return loss


def metrics(params: conv_net.Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Scores examples, without dropout.

    Args:
        params: from `conv_net.init`.
        batch: `"image"` and `"label"`, as `load` returns them.

    Returns:
        `"loss"` and `"accuracy"`, as `multitower.recipes.scores.score`.
    """
    return score(conv_net.logits(params, as_floats(batch["image"])), batch["label"])


def as_floats(images: Any) -> jax.Array:
    """Pixels from 0 to 1, on the device: a quarter of the bytes goes there.

    Args:
        images: uint8.

    Returns:
        float32, the same shape.
    """
    return jnp.asarray(images).astype(jnp.float32) / 255

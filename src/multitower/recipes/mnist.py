"""mnist: 60 000 handwritten digits; a convolutional network with dropout, or LeNet-5."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

import multitower as mt
from multitower.data.datasets.download import cache_directory
from multitower.data.datasets.mnist import download_mnist, read_mnist
from multitower.data.datasets.synthetic import make_synthetic
from multitower.recipes.definition import DataSets, Optimizer, Recipe
from multitower.recipes.networks import conv_net, lenet5
from multitower.recipes.options import ImageOptions, check_range
from multitower.recipes.scores import score

IMAGE_SHAPE = (28, 28, 1)
_NAME = "mnist"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ImageOptions):
    """What can be set: `multitower train mnist --model lenet5`.

    Raises:
        RunError: a number is out of range.
    """

    model: Annotated[str, "conv_net or lenet5"] = "conv_net"
    learning_rate: Annotated[float, "of Adam"] = 1e-3
    dropout_rate: Annotated[float, "share of conv_net's features dropped in training"] = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.model not in ("conv_net", "lenet5"):
            raise mt.RunError(f"model={self.model}: say conv_net or lenet5.")
        check_range(self, "learning_rate", 0, 1e3)
        check_range(self, "dropout_rate", 0, 0.999)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: the options of the recipe.

    Returns:
        The recipe. With conv_net every tower draws its own dropout.

    Example:
        >>> from multitower.recipes import mnist
        >>> mnist.make_recipe(mnist.Options(synthetic=True)).data().test["image"].shape
        (10000, 28, 28, 1)
    """
    is_lenet5 = options.model == "lenet5"
    predict = predict_lenet5 if is_lenet5 else predict_conv_net
    return Recipe(
        name=_NAME,
        data=lambda: load(options),
        download=lambda progress: download_mnist(options.data or cache_directory(_NAME), progress),
        init=lenet5.init if is_lenet5 else conv_net.init,
        loss=loss_lenet5 if is_lenet5 else make_loss(options.dropout_rate),
        metrics=lambda params, batch: score(predict(params, batch), batch["label"]),
        predict=predict,
        optimizer=lambda steps: Optimizer(optax.adam, options.learning_rate, momentum=0.9),
        steps=1000,
        global_batch=128,
    )


def load(options: ImageOptions) -> DataSets:
    """Reads MNIST, or makes up images of the same shapes.

    Args:
        options: the directory, or `synthetic`.

    Returns:
        Dicts of `"image"`, uint8, shape (rows, 28, 28, 1), and `"label"`, int32, shape (rows,).

    Raises:
        DataError: the files are missing or damaged.
    """
    if options.synthetic:
        made = make_synthetic(IMAGE_SHAPE, num_train=60_000, num_test=10_000)
        return DataSets(*made)
    return DataSets(*read_mnist(options.data or cache_directory(_NAME)))


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


def loss_lenet5(params: lenet5.Params, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
    """The cross-entropy of LeNet-5.

    Args:
        params: from `lenet5.init`.
        batch: `"image"` and `"label"`, as `load` returns them.

    Returns:
        As the loss that `make_loss` makes.
    """
    scores = score(predict_lenet5(params, batch), batch["label"])
    return scores["loss"], {"accuracy": scores["accuracy"]}


def predict_conv_net(params: conv_net.Params, batch: dict[str, Any]) -> jax.Array:
    """Scores of the ten digits, without dropout.

    Args:
        params: from `conv_net.init`.
        batch: `"image"`, as `load` returns it.

    Returns:
        Logits, float32, shape (rows, 10).
    """
    return conv_net.logits(params, as_floats(batch["image"]))


def predict_lenet5(params: lenet5.Params, batch: dict[str, Any]) -> jax.Array:
    """Scores of the ten digits.

    Args:
        params: from `lenet5.init`.
        batch: `"image"`, as `load` returns it.

    Returns:
        Logits, float32, shape (rows, 10).
    """
    return lenet5.logits(params, as_floats(batch["image"]))


def as_floats(images: Any) -> jax.Array:
    """Converts pixels to floats from 0 to 1 on the device, so that bytes are copied there.

    Args:
        images: uint8.

    Returns:
        float32, the same shape.
    """
    return jnp.asarray(images).astype(jnp.float32) / 255

"""cifar10: the classic CIFAR-10 program, LeNet-5 on distorted images, on any number of towers."""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from multitower.data.datasets.cifar10 import download_cifar10, read_cifar10
from multitower.data.datasets.download import cache_directory
from multitower.data.datasets.synthetic import make_synthetic
from multitower.recipes import distortions
from multitower.recipes.definition import DataSets, Optimizer, Recipe
from multitower.recipes.networks import lenet5
from multitower.recipes.options import ImageOptions, check_range
from multitower.recipes.scores import score

IMAGE_SHAPE = (32, 32, 3)
_NAME = "cifar10"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ImageOptions):
    """What can be set: `multitower train cifar10 --lr-base 0.002`.

    The learning rate of a step is `lr_base * lr_decay ** (step / decay_steps)`. (The classic
    program's decay_steps was its batch size, 64, by mistake: 1e-10 after 100 000 steps.)

    Raises:
        RunError: a number is out of range.
    """

    lr_base: Annotated[float, "learning rate of the first step"] = 1e-3
    lr_decay: Annotated[float, "by which it is multiplied in decay_steps steps"] = 0.99
    decay_steps: Annotated[float | None, "see lr_decay; None: the steps of one epoch"] = None
    reg_rate: Annotated[float, "of half the sum of squared weights in the loss"] = 1e-4
    ma_decay: Annotated[float, "of the moving average of the weights, which is what is scored"] = (
        0.99
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "lr_base", 0, 1e3)
        check_range(self, "lr_decay", 0, 1)
        check_range(self, "reg_rate", 0, 1e3)
        check_range(self, "ma_decay", 0, 1)
        if self.decay_steps is not None:
            check_range(self, "decay_steps", 1e-3, 1e12)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: the options of the recipe.

    Returns:
        The recipe.

    Example:
        >>> from multitower.recipes import cifar10
        >>> recipe = cifar10.make_recipe(cifar10.Options(synthetic=True))
        >>> recipe.name, recipe.global_batch
        ('cifar10', 128)

    Source: the CIFAR-10 multi-GPU tutorial; LeCun et al. 1998 (LeNet-5).
    """
    return Recipe(
        name=_NAME,
        data=lambda: load(options),
        download=lambda progress: download(options, progress),
        init=lambda key: lenet5.init(key, channels=IMAGE_SHAPE[-1]),
        augment=distort,
        loss=make_loss(options.reg_rate),
        metrics=metrics,
        predict=predict,
        optimizer=make_optimizer(options),
        ema_decay=make_ema_decay(options.ma_decay),
        steps=10_000,
        global_batch=128,
    )


def load(options: ImageOptions) -> DataSets:
    """Reads CIFAR-10, or makes up images of the same shapes.

    Args:
        options: the directory, or `synthetic`.

    Returns:
        Dicts of `"image"`, uint8, shape (rows, 32, 32, 3), and `"label"`, int32, shape (rows,).

    Raises:
        DataError: the files are missing or damaged.
    """
    if options.synthetic:
        made = make_synthetic(IMAGE_SHAPE, num_train=50_000, num_test=10_000)
        return DataSets(*made)
    return DataSets(*read_cifar10(options.data or cache_directory(_NAME)))


def download(options: ImageOptions, progress: Any = None) -> None:
    """Downloads CIFAR-10 to the directory from which `load` reads it.

    Args:
        options: the directory.
        progress: as for `multitower.data.datasets.cifar10.download_cifar10`.

    Raises:
        DataError: the download fails.
    """
    download_cifar10(options.data or cache_directory(_NAME), progress)


def distort(batch: dict[str, Any], keys: jax.Array) -> dict[str, Any]:
    """Distorts the images of a training batch at random, each by its key.

    Args:
        batch: `"image"` and `"label"`, as `load` returns them.
        keys: typed keys, shape (rows,).

    Returns:
        The same, with images float32, shape (rows, 28, 28, 3).
    """
    return {**batch, "image": distortions.distort(batch["image"], keys)}


def make_loss(reg_rate: float) -> Callable[..., Any]:
    """Makes the loss: cross-entropy plus `reg_rate` times half the sum of squared weights.

    Args:
        reg_rate: the factor of half the sum of squared weights.

    Returns:
        `loss(params, batch)` of distorted images: the losses, shape (rows,), and a dict with
        `"accuracy"`, 1 for a right answer, 0 for a wrong one, shape (rows,).
    """

    def loss(params: lenet5.Params, batch: dict[str, Any]) -> tuple[jax.Array, dict[str, Any]]:
        scores = score(lenet5.logits(params, batch["image"]), batch["label"])
        # The same penalty in every row, so that the mean over rows has it once, with any number of
        # towers.
        losses = scores["loss"] + reg_rate * lenet5.weight_penalty(params)
        return losses, {"accuracy": scores["accuracy"]}

    return loss


def metrics(params: lenet5.Params, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Scores examples, with the central crop of their images.

    Args:
        params: from `lenet5.init`, with three channels.
        batch: `"image"` and `"label"`, as `load` returns them.

    Returns:
        `"loss"` and `"accuracy"`, as `multitower.recipes.scores.score`.
    """
    return score(predict(params, batch), batch["label"])


def predict(params: lenet5.Params, batch: dict[str, Any]) -> jax.Array:
    """Predicts scores of the ten classes, from the central crop of every image.

    Args:
        params: as for `metrics`.
        batch: as for `metrics`.

    Returns:
        Logits, float32, shape (rows, 10).
    """
    return lenet5.logits(params, distortions.central(batch["image"]))


def make_ema_decay(ma_decay: float) -> Callable[[jax.Array], jax.Array]:
    """Makes the decay of the moving average: lower at first, so that it forgets the start.

    Args:
        ma_decay: the highest decay.

    Returns:
        A function of s, the number of updates made: `min(ma_decay, (1 + s) / (10 + s))`.
    """
    return lambda step: jnp.minimum(ma_decay, (1 + step) / (10 + step))


def make_optimizer(options: Options) -> Callable[..., Optimizer]:
    """Makes the function that makes the optimizer of a run: Adam with `learning_rate`.

    Args:
        options: as for `learning_rate`.

    Returns:
        `optimizer(steps, *, steps_per_epoch)`.
    """

    def optimizer(steps: int, *, steps_per_epoch: float) -> Optimizer:
        return Optimizer(optax.adam, learning_rate(options, steps_per_epoch), momentum=0.9)

    return optimizer


def learning_rate(options: Options, steps_per_epoch: float) -> Callable[[Any], Any]:
    """Makes the smooth schedule `lr_base * lr_decay ** (step / decay_steps)`.

    Args:
        options: their `lr_base`, `lr_decay` and `decay_steps` are used.
        steps_per_epoch: used in place of `decay_steps`, if that is None.

    Returns:
        A function of the number of updates made before.

    Example:
        >>> from multitower.recipes import cifar10
        >>> rate = cifar10.learning_rate(cifar10.Options(lr_decay=0.25), steps_per_epoch=100)
        >>> rate(0), rate(50), rate(100)
        (0.001, 0.0005, 0.00025)
    """
    decay_steps = options.decay_steps or steps_per_epoch
    return lambda step: options.lr_base * options.lr_decay ** (step / decay_steps)

"""cifar10-resnet20: ResNet-20 with batch normalisation on the distorted images of cifar10."""

import dataclasses
from typing import Annotated, Any

import jax
import optax

from multitower.recipes import cifar10, distortions
from multitower.recipes.definition import Optimizer, Recipe
from multitower.recipes.networks import resnet20
from multitower.recipes.options import ImageOptions, check_range
from multitower.recipes.scores import score


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(ImageOptions):
    """What can be set: `multitower train cifar10-resnet20 --learning-rate 0.05`.

    Raises:
        RunError: a number is out of range.
    """

    learning_rate: Annotated[float, "a tenth of it after half the steps, a 100th after 3/4"] = 0.1
    momentum: Annotated[float, "of SGD"] = 0.9
    reg_rate: Annotated[float, "of half the sum of squared weights in the loss"] = 1e-4
    ma_decay: Annotated[float, "of the moving average of the weights, which is scored"] = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, "learning_rate", 0, 1e3)
        check_range(self, "momentum", 0, 0.9999)
        check_range(self, "reg_rate", 0, 1e3)
        check_range(self, "ma_decay", 0, 1)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: the options of the recipe.

    Returns:
        The recipe. In training, every tower normalises with statistics of its own rows; the running
        statistics are averaged over towers.

    Example:
        >>> from multitower.recipes import cifar10_resnet20
        >>> cifar10_resnet20.make_recipe(cifar10_resnet20.Options()).name
        'cifar10-resnet20'
    """

    def loss(params: Any, batch: dict[str, Any], *, model_state: Any) -> Any:
        answers, model_state = resnet20.logits(params, model_state, batch["image"], training=True)
        scores = score(answers, batch["label"])
        # The same penalty in every row, so that the mean over rows has it once, with any number of
        # towers.
        losses = scores["loss"] + options.reg_rate * resnet20.weight_penalty(params)
        return losses, {"accuracy": scores["accuracy"]}, model_state

    def optimizer(steps: int) -> Optimizer:
        drops = {steps // 2: 0.1, steps * 3 // 4: 0.1}
        rate = optax.piecewise_constant_schedule(options.learning_rate, drops)
        return Optimizer(optax.sgd, rate, options.momentum)

    return Recipe(
        name="cifar10-resnet20",
        data=lambda: cifar10.load(options),
        download=lambda progress: cifar10.download(options, progress),
        init=resnet20.init,
        model_state=resnet20.init_statistics,
        augment=cifar10.distort,
        loss=loss,
        metrics=metrics,
        predict=predict,
        optimizer=optimizer,
        ema_decay=cifar10.make_ema_decay(options.ma_decay),
        steps=20_000,
        global_batch=128,
    )


def metrics(params: Any, batch: dict[str, Any], *, model_state: Any) -> dict[str, jax.Array]:
    """Scores examples, with the central crop of their images and the running statistics.

    Args:
        params: from `resnet20.init`.
        batch: `"image"` and `"label"`, as `cifar10.load` returns them.
        model_state: the running statistics.

    Returns:
        `"loss"` and `"accuracy"`, as `multitower.recipes.scores.score`.
    """
    return score(predict(params, batch, model_state=model_state), batch["label"])


def predict(params: Any, batch: dict[str, Any], *, model_state: Any) -> jax.Array:
    """Predicts scores of the ten classes, from the central crop of every image.

    Args:
        params: as for `metrics`.
        batch: as for `metrics`.
        model_state: as for `metrics`.

    Returns:
        Logits, float32, shape (rows, 10).
    """
    images = distortions.central(batch["image"])
    answers, _ = resnet20.logits(params, model_state, images, training=False)
    return answers

"""Samples: a few examples for a report, as the model sees them, with its predictions."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from multitower.data.augmentation import augment_batch
from multitower.processes.together import whole_on_host
from multitower.recipes.definition import Recipe, takes
from multitower.steps.state.train_state import TrainState

_NUM_INPUTS = 16
_NUM_SCORED = 256
_NUM_FIRST = 12
_NUM_WRONG = 12
_NUM_BYTES = 256
_PROMPT_BYTES = 64
_WRITTEN_BYTES = 400
_TEMPERATURE = 0.7


class Sample(NamedTuple):
    """One test example.

    Attributes:
        image: uint8, shape (height, width, 1 or 3).
        label: the right class.
        predicted: the class with the highest probability by the model.
        probability: the probability of `predicted`, 0 to 1.
    """

    image: np.ndarray[Any, Any]
    label: int
    predicted: int
    probability: float


class TextSample(NamedTuple):
    """A text that a model has written.

    Attributes:
        prompt: the text that it was given.
        text: the text that it wrote.
    """

    prompt: str
    text: str


def sample_inputs(
    recipe: Recipe, make_batch: Callable[[int], Any]
) -> np.ndarray[Any, np.dtype[np.uint8]] | None:
    """Images of the first training batch, with all random changes: what the model sees.

    Args:
        recipe: of the run.
        make_batch: makes so many of the first rows of the first batch.

    Returns:
        uint8, shape (16 or fewer, height, width, 1 or 3); None if the examples are not images.
    """
    batch, augment = make_batch(_NUM_INPUTS), recipe.augment
    if augment is not None:
        batch = jax.jit(lambda batch: augment_batch(augment, batch))(batch)
    return _pixels(batch["image"]) if _has_images(batch) else None


def sample_predictions(recipe: Recipe, state: TrainState, test: Any) -> list[Sample]:
    """Test examples with the model's answers: the first ones, and the first that are wrong.

    Call it on every process: the parameters may be split over all of them.

    Args:
        recipe: of the run.
        state: after it; the moving average answers, if there is one.
        test: the recipe's test set.

    Returns:
        The first 12 examples, and up to 12 wrong ones among the first 256; empty if they are not
        images, or the recipe has no `predict`.
    """
    if recipe.predict is None or not _has_images(test) or "label" not in test:
        return []
    rows = jax.tree.map(lambda leaf: leaf[:_NUM_SCORED], test)
    extras = {"model_state": state.model_state} if takes(recipe.predict, "model_state") else {}
    # On one device, from host copies: the state may be split over several.
    params, extras = params_on_host(state), jax.tree.map(whole_on_host, extras)
    logits = np.asarray(jax.jit(recipe.predict)(params, rows, **extras), np.float64)
    share = np.exp(logits - logits.max(-1, keepdims=True))
    share /= share.sum(-1, keepdims=True)
    predicted = logits.argmax(-1)
    wrong = np.flatnonzero(predicted != rows["label"])
    chosen = np.arange(min(_NUM_FIRST, len(logits)))
    chosen = [*chosen, *wrong[wrong >= _NUM_FIRST][:_NUM_WRONG]]
    images = _pixels(rows["image"])
    return [
        Sample(images[i], int(rows["label"][i]), int(predicted[i]), float(share[i, predicted[i]]))
        for i in chosen
    ]


def sample_texts(recipe: Recipe, state: TrainState, test: Any) -> list[TextSample]:
    """Continuations of two test rows: the first one, and the one in the middle.

    Call it on every process, like `sample_predictions`.

    Args:
        recipe: of the run.
        state: after it; the moving average answers, if there is one.
        test: the recipe's test set.

    Returns:
        Two texts; empty if the rows are not tokens, or the recipe has no `generate`.
    """
    if recipe.generate is None or not isinstance(test, dict) or "tokens" not in test:
        return []
    params = params_on_host(state)
    found: list[TextSample] = []
    for row in (test["tokens"][0], test["tokens"][len(test["tokens"]) // 2]):
        row = np.asarray(row)[: min(_PROMPT_BYTES, len(row) // 2)]
        prompt = row[row < _NUM_BYTES].astype(np.uint8).tobytes().decode("utf-8", "ignore") or " "
        how = {"num_bytes": _WRITTEN_BYTES, "temperature": _TEMPERATURE, "seed": 0}
        found.append(TextSample(prompt, recipe.generate(params, prompt, **how)))
    return found


def params_on_host(state: TrainState) -> Any:
    """The moving average or the parameters, in NumPy arrays; call it on every process."""
    params = state.params if state.ema_params is None else state.ema_params
    return jax.tree.map(whole_on_host, params)


def _has_images(batch: Any) -> bool:
    """Whether a batch is a dict with images of one or three channels."""
    shape = np.shape(batch["image"]) if isinstance(batch, dict) and "image" in batch else ()
    return len(shape) == 4 and shape[-1] in (1, 3)


def _pixels(images: Any) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """Images as bytes; floats outside of 0 to 1, such as standardised ones, fill the range."""
    images = np.asarray(images)
    if images.dtype == np.uint8:
        return images
    images = images.astype(np.float32)
    if images.min() < 0 or images.max() > 1:
        low = images.min(axis=(1, 2, 3), keepdims=True)
        high = images.max(axis=(1, 2, 3), keepdims=True)
        images = (images - low) / np.maximum(high - low, 1e-6)
    return np.round(images * 255).astype(np.uint8)

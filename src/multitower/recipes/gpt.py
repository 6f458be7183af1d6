"""gpt: a language model of bytes, a decoder-only transformer on packed documents."""

import dataclasses
import functools
import hashlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt
from multitower.data.datasets.text import Text, make_synthetic_text, read_text
from multitower.recipes.definition import DataSets, Optimizer, Recipe
from multitower.recipes.generation import generate
from multitower.recipes.networks import transformer
from multitower.recipes.options import check_range
from multitower.recipes.packing import VOCABULARY, pack, take_tokens

_TEST_BYTES = 2**17
_MOMENTUM = 0.9  # of AdamW


class Size(NamedTuple):
    """A size of the model, and how it is trained unless the run says otherwise.

    Attributes:
        num_blocks: of the transformer.
        width: numbers for each token between blocks.
        num_heads: of the attention.
        length: bytes of a row, which is as far as the model looks back.
        global_batch: rows of a step.
        steps: updates of a run.
        learning_rate: the highest one.
    """

    num_blocks: int
    width: int
    num_heads: int
    length: int
    global_batch: int
    steps: int
    learning_rate: float


SIZES = {
    "micro": Size(2, 16, 2, 16, 8, 20, 1e-2),  # 10 000 parameters: for trying flags out
    "tiny": Size(4, 96, 4, 128, 8, 1500, 6e-3),
    "small": Size(8, 320, 5, 512, 64, 5000, 1e-3),
    "medium": Size(12, 768, 12, 1024, 128, 20_000, 6e-4),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """What can be set: `multitower train gpt --size small`.

    Raises:
        RunError: there is no such size, or a number makes no sense.
    """

    data: Annotated[
        Path | None, "text file, or directory of them; None: Python's standard library"
    ] = None
    synthetic: Annotated[bool, "make text up instead of reading files"] = False
    size: Annotated[str, ", ".join(SIZES)] = "tiny"
    length: Annotated[int | None, "bytes that the model looks back; None: as the size says"] = None
    learning_rate: Annotated[float | None, "the highest one; None: as the size says"] = None
    weight_decay: Annotated[float, "of AdamW; not of norms and embedding"] = 0.1

    def __post_init__(self) -> None:
        if self.synthetic and self.data is not None:
            raise mt.RunError(
                f"both synthetic text and data={self.data} were asked for: leave one out."
            )
        if self.size not in SIZES:
            raise mt.RunError(f"size={self.size}: say {', '.join(SIZES)}.")
        check_range(self, "weight_decay", 0, 1e3)
        if self.length is not None:
            check_range(self, "length", 2, 2**20)
        if self.learning_rate is not None:
            check_range(self, "learning_rate", 0, 1e3)


def make_recipe(options: Options) -> Recipe:
    """Makes the recipe.

    Args:
        options: what is set.

    Returns:
        The recipe.

    Example:
        >>> from multitower.recipes import gpt
        >>> recipe = gpt.make_recipe(gpt.Options(size="small"))
        >>> recipe.name, recipe.global_batch
        ('gpt', 64)

    Source: Radford et al. 2019 ("Language Models are Unsupervised Multitask Learners").
    """
    size = SIZES[options.size]
    length = options.length or size.length
    read = functools.cache(lambda: _read(options))
    return Recipe(
        name="gpt",
        data=lambda: make_data(read(), length),
        about_data=lambda: _about(read()),
        init=functools.partial(
            transformer.init,
            vocabulary=VOCABULARY,
            num_blocks=size.num_blocks,
            width=size.width,
            num_heads=size.num_heads,
        ),
        loss=loss,
        metrics=metrics,
        optimizer=make_optimizer(options),
        clip_norm=1.0,
        generate=functools.partial(generate, context=length),
        steps=size.steps,
        global_batch=size.global_batch,
    )


def make_data(text: Text, length: int) -> DataSets:
    """Packs documents.

    Args:
        text: the documents.
        length: predictions of a row.

    Returns:
        Dicts of `"tokens"`, as `multitower.recipes.packing.pack` returns them. Of the documents
        that are held out, the test set has rows at equal distances, 128 KiB of them or all.

    Raises:
        DataError: the documents for training fill no row.
    """
    num_bytes = sum(map(len, text.train))
    if num_bytes < length:
        raise mt.DataError(
            f"the text has {num_bytes} bytes to train on, and a row of this model takes {length}. "
            "Use a longer text, or shorter rows: --length N."
        )
    test = pack(text.test, length)
    num_rows = min(len(test), -(-_TEST_BYTES // length))
    test = test[np.arange(num_rows) * len(test) // num_rows]
    return DataSets(train={"tokens": pack(text.train, length)}, test={"tokens": test})


def loss(params: transformer.Params, batch: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The mean over all predicted bytes of their cross-entropy, in nats.

    Args:
        params: from `transformer.init`.
        batch: `"tokens"`, as `make_data` returns them.

    Returns:
        The loss and a dict with `"bits_per_byte"`, the same in bits.
    """
    scores = metrics(params, batch)
    return scores["loss"], {"bits_per_byte": scores["bits_per_byte"]}


def metrics(params: transformer.Params, batch: dict[str, Any]) -> dict[str, Any]:
    """Scores predictions.

    Args:
        params: from `transformer.init`.
        batch: `"tokens"`, as `make_data` returns them.

    Returns:
        `"loss"`, the mean cross-entropy in nats, and `"bits_per_byte"`, in bits.
    """
    inputs, segments, targets, counts = take_tokens(batch["tokens"])
    answers = transformer.logits(params, inputs, segments)
    losses = optax.softmax_cross_entropy_with_integer_labels(answers, targets)
    losses = jnp.where(counts, losses, 0)
    weight = counts.astype(jnp.float32)
    # Towers have different numbers of bytes, so totals and weights are summed, then divided once.
    return {
        "loss": mt.ratio(losses, weight),
        "bits_per_byte": mt.ratio(losses / math.log(2), weight),
    }


def make_optimizer(options: Options) -> Callable[[int], Optimizer]:
    """Makes the function that makes the optimizer: AdamW with warm-up and cosine decay.

    Args:
        options: the learning rate and the weight decay.

    Returns:
        `optimizer(steps)`. The learning rate rises over the first twentieth of the steps and falls
        along half a cosine to a tenth.
    """
    peak = options.learning_rate
    if peak is None:
        peak = SIZES[options.size].learning_rate

    def optimizer(steps: int) -> Optimizer:
        warm_up = steps // 20
        rate = optax.warmup_cosine_decay_schedule(
            peak / (warm_up + 1), peak, warm_up, steps, end_value=peak / 10
        )
        adamw = lambda rate, momentum: optax.adamw(
            rate, momentum, b2=0.95, weight_decay=options.weight_decay, mask=is_decayed
        )
        return Optimizer(adamw, rate, _MOMENTUM)

    return optimizer


def is_decayed(params: Any) -> Any:
    """Which parameters AdamW decays: the matrices of the blocks, not the norms and the embedding.

    Args:
        params: from `transformer.init`.

    Returns:
        The same tree of bools.

    Example:
        >>> import jax
        >>> from multitower.recipes import gpt
        >>> shapes = jax.eval_shape(gpt.make_recipe(gpt.Options()).init, jax.random.key(0))
        >>> decayed = gpt.is_decayed(shapes)
        >>> decayed["embedding"], decayed["blocks"][0]["query"]
        (False, True)
    """
    # By name, not by the number of axes: a step may keep parameters in blocks of another shape.
    last = lambda path: str(getattr(path[-1], "key", path[-1]))
    return jax.tree_util.tree_map_with_path(
        lambda path, _: last(path) != "embedding" and not last(path).endswith("norm"), params
    )


def _read(options: Options) -> Text:
    return make_synthetic_text() if options.synthetic else read_text(options.data)


def _about(text: Text) -> dict[str, Any]:
    """Identifies the text, since Python's standard library differs between versions."""
    digest = hashlib.sha256()
    for document in (*text.train, *text.test):
        digest.update(len(document).to_bytes(8, "little") + document)
    return {
        "text_sha256": digest.hexdigest(),
        "train_bytes": sum(map(len, text.train)),
        "held_out_bytes": sum(map(len, text.test)),
    }

"""The work of the comparison: first weights and batches, drawn once and handed to every contender.

Weights have flat names ("dense1.w"), in JAX's layout: images are NHWC, filters HWIO, dense weights
(in, out). A contender with another layout turns them around as it loads them. This module needs
NumPy only, so that it imports in every environment.
"""

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

Arrays = dict[str, Any]

NUM_DEVICES = 2
NUM_BATCHES = 5  # the first losses are of different batches; later steps start over

# Adam, the same everywhere; the libraries' own defaults differ in eps.
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-8

# The transformer's sizes.
VOCABULARY, NUM_TOKENS, DIM, NUM_HEADS, NUM_LAYERS = 256, 64, 128, 4, 2

# Those of the recipe gpt, in its size "tiny": rotary positions, RMSNorm, SwiGLU, a tied embedding.
GPT_VOCABULARY, GPT_LENGTH, GPT_WIDTH, GPT_HEADS, GPT_BLOCKS = 257, 128, 96, 4, 4
GPT_HIDDEN = 8 * round(GPT_WIDTH / 3)
GPT_LONGEST_WAVE, RMS_NORM_EPSILON = 10_000.0, 1e-6

LAYER_NORM_EPSILON = 1e-5
BATCH_NORM_EPSILON = 1e-5
BATCH_NORM_KEEPS = 0.9

RESNET_STAGES = ((16, 1), (32, 2), (64, 2))  # channels, and the stride of the first block
RESNET_BLOCKS = 3


@dataclass(frozen=True)
class Work:
    """One model with its data.

    Attributes:
        name: as printed.
        learning_rate: of Adam.
        steps_per_block: how many steps a contender makes in its turn.
        has_batch_norm: its losses depend on whether statistics are a tower's or the whole batch's.
        make_weights: first weights.
        make_batch: one global batch, "x" and "y".
        tokens_per_step: of a language model, over both devices; 0 for other models.
    """

    name: str
    learning_rate: float
    steps_per_block: int
    has_batch_norm: bool
    make_weights: Callable[[np.random.Generator], Arrays]
    make_batch: Callable[[np.random.Generator], Arrays]
    tokens_per_step: int = 0


def draw(work: Work) -> Arrays:
    """Everything that a worker needs, for one .npz file."""
    rng = np.random.default_rng(0)
    weights = {f"weights/{name}": array for name, array in work.make_weights(rng).items()}
    batches = {
        f"batch/{number}/{name}": array
        for number in range(NUM_BATCHES)
        for name, array in work.make_batch(rng).items()
    }
    return weights | batches


def he_normal(rng: np.random.Generator, *shape: int) -> Any:
    return (rng.normal(size=shape) * math.sqrt(2 / math.prod(shape[:-1]))).astype("f")


def polynomial_weights(rng: np.random.Generator) -> Arrays:
    return {"w": np.ones(3, "f")}


def polynomial_batch(rng: np.random.Generator) -> Arrays:
    x = rng.uniform(-10, 10, size=100).astype("f")
    return {"x": x, "y": 5 * x**2 + 3}


def mlp_weights(rng: np.random.Generator) -> Arrays:
    weights: Arrays = {}
    for number, (m, n) in enumerate(itertools.pairwise((784, 1024, 1024, 10)), 1):
        weights |= {f"dense{number}.w": he_normal(rng, m, n), f"dense{number}.b": np.zeros(n, "f")}
    return weights


def lenet5_weights(rng: np.random.Generator) -> Arrays:
    shapes = {
        "conv1": (5, 5, 1, 6),
        "conv2": (5, 5, 6, 16),
        "dense1": (400, 120),
        "dense2": (120, 84),
        "dense3": (84, 10),
    }
    weights: Arrays = {}
    for name, shape in shapes.items():
        weights |= {f"{name}.w": he_normal(rng, *shape), f"{name}.b": np.zeros(shape[-1], "f")}
    return weights


def resnet20_weights(rng: np.random.Generator) -> Arrays:
    weights: Arrays = {}
    for name, channels_in, channels_out, _ in resnet20_convolutions():
        weights |= {
            f"{name}.w": he_normal(rng, 3, 3, channels_in, channels_out),
            f"{name}.scale": np.ones(channels_out, "f"),
            f"{name}.shift": np.zeros(channels_out, "f"),
        }
    return weights | {"dense.w": he_normal(rng, 64, 10), "dense.b": np.zeros(10, "f")}


def resnet20_convolutions() -> list[tuple[str, int, int, int]]:
    """Name, channels in, channels out and stride of every convolution, from first to last."""
    found = [("stem", 3, 16, 1)]
    channels = 16
    for number, (width, first_stride) in enumerate(RESNET_STAGES):
        for block in range(RESNET_BLOCKS):
            stride = first_stride if block == 0 else 1
            found.append((f"stages.{number}.{block}.conv1", channels, width, stride))
            found.append((f"stages.{number}.{block}.conv2", width, width, 1))
            channels = width
    return found


def transformer_weights(rng: np.random.Generator) -> Arrays:
    def normal(*shape: int) -> Any:
        return (rng.normal(size=shape) * 0.05).astype("f")

    def layer_norm(name: str) -> Arrays:
        return {f"{name}.scale": np.ones(DIM, "f"), f"{name}.shift": np.zeros(DIM, "f")}

    weights = {"tokens.w": normal(VOCABULARY, DIM), "positions.w": normal(NUM_TOKENS, DIM)}
    for number in range(NUM_LAYERS):
        prefix = f"layers.{number}."
        weights |= layer_norm(prefix + "norm1") | layer_norm(prefix + "norm2")
        weights |= {prefix + "qkv.w": normal(DIM, 3 * DIM), prefix + "out.w": normal(DIM, DIM)}
        weights |= {prefix + "up.w": normal(DIM, 4 * DIM), prefix + "down.w": normal(4 * DIM, DIM)}
        weights |= {prefix + "up.b": np.zeros(4 * DIM, "f"), prefix + "down.b": np.zeros(DIM, "f")}
    return weights | layer_norm("norm") | {"head.w": normal(DIM, VOCABULARY)}


def gpt_weights(rng: np.random.Generator) -> Arrays:
    """As `multitower.recipes.networks.transformer.init` draws them."""

    def normal(shape: tuple[int, ...], inputs: int, share: float = 1.0) -> Any:
        return (rng.normal(size=shape) * share / math.sqrt(inputs)).astype("f")

    width, head = GPT_WIDTH, (GPT_HEADS, GPT_WIDTH // GPT_HEADS)
    share = 1 / math.sqrt(2 * GPT_BLOCKS)
    embedding = 0.02 * rng.normal(size=(GPT_VOCABULARY, width))
    weights: Arrays = {"embedding": embedding.astype("f")}
    for number in range(GPT_BLOCKS):
        block = {
            "attention_norm": np.ones(width, "f"),
            "query": normal((width, *head), width),
            "key": normal((width, *head), width),
            "value": normal((width, *head), width),
            "out": normal((*head, width), width, share),
            "mlp_norm": np.ones(width, "f"),
            "gate": normal((width, GPT_HIDDEN), width),
            "up": normal((width, GPT_HIDDEN), width),
            "down": normal((GPT_HIDDEN, width), GPT_HIDDEN, share),
        }
        weights |= {f"blocks.{number}.{name}": array for name, array in block.items()}
    return weights | {"norm": np.ones(width, "f")}


def image_batch(*shape: int) -> Callable[[np.random.Generator], Arrays]:
    rows = 64 * NUM_DEVICES

    def make(rng: np.random.Generator) -> Arrays:
        x = rng.normal(size=(rows, *shape)).astype("f")
        return {"x": x, "y": rng.integers(0, 10, rows).astype("i")}

    return make


def token_batch(
    vocabulary: int, tokens_per_row: int, rows_per_device: int
) -> Callable[[np.random.Generator], Arrays]:
    shape = (rows_per_device * NUM_DEVICES, tokens_per_row + 1)

    def make(rng: np.random.Generator) -> Arrays:
        tokens = rng.integers(0, vocabulary, shape).astype("i")
        return {"x": tokens[:, :-1].copy(), "y": tokens[:, 1:].copy()}

    return make


WORKS = {
    work.name: work
    for work in (
        Work("Polynomial", 0.1, 200, False, polynomial_weights, polynomial_batch),
        Work("MLP-1024", 1e-3, 10, False, mlp_weights, image_batch(784)),
        Work("LeNet-5", 1e-3, 10, False, lenet5_weights, image_batch(28, 28, 1)),
        Work("ResNet-20", 1e-3, 2, True, resnet20_weights, image_batch(28, 28, 3)),
        Work(
            "Transformer",
            1e-3,
            10,
            False,
            transformer_weights,
            token_batch(VOCABULARY, NUM_TOKENS, 8),
        ),
        Work(
            "GPT",
            1e-3,
            4,
            False,
            gpt_weights,
            token_batch(GPT_VOCABULARY, GPT_LENGTH, 4),
            4 * NUM_DEVICES * GPT_LENGTH,
        ),
    )
}

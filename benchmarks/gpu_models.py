"""Models that fill a GPU, in plain JAX: ResNet-50 in bfloat16 and a 124M-parameter transformer.

Weights are float32 and computing is done in bfloat16, as is usual. Each model is a `Model`: the
same functions serve every contender of `gpu_steps.py`. `small=True` makes one of the same structure
that a CPU runs in a moment.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True)
class Model:
    """A model and its data.

    Attributes:
        name: for the table.
        params: float32 weights.
        state: running statistics, or None.
        loss: (params, state, batch) -> (losses per row, new state).
        batch: for each device so many rows: `batch(rows)`.
        rows: of one device.
        unit: what a row is made of, and how many of them, such as ("tokens", 1024).
        unrolled: `loss` without loops, where it has some: XLA counts the operations of a loop once.
    """

    name: str
    params: Any
    state: Any
    loss: Callable[[Any, Any, Any], tuple[jax.Array, Any]]
    batch: Callable[[int], Any]
    rows: int
    unit: tuple[str, int]
    unrolled: Callable[[Any, Any, Any], tuple[jax.Array, Any]] | None = None


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """In float32, one number per label."""
    logits = logits.astype(jnp.float32)
    wanted = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
    return jax.nn.logsumexp(logits, -1) - wanted


# ---------------------------------------------------------------- ResNet-50


def resnet50(*, small: bool) -> Model:
    """He et al. 2016, table 1, with strides in the 3x3 convolutions; 224x224 images."""
    depths, width, size, classes = ((1, 1), 8, 32, 10) if small else ((3, 4, 6, 3), 64, 224, 1000)
    draw = np.random.default_rng(0)

    def conv(kernel: int, fan_in: int, fan_out: int) -> Any:
        scale = (2 / (kernel * kernel * fan_in)) ** 0.5
        weights = draw.normal(size=(kernel, kernel, fan_in, fan_out)) * scale
        return {
            "w": weights.astype("f"),
            "scale": np.ones(fan_out, "f"),
            "shift": np.zeros(fan_out, "f"),
        }

    stages, channels = [], width
    for number, depth in enumerate(depths):
        inner = width * 2**number
        blocks = []
        for index in range(depth):
            block = {
                "a": conv(1, channels, inner),
                "b": conv(3, inner, inner),
                "c": conv(1, inner, 4 * inner),
            }
            if index == 0:
                block["skip"] = conv(1, channels, 4 * inner)
            blocks.append(block)
            channels = 4 * inner
        stages.append(blocks)
    dense = (draw.normal(size=(channels, classes)) / channels**0.5).astype("f")
    params = {"stem": conv(7, 3, width), "stages": stages, "dense": dense}
    state = jax.tree.map(
        lambda part: {
            "mean": np.zeros_like(part["shift"]),
            "variance": np.ones_like(part["shift"]),
        },
        {"stem": params["stem"], "stages": stages},
        is_leaf=lambda x: isinstance(x, dict) and "w" in x,
    )

    def batch(rows: int) -> Any:
        images = np.random.default_rng(1).normal(size=(rows, size, size, 3)).astype(jnp.bfloat16)
        return {"x": images, "y": np.arange(rows, dtype=np.int32) % classes}

    name = "ResNet-50, bfloat16"
    rows = 2 if small else 128
    return Model(name, params, state, _resnet_loss, batch, rows, ("images", 1))


def _resnet_loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
    new = jax.tree.map(lambda leaf: leaf, state)  # fresh containers, filled in below

    def layer(x: Any, key: str, trees: Any, stride: int = 1) -> jax.Array:
        part, old, into = trees[0][key], trees[1][key], trees[2]
        x = jax.lax.conv_general_dilated(
            x,
            part["w"].astype(x.dtype),
            (stride, stride),
            "SAME",
            dimension_numbers=("NHWC", "HWIO", "NHWC"),
        )
        wide = x.astype(jnp.float32)
        mean, square = wide.mean((0, 1, 2)), jnp.square(wide).mean((0, 1, 2))
        variance = square - jnp.square(mean)
        into[key] = {
            "mean": 0.9 * old["mean"] + 0.1 * mean,
            "variance": 0.9 * old["variance"] + 0.1 * variance,
        }
        factor = part["scale"] * jax.lax.rsqrt(variance + 1e-5)
        return (wide * factor + (part["shift"] - mean * factor)).astype(x.dtype)

    x = layer(batch["x"], "stem", (params, state, new), 2)
    x = jax.lax.reduce_window(
        jax.nn.relu(x), -jnp.inf, jax.lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
    )
    for number, blocks in enumerate(params["stages"]):
        for index, block in enumerate(blocks):
            trees = block, state["stages"][number][index], new["stages"][number][index]
            stride = 2 if number and not index else 1
            y = jax.nn.relu(layer(x, "a", trees))
            y = jax.nn.relu(layer(y, "b", trees, stride))
            y = layer(y, "c", trees)
            if "skip" in block:
                x = layer(x, "skip", trees, stride)
            x = jax.nn.relu(x + y)
    x = x.astype(jnp.float32).mean((1, 2))
    return cross_entropy(x @ params["dense"], batch["y"]), new


# ---------------------------------------------------------------- transformer


def transformer(*, small: bool, attention: str | None = None, unroll: bool = False) -> Model:
    """GPT-2 small (Radford et al. 2019): 12 layers, 768 wide, 12 heads, 1024 tokens.

    Its attention is JAX's own, or `"cudnn"`. Its layers are scanned over, or stand one after the
    other.
    """
    layers, wide, heads, tokens, words = (2, 32, 2, 16, 64) if small else (12, 768, 12, 1024, 50304)
    draw = np.random.default_rng(0)

    def normal(*shape: int, scale: float = 0.02) -> Any:
        return (draw.standard_normal(shape, np.float32) * np.float32(scale)).astype("f")

    # All layers in one array each: to scan over them compiles one layer.
    deep = 0.02 / (2 * layers) ** 0.5
    params = {
        "words": normal(words, wide),
        "places": normal(tokens, wide),
        "layers": {
            "norm1": np.ones((layers, wide), "f"),
            "qkv": normal(layers, wide, 3 * wide),
            "out": normal(layers, wide, wide, scale=deep),
            "norm2": np.ones((layers, wide), "f"),
            "up": normal(layers, wide, 4 * wide),
            "down": normal(layers, 4 * wide, wide, scale=deep),
        },
        "norm": np.ones(wide, "f"),
    }

    def loss(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return _transformer_losses(params, batch, heads, attention, unroll=unroll), state

    def to_count(params: Any, state: Any, batch: Any) -> tuple[jax.Array, Any]:
        return _transformer_losses(params, batch, heads, None, unroll=True), state  # on a CPU

    def batch(rows: int) -> Any:
        text = np.random.default_rng(1).integers(0, words, (rows, tokens + 1), np.int32)
        return {"x": text[:, :-1], "y": text[:, 1:]}

    rows = 2 if small else 16
    unit = ("tokens", tokens)
    return Model("transformer, 124M", params, None, loss, batch, rows, unit, to_count)


def _transformer_losses(
    params: Any, batch: Any, heads: int, attention: Any, *, unroll: bool
) -> jax.Array:
    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        centred = wide - wide.mean(-1, keepdims=True)
        root = jax.lax.rsqrt(jnp.square(centred).mean(-1, keepdims=True) + 1e-5)
        return (centred * root * scale).astype(x.dtype)

    def layer(x: jax.Array, part: Any) -> tuple[jax.Array, None]:
        rows, tokens, wide = x.shape
        half = {name: leaf.astype(x.dtype) for name, leaf in part.items()}
        qkv = norm(x, part["norm1"]) @ half["qkv"]
        q, k, v = (
            leaf.reshape(rows, tokens, heads, wide // heads) for leaf in jnp.split(qkv, 3, -1)
        )
        mixed = jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=attention)
        x = x + mixed.reshape(x.shape) @ half["out"]
        hidden = jax.nn.gelu(norm(x, part["norm2"]) @ half["up"])
        return x + hidden @ half["down"], None

    x = (params["words"][batch["x"]] + params["places"]).astype(jnp.bfloat16)
    x, _ = jax.lax.scan(layer, x, params["layers"], unroll=unroll)
    logits = norm(x, params["norm"]) @ params["words"].astype(jnp.bfloat16).T
    return cross_entropy(logits, batch["y"]).mean(-1)

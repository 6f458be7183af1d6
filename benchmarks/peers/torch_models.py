"""The models of the work in PyTorch, with first weights in PyTorch's layout.

Images are NCHW and filters OIHW, which is what PyTorch's users have; the batches are turned around
once, before anything is timed.
"""

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from works import (
    BATCH_NORM_EPSILON,
    BATCH_NORM_KEEPS,
    DIM,
    GPT_BLOCKS,
    GPT_HEADS,
    GPT_LENGTH,
    GPT_LONGEST_WAVE,
    GPT_WIDTH,
    LAYER_NORM_EPSILON,
    NUM_HEADS,
    NUM_LAYERS,
    RESNET_BLOCKS,
    RESNET_STAGES,
    RMS_NORM_EPSILON,
    Arrays,
)


def given(array: Any) -> nn.Parameter:
    return nn.Parameter(torch.from_numpy(np.ascontiguousarray(array)))


def linear(weights: Arrays, name: str) -> nn.Linear:
    w = weights[f"{name}.w"]
    layer = nn.Linear(*w.shape, bias=f"{name}.b" in weights)
    layer.weight = given(w.T)
    if layer.bias is not None:
        layer.bias = given(weights[f"{name}.b"])
    return layer


def conv(weights: Arrays, name: str, **options: Any) -> nn.Conv2d:
    w = weights[f"{name}.w"].transpose(3, 2, 0, 1)
    channels_out, channels_in, height, width = w.shape
    has_bias = f"{name}.b" in weights
    layer = nn.Conv2d(channels_in, channels_out, (height, width), bias=has_bias, **options)
    layer.weight = given(w)
    if has_bias:
        layer.bias = given(weights[f"{name}.b"])
    return layer


class Polynomial(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        self.w = given(weights["w"])

    def forward(self, x: Any) -> Any:
        return self.w[0] * x**2 + self.w[1] * x + self.w[2]


# Classes of their own, where nn.Sequential would do: torch.compile passes over DDP around modules
# that are PyTorch's own, and would compile nothing.


class MLP(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        self.dense1, self.dense2, self.dense3 = (linear(weights, f"dense{n}") for n in (1, 2, 3))

    def forward(self, x: Any) -> Any:
        x = functional.relu(self.dense1(x))
        return self.dense3(functional.relu(self.dense2(x)))


class LeNet5(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        # Rows of dense1 follow the flattened image: (5, 5, 16) there, (16, 5, 5) here.
        w = weights["dense1.w"].reshape(5, 5, 16, 120).transpose(2, 0, 1, 3).reshape(400, 120)
        weights = {**weights, "dense1.w": w}
        self.conv1, self.conv2 = conv(weights, "conv1", padding="same"), conv(weights, "conv2")
        self.dense1, self.dense2, self.dense3 = (linear(weights, f"dense{n}") for n in (1, 2, 3))

    def forward(self, x: Any) -> Any:
        x = functional.relu(functional.max_pool2d(self.conv1(x), 2))
        x = functional.relu(functional.max_pool2d(self.conv2(x), 2)).flatten(1)
        x = functional.relu(self.dense1(x))
        return self.dense3(functional.relu(self.dense2(x)))


class ConvNorm(nn.Module):
    """A convolution and its batch normalisation."""

    def __init__(self, weights: Arrays, name: str, stride: int = 1) -> None:
        super().__init__()
        # "SAME" with stride 2 looks at one more pixel to the right and below, not on all sides.
        self.pad = nn.ZeroPad2d((0, 1, 0, 1)) if stride == 2 else nn.Identity()
        self.conv = conv(weights, name, stride=stride, padding=0 if stride == 2 else 1)
        channels = self.conv.out_channels
        self.norm = nn.BatchNorm2d(channels, BATCH_NORM_EPSILON, 1 - BATCH_NORM_KEEPS)
        self.norm.weight = given(weights[f"{name}.scale"])
        self.norm.bias = given(weights[f"{name}.shift"])

    def forward(self, x: Any) -> Any:
        return self.norm(self.conv(self.pad(x)))


class Block(nn.Module):
    def __init__(self, weights: Arrays, name: str, stride: int) -> None:
        super().__init__()
        self.conv1 = ConvNorm(weights, f"{name}.conv1", stride)
        self.conv2 = ConvNorm(weights, f"{name}.conv2")
        self.stride = stride

    def forward(self, x: Any) -> Any:
        y = self.conv2(functional.relu(self.conv1(x)))
        border = (y.shape[1] - x.shape[1]) // 2
        shortcut = x[:, :, :: self.stride, :: self.stride]
        if border:
            shortcut = functional.pad(shortcut, (0, 0, 0, 0, border, border))
        return functional.relu(shortcut + y)


class ResNet20(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        self.stem = ConvNorm(weights, "stem")
        self.blocks = nn.Sequential(
            *(
                Block(weights, f"stages.{number}.{block}", stride if block == 0 else 1)
                for number, (_, stride) in enumerate(RESNET_STAGES)
                for block in range(RESNET_BLOCKS)
            )
        )
        self.dense = linear(weights, "dense")

    def forward(self, x: Any) -> Any:
        return self.dense(self.blocks(functional.relu(self.stem(x))).mean(dim=(2, 3)))


def layer_norm(weights: Arrays, name: str) -> nn.LayerNorm:
    layer = nn.LayerNorm(DIM, LAYER_NORM_EPSILON)
    layer.weight, layer.bias = given(weights[f"{name}.scale"]), given(weights[f"{name}.shift"])
    return layer


class TransformerLayer(nn.Module):
    def __init__(self, weights: Arrays, name: str) -> None:
        super().__init__()
        self.norm1, self.norm2 = (layer_norm(weights, f"{name}.{n}") for n in ("norm1", "norm2"))
        self.qkv, self.out, self.up, self.down = (
            linear(weights, f"{name}.{n}") for n in ("qkv", "out", "up", "down")
        )

    def forward(self, x: Any) -> Any:
        rows, tokens, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(rows, tokens, 3, NUM_HEADS, dim // NUM_HEADS)
        q, k, v = heads.permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        self.tokens, self.positions = given(weights["tokens.w"]), given(weights["positions.w"])
        layers = (TransformerLayer(weights, f"layers.{number}") for number in range(NUM_LAYERS))
        self.layers = nn.Sequential(*layers)
        self.norm, self.head = layer_norm(weights, "norm"), linear(weights, "head")

    def forward(self, x: Any) -> Any:
        x = functional.embedding(x, self.tokens) + self.positions
        return self.head(self.norm(self.layers(x))).flatten(0, 1)


class GPTBlock(nn.Module):
    def __init__(self, weights: Arrays, name: str) -> None:
        super().__init__()
        start = f"{name}."
        own = {key.removeprefix(start): w for key, w in weights.items() if key.startswith(start)}
        self.attention_norm, self.mlp_norm = (given(own[n]) for n in ("attention_norm", "mlp_norm"))
        flat = {f"{n}.w": own[n].reshape(GPT_WIDTH, -1) for n in ("query", "key", "value")}
        flat |= {f"{n}.w": own[n] for n in ("gate", "up", "down")}
        flat["out.w"] = own["out"].reshape(-1, GPT_WIDTH)
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = (
            linear(flat, n) for n in ("query", "key", "value", "out", "gate", "up", "down")
        )

    def forward(self, x: Any, cosine: Any, sine: Any) -> Any:
        rows, tokens, width = x.shape
        y = rms_norm(x, self.attention_norm)
        q, k, v = (
            layer(y).view(rows, tokens, GPT_HEADS, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        q, k = turned(q, cosine, sine), turned(k, cosine, sine)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, tokens, width))
        y = rms_norm(x, self.mlp_norm)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


class GPT(nn.Module):
    def __init__(self, weights: Arrays) -> None:
        super().__init__()
        self.embedding, self.norm = given(weights["embedding"]), given(weights["norm"])
        blocks = (GPTBlock(weights, f"blocks.{number}") for number in range(GPT_BLOCKS))
        self.blocks = nn.ModuleList(blocks)
        half = GPT_WIDTH // GPT_HEADS // 2
        frequencies = GPT_LONGEST_WAVE ** (-torch.arange(half, dtype=torch.float32) / half)
        angles = torch.arange(GPT_LENGTH)[:, None] * frequencies
        # No buffers: DDP would send those from rank 0 in every step.
        self.cosine, self.sine = torch.cos(angles), torch.sin(angles)

    def forward(self, x: Any) -> Any:
        x = functional.embedding(x, self.embedding)
        for block in self.blocks:
            x = block(x, self.cosine, self.sine)
        return (rms_norm(x, self.norm) @ self.embedding.T).flatten(0, 1)


def turned(x: Any, cosine: Any, sine: Any) -> Any:
    """Rotary positions: pairs of numbers, one from each half."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def rms_norm(x: Any, scale: Any) -> Any:
    return functional.rms_norm(x, (GPT_WIDTH,), scale, RMS_NORM_EPSILON)


MODELS = {
    "Polynomial": Polynomial,
    "MLP-1024": MLP,
    "LeNet-5": LeNet5,
    "ResNet-20": ResNet20,
    "Transformer": Transformer,
    "GPT": GPT,
}


def rows_of(batch: Arrays, rank: int, num_ranks: int) -> tuple[Any, Any]:
    """One rank's rows, images as NCHW; labels flat, as the loss takes them."""
    rows = len(batch["y"]) // num_ranks
    x, y = (array[rank * rows : (rank + 1) * rows] for array in (batch["x"], batch["y"]))
    if x.ndim == 4:
        x = x.transpose(0, 3, 1, 2)
    x, y = (torch.from_numpy(np.ascontiguousarray(array)) for array in (x, y))
    return x, y if y.is_floating_point() else y.long().flatten()

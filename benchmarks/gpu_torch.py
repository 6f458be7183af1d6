"""The models of `gpu_steps.py` in PyTorch, compiled, on one device; prints one line of JSON.

python benchmarks/gpu_torch.py lenet|resnet50|transformer [--small] [--rounds 7] [--steps 10]
"""

from typing import Any

import torch
from gpu_child import options_of, report
from torch import nn
from torch.nn import functional

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def lenet(small: bool) -> tuple[nn.Module, Any, Any]:
    """LeNet-5, float32."""
    rows = 8 if small else 1024
    model = nn.Sequential(
        nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10),
    )  # fmt: skip
    return model, torch.randn(rows, 1, 28, 28), torch.arange(rows) % 10


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut."""

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()

        def conv(fan_in: int, fan_out: int, kernel: int, stride: int = 1) -> nn.Module:
            padding = kernel // 2
            return nn.Sequential(
                nn.Conv2d(fan_in, fan_out, kernel, stride, padding, bias=False),
                nn.BatchNorm2d(fan_out),
            )

        self.main = nn.Sequential(
            conv(channels, inner, 1), nn.ReLU(), conv(inner, inner, 3, stride), nn.ReLU(),
            conv(inner, 4 * inner, 1),
        )  # fmt: skip
        changes = stride > 1 or channels != 4 * inner
        self.skip = conv(channels, 4 * inner, 1, stride) if changes else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.relu(self.main(x) + self.skip(x))


def resnet50(small: bool) -> tuple[nn.Module, Any, Any]:
    """ResNet-50; channels last, bfloat16 by autocast."""
    depths, width, size, classes = ((1, 1), 8, 32, 10) if small else ((3, 4, 6, 3), 64, 224, 1000)
    rows = 2 if small else 128
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, 1),
    ]  # fmt: skip
    channels = width
    for number, depth in enumerate(depths):
        for index in range(depth):
            stride = 2 if number and not index else 1
            layers.append(Bottleneck(channels, width * 2**number, stride))
            channels = 4 * width * 2**number
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, classes)]
    model = nn.Sequential(*layers).to(memory_format=torch.channels_last)
    images = torch.randn(rows, 3, size, size).to(memory_format=torch.channels_last)
    return model, images, torch.arange(rows) % classes


class Layer(nn.Module):
    """Causal attention and a perceptron, each behind a norm."""

    def __init__(self, wide: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(wide, bias=False), nn.LayerNorm(wide, bias=False)
        self.qkv, self.out = (nn.Linear(wide, n * wide, bias=False) for n in (3, 1))
        self.up = nn.Linear(wide, 4 * wide, bias=False)
        self.down = nn.Linear(4 * wide, wide, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, tokens, wide = x.shape
        qkv = self.qkv(self.norm1(x)).view(rows, tokens, 3, self.heads, wide // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(rows, tokens, wide))
        return x + self.down(functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Transformer(nn.Module):
    """GPT-2 small, or a smaller one."""

    def __init__(self, layers: int, wide: int, heads: int, tokens: int, words: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(words, wide), nn.Embedding(tokens, wide)
        self.layers = nn.Sequential(*(Layer(wide, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(wide, bias=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        x = self.words(text) + self.places.weight
        scores = functional.linear(self.norm(self.layers(x)), self.words.weight)
        return scores.flatten(0, 1)


def transformer(small: bool) -> tuple[nn.Module, Any, Any]:
    """124M parameters, bfloat16 by autocast."""
    sizes = (2, 32, 2, 16, 64) if small else (12, 768, 12, 1024, 50304)
    rows = 2 if small else 16
    text = torch.randint(0, sizes[-1], (rows, sizes[3] + 1))
    return Transformer(*sizes), text[:, :-1].contiguous(), text[:, 1:].flatten().contiguous()


def main() -> None:
    """Measures one model."""
    options = options_of(__doc__)
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")
    makers = {"lenet": lenet, "resnet50": resnet50, "transformer": transformer}
    model, inputs, labels = makers[options.model](options.small)
    model, inputs, labels = model.to(DEVICE), inputs.to(DEVICE), labels.to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4, fused=DEVICE == "cuda")
    half = options.model != "lenet"

    def loss_of(inputs: Any, labels: Any) -> torch.Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=half):
            scores = model(inputs)
        return functional.cross_entropy(scores.float(), labels)

    # In the small mode the program is tested, not PyTorch's compiler.
    loss_of = loss_of if options.small else torch.compile(loss_of)

    def run(num_steps: int) -> None:
        for _ in range(num_steps):
            optimizer.zero_grad(set_to_none=True)
            loss_of(inputs, labels).backward()
            optimizer.step()
        if DEVICE == "cuda":
            torch.cuda.synchronize()

    report(run, options)


if __name__ == "__main__":
    main()

"""The models of the work in Keras, built from its layers, with first weights set."""

from typing import Any

import keras
from keras import layers, ops
from works import (
    BATCH_NORM_EPSILON,
    BATCH_NORM_KEEPS,
    DIM,
    GPT_BLOCKS,
    GPT_HEADS,
    GPT_HIDDEN,
    GPT_LENGTH,
    GPT_LONGEST_WAVE,
    GPT_VOCABULARY,
    GPT_WIDTH,
    LAYER_NORM_EPSILON,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_TOKENS,
    RMS_NORM_EPSILON,
    VOCABULARY,
    Arrays,
    resnet20_convolutions,
)


class Polynomial(layers.Layer):
    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=(3,), name="w")

    def call(self, x: Any) -> Any:
        return self.w[0] * x**2 + self.w[1] * x + self.w[2]


class Positions(layers.Layer):
    """Adds what is learnt about each position."""

    def build(self, shape: Any) -> None:
        self.w = self.add_weight(shape=shape[1:], name="w")

    def call(self, x: Any) -> Any:
        return x + self.w


class Widen(layers.Layer):
    """The shortcut where a stage changes: thinned out, with empty channels on both sides."""

    def __init__(self, stride: int, border: int) -> None:
        super().__init__()
        self.stride, self.border = stride, border

    def call(self, x: Any) -> Any:
        borders = ((0, 0), (0, 0), (0, 0), (self.border, self.border))
        return ops.pad(x[:, :: self.stride, :: self.stride], borders)


class Attention(layers.Layer):
    """What lies between the two dense layers: heads, causal softmax, values."""

    def call(self, qkv: Any) -> Any:
        heads = ops.reshape(qkv, (-1, NUM_TOKENS, 3, NUM_HEADS, DIM // NUM_HEADS))
        q, k, v = (heads[:, :, number] for number in range(3))
        return ops.reshape(
            ops.dot_product_attention(q, k, v, is_causal=True), (-1, NUM_TOKENS, DIM)
        )


class RotaryAttention(layers.Layer):
    """Heads, rotary positions, causal softmax, values."""

    def call(self, given: Any) -> Any:
        shape = (-1, GPT_LENGTH, GPT_HEADS, GPT_WIDTH // GPT_HEADS)
        q, k, v = (ops.reshape(x, shape) for x in given)
        y = ops.dot_product_attention(self.turned(q), self.turned(k), v, is_causal=True)
        return ops.reshape(y, (-1, GPT_LENGTH, GPT_WIDTH))

    def turned(self, x: Any) -> Any:
        half = x.shape[-1] // 2
        frequencies = GPT_LONGEST_WAVE ** (-ops.arange(half, dtype="float32") / half)
        angles = ops.arange(GPT_LENGTH, dtype="float32")[:, None, None] * frequencies
        cosine, sine = ops.cos(angles), ops.sin(angles)
        first, second = x[..., :half], x[..., half:]
        pair = (first * cosine - second * sine, second * cosine + first * sine)
        return ops.concatenate(pair, axis=-1)


class Scores(layers.Layer):
    """The embedding once more."""

    def __init__(self, embedding: Any) -> None:
        super().__init__()
        self.embedding = embedding

    def call(self, x: Any) -> Any:
        return ops.matmul(x, ops.transpose(self.embedding.embeddings))


def polynomial(weights: Arrays) -> Any:
    x = keras.Input(())
    model = keras.Model(x, Polynomial()(x))
    model.set_weights([weights["w"]])
    return model


def dense(name: str, units: int, **options: Any) -> Any:
    return layers.Dense(units, name=name, **options)


def mlp(weights: Arrays) -> Any:
    hidden = [dense(f"dense{number}", 1024, activation="relu") for number in (1, 2)]
    return given(keras.Sequential([keras.Input((784,)), *hidden, dense("dense3", 10)]), weights)


def lenet5(weights: Arrays) -> Any:
    return given(
        keras.Sequential(
            [
                keras.Input((28, 28, 1)),
                layers.Conv2D(6, 5, padding="same", activation="relu", name="conv1"),
                layers.MaxPooling2D(),
                layers.Conv2D(16, 5, activation="relu", name="conv2"),
                layers.MaxPooling2D(),
                layers.Flatten(),
                dense("dense1", 120, activation="relu"),
                dense("dense2", 84, activation="relu"),
                dense("dense3", 10),
            ]
        ),
        weights,
    )


def conv_norm(name: str, channels: int, stride: int, x: Any) -> Any:
    options = {"padding": "same", "use_bias": False}
    x = layers.Conv2D(channels, 3, stride, name=name, **options)(x)
    norm = layers.BatchNormalization(
        momentum=BATCH_NORM_KEEPS, epsilon=BATCH_NORM_EPSILON, name=f"{name}.norm"
    )
    return norm(x)


def resnet20(weights: Arrays) -> Any:
    (stem, _, width, _), *convolutions = resnet20_convolutions()
    image = keras.Input((28, 28, 3))
    x = ops.relu(conv_norm(stem, width, 1, image))
    for (first, _, channels, stride), (second, *_) in zip(
        convolutions[::2], convolutions[1::2], strict=True
    ):
        y = ops.relu(conv_norm(first, channels, stride, x))
        y = conv_norm(second, channels, 1, y)
        border = (channels - x.shape[-1]) // 2
        x = ops.relu((Widen(stride, border)(x) if border else x) + y)
    x = layers.GlobalAveragePooling2D()(x)
    return given(keras.Model(image, dense("dense", 10)(x)), weights)


def transformer(weights: Arrays) -> Any:
    def norm(name: str) -> Any:
        return layers.LayerNormalization(epsilon=LAYER_NORM_EPSILON, name=name)

    tokens = keras.Input((NUM_TOKENS,), dtype="int32")
    x = layers.Embedding(VOCABULARY, DIM, name="tokens")(tokens)
    x = Positions(name="positions")(x)
    for number in range(NUM_LAYERS):
        name = f"layers.{number}"
        y = dense(f"{name}.qkv", 3 * DIM, use_bias=False)(norm(f"{name}.norm1")(x))
        x = x + dense(f"{name}.out", DIM, use_bias=False)(Attention()(y))
        y = dense(f"{name}.up", 4 * DIM)(norm(f"{name}.norm2")(x))
        x = x + dense(f"{name}.down", DIM)(ops.gelu(y, approximate=True))
    x = dense("head", VOCABULARY, use_bias=False)(norm("norm")(x))
    return given(keras.Model(tokens, x), weights)


def gpt(weights: Arrays) -> Any:
    def norm(name: str) -> Any:
        return layers.RMSNormalization(epsilon=RMS_NORM_EPSILON, name=name)

    def plain(name: str, units: int) -> Any:
        return dense(name, units, use_bias=False)

    tokens = keras.Input((GPT_LENGTH,), dtype="int32")
    embedding = layers.Embedding(GPT_VOCABULARY, GPT_WIDTH, name="embedding")
    x = embedding(tokens)
    for number in range(GPT_BLOCKS):
        name = f"blocks.{number}"
        y = norm(f"{name}.attention_norm")(x)
        heads = [plain(f"{name}.{part}", GPT_WIDTH)(y) for part in ("query", "key", "value")]
        x = x + plain(f"{name}.out", GPT_WIDTH)(RotaryAttention()(heads))
        y = norm(f"{name}.mlp_norm")(x)
        gate, up = (plain(f"{name}.{part}", GPT_HIDDEN)(y) for part in ("gate", "up"))
        x = x + plain(f"{name}.down", GPT_WIDTH)(ops.silu(gate) * up)
    model = keras.Model(tokens, Scores(embedding)(norm("norm")(x)))
    for layer in model.layers:
        if layer.name in weights:
            (own,) = layer.get_weights()
            layer.set_weights([weights[layer.name].reshape(own.shape)])
    return model


def given(model: Any, weights: Arrays) -> Any:
    """Sets first weights: layers are named like them, and hold them in this order."""
    for layer in model.layers:
        name = layer.name.removesuffix(".norm")
        parts = ("scale", "shift") if "norm" in layer.name else ("w", "b")
        wanted = [weights[f"{name}.{part}"] for part in parts if f"{name}.{part}" in weights]
        if wanted:
            layer.set_weights(wanted + layer.get_weights()[len(wanted) :])
    return model


MODELS = {
    "Polynomial": polynomial,
    "MLP-1024": mlp,
    "LeNet-5": lenet5,
    "ResNet-20": resnet20,
    "Transformer": transformer,
    "GPT": gpt,
}

"""The models of `gpu_steps.py` in Keras on JAX, on one device; prints one line of JSON.

A step is one of `model.fit`, which is how Keras is used, with a batch that lies on the device.

    python benchmarks/gpu_keras.py lenet|resnet50|transformer [--small] [--rounds 7] [--steps 10]
"""

import os
from collections.abc import Iterator
from typing import Any

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from gpu_child import options_of, report
from keras import layers, ops

import multitower as mt

FLOAT32 = keras.DTypePolicy("float32")


def lenet(small: bool) -> tuple[Any, Any, Any]:
    """LeNet-5, float32."""
    rows = 8 if small else 1024
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(6, 5, padding="same", activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(16, 5, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(120, activation="relu"),
            layers.Dense(84, activation="relu"),
            layers.Dense(10),
        ]
    )
    images = np.random.default_rng(1).normal(size=(rows, 28, 28, 1)).astype("f")
    return model, images, np.arange(rows) % 10


def resnet50(small: bool) -> tuple[Any, Any, Any]:
    """ResNet-50 in mixed bfloat16."""
    depths, width, size, classes = ((1, 1), 8, 32, 10) if small else ((3, 4, 6, 3), 64, 224, 1000)
    rows = 2 if small else 128

    def conv(x: Any, channels: int, kernel: int, stride: int = 1) -> Any:
        x = layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False)(x)
        return layers.BatchNormalization(momentum=0.9, epsilon=1e-5)(x)

    image = keras.Input((size, size, 3))
    x = layers.MaxPooling2D(3, 2, padding="same")(ops.relu(conv(image, width, 7, 2)))
    for number, depth in enumerate(depths):
        inner = width * 2**number
        for index in range(depth):
            stride = 2 if number and not index else 1
            y = ops.relu(conv(x, inner, 1))
            y = ops.relu(conv(y, inner, 3, stride))
            y = conv(y, 4 * inner, 1)
            x = ops.relu(y + (x if index else conv(x, 4 * inner, 1, stride)))
    x = layers.GlobalAveragePooling2D(dtype=FLOAT32)(x)
    scores = layers.Dense(classes, use_bias=False, dtype=FLOAT32)(x)
    images = np.random.default_rng(1).normal(size=(rows, size, size, 3)).astype("f")
    return keras.Model(image, scores), images, np.arange(rows) % classes


class Attention(layers.Layer):
    """What lies between the two dense layers: heads, causal softmax, values."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads = heads

    def call(self, qkv: Any) -> Any:
        tokens, wide = qkv.shape[1], qkv.shape[2] // 3
        heads = ops.reshape(qkv, (-1, tokens, 3, self.heads, wide // self.heads))
        q, k, v = (heads[:, :, number] for number in range(3))
        mixed = ops.dot_product_attention(q, k, v, is_causal=True)
        return ops.reshape(mixed, (-1, tokens, wide))


class Words(layers.Layer):
    """Adds what is learnt about each position to what is learnt about each word."""

    def __init__(self, words: int, wide: int) -> None:
        super().__init__()
        self.embedding = layers.Embedding(words, wide)

    def build(self, shape: Any) -> None:
        self.embedding.build(shape)
        self.places = self.add_weight(shape=(shape[1], self.embedding.output_dim), name="places")

    def call(self, text: Any) -> Any:
        return self.embedding(text) + self.places


class Scores(layers.Layer):
    """The embedding once more."""

    def __init__(self, words: Words) -> None:
        super().__init__()
        self.words = words

    def call(self, x: Any) -> Any:
        return ops.cast(ops.matmul(x, ops.transpose(self.words.embedding.embeddings)), "float32")


def transformer(small: bool) -> tuple[Any, Any, Any]:
    """GPT-2 small in mixed bfloat16."""
    deep, wide, heads, tokens, words = (2, 32, 2, 16, 64) if small else (12, 768, 12, 1024, 50304)
    rows = 2 if small else 16

    def plain(units: int) -> Any:
        return layers.Dense(units, use_bias=False)

    def norm(x: Any) -> Any:
        return layers.LayerNormalization(epsilon=1e-5, center=False)(x)

    text = keras.Input((tokens,), dtype="int32")
    first = Words(words, wide)
    x = first(text)
    for _ in range(deep):
        x = x + plain(wide)(Attention(heads)(plain(3 * wide)(norm(x))))
        x = x + plain(wide)(ops.gelu(plain(4 * wide)(norm(x)), approximate=True))
    drawn = np.random.default_rng(1).integers(0, words, (rows, tokens + 1), np.int32)
    return keras.Model(text, Scores(first)(norm(x))), drawn[:, :-1], drawn[:, 1:]


def main() -> None:
    """Measures one model."""
    options = options_of(__doc__)
    mt.configure(preallocate=False)  # others use the same GPU
    if options.model != "lenet":
        keras.config.set_dtype_policy("mixed_bfloat16")
    makers = {"lenet": lenet, "resnet50": resnet50, "transformer": transformer}
    model, *arrays = makers[options.model](options.small)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(1e-4), loss)
    batch = tuple(jax.device_put(arrays))

    def batches() -> Iterator[Any]:
        while True:
            yield batch

    def run(num_steps: int) -> None:
        model.fit(batches(), steps_per_epoch=num_steps, shuffle=False, verbose=0)

    report(run, options)


if __name__ == "__main__":
    main()

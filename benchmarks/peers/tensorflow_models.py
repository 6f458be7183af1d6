"""The models of the work in TensorFlow: functions of weights, in the layout that they come in."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf
from works import (
    BATCH_NORM_EPSILON,
    BATCH_NORM_KEEPS,
    DIM,
    GPT_BLOCKS,
    GPT_LENGTH,
    GPT_LONGEST_WAVE,
    LAYER_NORM_EPSILON,
    NUM_HEADS,
    NUM_LAYERS,
    NUM_TOKENS,
    RMS_NORM_EPSILON,
    Work,
    resnet20_convolutions,
)

Variables = dict[str, Any]


def make_variables(work: Work, weights: dict[str, Any]) -> tuple[Variables, Variables]:
    """The weights, and the statistics of batch normalisation: each replica's own, then averaged."""
    learnt = {name: tf.Variable(array) for name, array in weights.items()}
    statistics: Variables = {}
    for name, _, channels, _ in resnet20_convolutions() if work.has_batch_norm else ():
        for kind, first in (("mean", tf.zeros(channels)), ("variance", tf.ones(channels))):
            statistics[f"{name}.{kind}"] = tf.Variable(
                first,
                trainable=False,
                synchronization=tf.VariableSynchronization.ON_READ,
                aggregation=tf.VariableAggregation.MEAN,
            )
    return learnt, statistics


def cross_entropy(logits: Any, labels: Any) -> Any:
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits)
    return tf.reduce_mean(losses)


def polynomial(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    return tf.reduce_mean((v["w"][0] * x**2 + v["w"][1] * x + v["w"][2] - y) ** 2)


def dense(v: Variables, name: str, x: Any) -> Any:
    return x @ v[f"{name}.w"] + v[f"{name}.b"]


def mlp(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    x = tf.nn.relu(dense(v, "dense1", x))
    x = tf.nn.relu(dense(v, "dense2", x))
    return cross_entropy(dense(v, "dense3", x), y)


def lenet5(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    for name, padding in (("conv1", "SAME"), ("conv2", "VALID")):
        x = tf.nn.conv2d(x, v[f"{name}.w"], 1, padding) + v[f"{name}.b"]
        x = tf.nn.max_pool2d(tf.nn.relu(x), 2, 2, "VALID")
    x = tf.reshape(x, (x.shape[0], -1))
    x = tf.nn.relu(dense(v, "dense1", x))
    x = tf.nn.relu(dense(v, "dense2", x))
    return cross_entropy(dense(v, "dense3", x), y)


def resnet20(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    (stem, *_), *convolutions = resnet20_convolutions()
    x = tf.nn.relu(conv_norm(v, statistics, stem, x, 1))
    for (first, _, channels, stride), (second, *_) in zip(
        convolutions[::2], convolutions[1::2], strict=True
    ):
        z = tf.nn.relu(conv_norm(v, statistics, first, x, stride))
        z = conv_norm(v, statistics, second, z, 1)
        border = (channels - x.shape[-1]) // 2
        shortcut = x[:, ::stride, ::stride]
        if border:
            shortcut = tf.pad(shortcut, ((0, 0), (0, 0), (0, 0), (border, border)))
        x = tf.nn.relu(shortcut + z)
    return cross_entropy(dense(v, "dense", tf.reduce_mean(x, axis=(1, 2))), y)


def conv_norm(v: Variables, statistics: Variables, name: str, x: Any, stride: int) -> Any:
    x = tf.nn.conv2d(x, v[f"{name}.w"], stride, "SAME")
    scale, shift = v[f"{name}.scale"], v[f"{name}.shift"]
    # The fused operation, which is also what Keras' layer takes.
    x, mean, variance = tf.compat.v1.nn.fused_batch_norm(
        x, scale, shift, epsilon=BATCH_NORM_EPSILON, is_training=True
    )
    for kind, now in (("mean", mean), ("variance", variance)):
        variable = statistics[f"{name}.{kind}"]
        variable.assign_sub((1 - BATCH_NORM_KEEPS) * (variable - now))
    return x


def transformer(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    x = tf.gather(v["tokens.w"], x) + v["positions.w"]
    for number in range(NUM_LAYERS):
        name = f"layers.{number}"
        x = x + attention(v, name, layer_norm(v, f"{name}.norm1", x))
        z = dense(v, f"{name}.up", layer_norm(v, f"{name}.norm2", x))
        x = x + dense(v, f"{name}.down", tf.nn.gelu(z, approximate=True))
    return cross_entropy(layer_norm(v, "norm", x) @ v["head.w"], y)


def attention(v: Variables, name: str, x: Any) -> Any:
    head_dim = DIM // NUM_HEADS
    heads = tf.reshape(x @ v[f"{name}.qkv.w"], (-1, NUM_TOKENS, 3, NUM_HEADS, head_dim))
    q, k, values = tf.unstack(tf.transpose(heads, (2, 0, 3, 1, 4)))
    scores = tf.matmul(q, k, transpose_b=True) / head_dim**0.5
    is_past = tf.linalg.band_part(tf.ones((NUM_TOKENS, NUM_TOKENS), tf.bool), -1, 0)
    y = tf.nn.softmax(tf.where(is_past, scores, scores.dtype.min)) @ values
    return tf.reshape(tf.transpose(y, (0, 2, 1, 3)), tf.shape(x)) @ v[f"{name}.out.w"]


def gpt(v: Variables, statistics: Variables, x: Any, y: Any) -> Any:
    x = tf.gather(v["embedding"], x)
    for number in range(GPT_BLOCKS):
        name = f"blocks.{number}"
        x = x + rotary_attention(v, name, rms_norm(x, v[f"{name}.attention_norm"]))
        z = rms_norm(x, v[f"{name}.mlp_norm"])
        x = x + (tf.nn.silu(z @ v[f"{name}.gate"]) * (z @ v[f"{name}.up"])) @ v[f"{name}.down"]
    scores = tf.matmul(rms_norm(x, v["norm"]), v["embedding"], transpose_b=True)
    return cross_entropy(scores, y)


def rotary_attention(v: Variables, name: str, x: Any) -> Any:
    parts = ("query", "key", "value")
    q, k, values = (tf.einsum("rtw,whd->rhtd", x, v[f"{name}.{part}"]) for part in parts)
    half = q.shape[-1] // 2
    frequencies = GPT_LONGEST_WAVE ** (-tf.range(half, dtype=tf.float32) / half)
    angles = tf.range(GPT_LENGTH, dtype=tf.float32)[:, None] * frequencies
    cosine, sine = tf.cos(angles), tf.sin(angles)

    def turned(z: Any) -> Any:
        first, second = z[..., :half], z[..., half:]
        pair = (first * cosine - second * sine, second * cosine + first * sine)
        return tf.concat(pair, axis=-1)

    scores = tf.matmul(turned(q), turned(k), transpose_b=True) / (2 * half) ** 0.5
    is_past = tf.linalg.band_part(tf.ones((GPT_LENGTH, GPT_LENGTH), tf.bool), -1, 0)
    y = tf.nn.softmax(tf.where(is_past, scores, scores.dtype.min)) @ values
    return tf.einsum("rhtd,hdw->rtw", y, v[f"{name}.out"])


def rms_norm(x: Any, scale: Any) -> Any:
    return (
        x * tf.math.rsqrt(tf.reduce_mean(x**2, axis=-1, keepdims=True) + RMS_NORM_EPSILON) * scale
    )


def layer_norm(v: Variables, name: str, x: Any) -> Any:
    mean, variance = tf.nn.moments(x, axes=[-1], keepdims=True)
    scale, shift = v[f"{name}.scale"], v[f"{name}.shift"]
    return tf.nn.batch_normalization(x, mean, variance, shift, scale, LAYER_NORM_EPSILON)


LOSSES: dict[str, Callable[..., Any]] = {
    "Polynomial": polynomial,
    "MLP-1024": mlp,
    "LeNet-5": lenet5,
    "ResNet-20": resnet20,
    "Transformer": transformer,
    "GPT": gpt,
}

"""The losses of the work in plain JAX: one value per row, as functions of weights and a batch."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from works import LAYER_NORM_EPSILON, NUM_HEADS, NUM_LAYERS, Arrays

from multitower.recipes.networks import lenet5, resnet20
from multitower.recipes.networks import transformer as gpt_network


def unflatten(flat: Arrays) -> Any:
    """{"a.b": x, "c.0": y} as {"a": {"b": x}, "c": [y]}."""
    tree: Any = {}
    for name, array in flat.items():
        *branches, leaf = name.split(".")
        place = tree
        for branch in branches:
            place = place.setdefault(branch, {})
        place[leaf] = array

    def with_lists(node: Any) -> Any:
        if not isinstance(node, dict):
            return node
        node = {key: with_lists(child) for key, child in node.items()}
        return list(node.values()) if all(key.isdigit() for key in node) else node

    return with_lists(tree)


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels)


def polynomial(params: Any, batch: Any) -> Any:
    w, x = params["w"], batch["x"]
    return (w[0] * x**2 + w[1] * x + w[2] - batch["y"]) ** 2


def mlp(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for name in ("dense1", "dense2"):
        x = jax.nn.relu(x @ params[name]["w"] + params[name]["b"])
    return cross_entropy(x @ params["dense3"]["w"] + params["dense3"]["b"], batch["y"])


def lenet(params: Any, batch: Any) -> Any:
    return cross_entropy(lenet5.logits(params, batch["x"]), batch["y"])


def resnet(params: Any, batch: Any, statistics: Any) -> tuple[Any, Any]:
    """Also returns the new statistics."""
    logits, statistics = resnet20.logits(params, statistics, batch["x"], training=True)
    return cross_entropy(logits, batch["y"]), statistics


def transformer(params: Any, batch: Any) -> Any:
    """Causal, normalised before each layer; the loss of a row is the mean over its tokens."""
    x = params["tokens"]["w"][batch["x"]] + params["positions"]["w"]
    for number in range(NUM_LAYERS):
        layer = params["layers"][number]
        x = x + attention(layer, layer_norm(layer["norm1"], x))
        y = jax.nn.gelu(layer_norm(layer["norm2"], x) @ layer["up"]["w"] + layer["up"]["b"])
        x = x + y @ layer["down"]["w"] + layer["down"]["b"]
    logits = layer_norm(params["norm"], x) @ params["head"]["w"]
    return cross_entropy(logits, batch["y"]).mean(axis=1)


def attention(layer: Any, x: Any) -> Any:
    split = (*x.shape[:2], 3, NUM_HEADS, x.shape[-1] // NUM_HEADS)
    q, k, v = jnp.moveaxis((x @ layer["qkv"]["w"]).reshape(split), 2, 0)
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    return y.reshape(x.shape) @ layer["out"]["w"]


def layer_norm(params: Any, x: Any) -> Any:
    x = x - x.mean(axis=-1, keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + LAYER_NORM_EPSILON)
    return x * factor * params["scale"] + params["shift"]


def gpt(params: Any, batch: Any) -> Any:
    """The network of the recipe gpt, on rows of one document each."""
    logits = gpt_network.logits(params, batch["x"], jnp.zeros_like(batch["x"]))
    return cross_entropy(logits, batch["y"]).mean(axis=1)


LOSSES = {
    "Polynomial": polynomial,
    "MLP-1024": mlp,
    "LeNet-5": lenet,
    "Transformer": transformer,
    "GPT": gpt,
}

"""A contrastive loss as CLIP's, in two stages: each encoder lives on devices of its own."""

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from sklearn.datasets import load_digits


def init(key):
    keys = jax.random.split(key, 4)
    shapes = [(32, 64), (64, 16), (32, 64), (64, 16)]
    return [jax.random.normal(k, s) / s[0] ** 0.5 for k, s in zip(keys, shapes, strict=True)]


def embed(hidden, out, halves):
    embedded = jax.nn.relu(halves @ hidden) @ out
    return embedded / jnp.linalg.norm(embedded, axis=1, keepdims=True)


def contrast(queries, keys):
    logits = queries @ mt.all_rows(keys).T / 0.1
    return optax.softmax_cross_entropy_with_integer_labels(logits, mt.row_index(queries))


def losses(params, images):
    left = mt.cut(embed(params[0], params[1], images[:, :, :4].reshape(-1, 32)))
    right = embed(params[2], params[3], images[:, :, 4:].reshape(-1, 32))
    return (contrast(left, right) + contrast(right, left)) / 2


step = mt.train_step(losses, optax.adam(3e-3), towers=16, stages=2)


def main(steps=40, global_batch=256):
    images = (load_digits().images / 16).astype(np.float32)
    state = step.init(init(jax.random.key(0)))
    for number in range(steps):
        rows = np.random.default_rng(number).choice(len(images), global_batch, replace=False)
        state, metrics = step(state, images[rows])
    print(f"loss {metrics['loss']:.4f} after {steps} steps")
    return float(metrics["loss"]), jax.tree.map(np.asarray, state.params)


if __name__ == "__main__":
    main()

"""A contrastive loss as CLIP's: which right half belongs to which left one? All devices."""

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


@jax.checkpoint
def embed(hidden, out, halves):
    embedded = jax.nn.relu(halves @ hidden) @ out
    return embedded / jnp.linalg.norm(embedded, axis=1, keepdims=True)


def contrast(queries, keys):
    logits = queries @ mt.all_rows(keys).T / 0.1
    return optax.softmax_cross_entropy_with_integer_labels(logits, mt.row_index(queries))


def losses(params, images):
    left = embed(params[0], params[1], images[:, :, :4].reshape(-1, 32))
    right = embed(params[2], params[3], images[:, :, 4:].reshape(-1, 32))
    return (contrast(left, right) + contrast(right, left)) / 2


optimizer = optax.adam(3e-3)
loss_and_gradients = mt.value_and_grad(losses, towers=16)


@jax.jit
def update(params, opt_state, gradients):
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state


def main(steps=40, global_batch=256):
    images = (load_digits().images / 16).astype(np.float32)
    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    for step in range(steps):
        rows = np.random.default_rng(step).choice(len(images), global_batch, replace=False)
        loss, gradients = loss_and_gradients(params, images[rows])
        params, opt_state = update(params, opt_state, gradients)
    print(f"loss {loss:.4f} after {steps} steps")
    return float(loss), jax.tree.map(np.asarray, params)


if __name__ == "__main__":
    main()

"""Plain JAX and optax: gradient clipping, a schedule, accumulation, on real digits. One device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


class Params(NamedTuple):
    hidden: jax.Array
    out: jax.Array


def init(key):
    one, two = jax.random.split(key)
    return Params(jax.random.normal(one, (64, 128)) / 8, jax.random.normal(two, (128, 10)) / 11)


def predict(params, images):
    return jax.nn.relu(images @ params.hidden) @ params.out


def loss_fn(params, images, labels):
    logits = predict(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


schedule = optax.cosine_decay_schedule(1e-2, 66)
chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
optimizer = optax.MultiSteps(chain, every_k_schedule=2)


@jax.jit
def train_step(params, opt_state, images, labels):
    loss, gradients = jax.value_and_grad(loss_fn)(params, images, labels)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = slice(0, 1408), slice(1408, None)
    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            batch = images[train][rows], labels[train][rows]
            params, opt_state, loss = train_step(params, opt_state, *batch)
            losses.append(loss)
    accuracy = jnp.mean(predict(params, images[test]).argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

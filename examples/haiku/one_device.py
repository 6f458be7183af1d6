"""Haiku: transform_with_state, batch statistics and dropout, on real digits. One device."""

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


def network(images, training):
    x = hk.Linear(128)(images)
    x = jax.nn.relu(
        hk.BatchNorm(create_scale=True, create_offset=True, decay_rate=0.9)(x, training)
    )
    x = hk.dropout(hk.next_rng_key(), 0.1, x) if training else x
    return hk.Linear(10)(x)


model = hk.transform_with_state(network)
optimizer = optax.adam(3e-3)


def loss_fn(params, statistics, key, images, labels):
    logits, statistics = model.apply(params, statistics, key, images, training=True)
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, statistics


@jax.jit
def train_step(params, statistics, opt_state, key, batch):
    gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, statistics), gradients = gradient_fn(params, statistics, key, *batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), statistics, opt_state, loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = slice(0, 1408), slice(1408, None)
    params, statistics = model.init(jax.random.key(0), images[:1], training=True)
    opt_state = optimizer.init(params)
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            key = jax.random.fold_in(jax.random.key(1), len(losses))
            batch = images[train][rows], labels[train][rows]
            params, statistics, opt_state, loss = train_step(
                params, statistics, opt_state, key, batch
            )
            losses.append(loss)
    logits, _ = model.apply(params, statistics, None, images[test], training=False)
    accuracy = jnp.mean(logits.argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

"""Flax Linen: TrainState, batch statistics and dropout, on real digits. All devices."""

from typing import Any

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from flax import linen as nn
from flax.training import train_state
from sklearn.datasets import load_digits


class Network(nn.Module):
    @nn.compact
    def __call__(self, images, training):
        x = nn.Conv(16, (3, 3))(images)
        x = nn.relu(nn.BatchNorm(momentum=0.9, use_running_average=not training)(x))
        x = nn.max_pool(x, (2, 2), strides=(2, 2)).reshape(len(images), -1)
        x = nn.Dropout(0.1, deterministic=not training)(x)
        return nn.Dense(10)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any


def loss_fn(params, batch_stats, images, labels, key):
    logits, updates = Network().apply(
        {"params": params, "batch_stats": batch_stats},
        images,
        training=True,
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, updates["batch_stats"]


@jax.jit
def train_step(state, images, labels, key):
    gradient_fn = mt.value_and_grad(loss_fn, has_aux=True, in_axes=(None, None, 0, 0, 0))
    (loss, batch_stats), gradients = gradient_fn(
        state.params, state.batch_stats, images, labels, key
    )
    return state.apply_gradients(grads=gradients, batch_stats=batch_stats), loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train, test = slice(0, 1408), slice(1408, None)
    variables = Network().init(jax.random.key(0), images[:1], training=False)
    state = TrainState.create(apply_fn=Network().apply, tx=optax.adam(3e-3), **variables)
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            key = jax.random.fold_in(jax.random.key(1), len(losses))
            state, loss = train_step(state, images[train][rows], labels[train][rows], key)
            losses.append(loss)
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = Network().apply(variables, images[test], training=False)
    accuracy = jnp.mean(logits.argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

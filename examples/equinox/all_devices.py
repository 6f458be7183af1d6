"""Equinox: a model with functions in it, and dropout, on real digits. All devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from sklearn.datasets import load_digits


class Network(eqx.Module):
    hidden: eqx.nn.Linear
    dropout: eqx.nn.Dropout
    out: eqx.nn.Linear
    activation: callable = jax.nn.relu

    def __init__(self, key):
        one, two = jax.random.split(key)
        self.hidden = eqx.nn.Linear(64, 128, key=one)
        self.dropout = eqx.nn.Dropout(0.1)
        self.out = eqx.nn.Linear(128, 10, key=two)

    def __call__(self, image, key=None):
        x = self.activation(self.hidden(image))
        return self.out(self.dropout(x, key=key, inference=key is None))


def loss_fn(model, images, labels, key):
    keys = jax.random.split(key, len(images))
    logits = jax.vmap(model)(images, keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


optimizer = optax.adam(3e-3)


@eqx.filter_jit
def train_step(model, opt_state, batch, key):
    loss, gradients = mt.value_and_grad(loss_fn)(model, *batch, key)
    updates, opt_state = optimizer.update(gradients, opt_state, eqx.filter(model, eqx.is_array))
    return eqx.apply_updates(model, updates), opt_state, loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = slice(0, 1408), slice(1408, None)
    model = Network(jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            key = jax.random.fold_in(jax.random.key(1), len(losses))
            batch = images[train][rows], labels[train][rows]
            model, opt_state, loss = train_step(model, opt_state, batch, key)
            losses.append(loss)
    accuracy = jnp.mean(jax.vmap(model)(images[test]).argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

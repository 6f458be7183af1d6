"""Flax NNX: a convolutional network with BatchNorm and dropout on real digits. All devices."""

import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from flax import nnx
from sklearn.datasets import load_digits


class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv = nnx.Conv(1, 16, (3, 3), rngs=rngs)
        self.norm = nnx.BatchNorm(16, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.dense = nnx.Linear(16 * 16, 10, rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.norm(self.conv(images)))
        x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.dense(self.dropout(x.reshape(len(x), -1)))


def loss_fn(model, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(model(images), labels).mean()


@nnx.jit
def train_step(model, optimizer, images, labels):
    loss, gradients = mt.value_and_grad(loss_fn)(model, images, labels)
    optimizer.update(model, gradients)
    return loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    train, test = slice(0, 1408), slice(1408, None)
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
    model.train()
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            losses.append(train_step(model, optimizer, images[train][rows], labels[train][rows]))
    model.eval()
    accuracy = jnp.mean(model(images[test]).argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

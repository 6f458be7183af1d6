"""Keras 3 on JAX: a stateless training loop on real digits. One device."""

import os

os.environ["KERAS_BACKEND"] = "jax"

import jax
import keras
import numpy as np
from sklearn.datasets import load_digits


def make_model():
    keras.utils.set_random_seed(0)
    layers = [
        keras.Input((64,)),
        keras.layers.Dense(128),
        keras.layers.BatchNormalization(momentum=0.9),
        keras.layers.Activation("relu"),
        keras.layers.Dense(10),
    ]
    return keras.Sequential(layers)


model = make_model()
optimizer = keras.optimizers.Adam(3e-3)
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def loss_fn(trainable, non_trainable, images, labels):
    logits, non_trainable = model.stateless_call(trainable, non_trainable, images, training=True)
    return cross_entropy(labels, logits), non_trainable


@jax.jit
def train_step(trainable, non_trainable, opt_variables, images, labels):
    gradient_fn = jax.value_and_grad(loss_fn, has_aux=True)
    (loss, non_trainable), gradients = gradient_fn(trainable, non_trainable, images, labels)
    trainable, opt_variables = optimizer.stateless_apply(opt_variables, gradients, trainable)
    return trainable, non_trainable, opt_variables, loss


def main(epochs=6, batch_size=64):
    images, labels = load_digits(return_X_y=True)
    images = (images / 16).astype(np.float32)
    train, test = slice(0, 1408), slice(1408, None)
    optimizer.build(model.trainable_variables)
    state = [
        [variable.value for variable in variables]
        for variables in (
            model.trainable_variables,
            model.non_trainable_variables,
            optimizer.variables,
        )
    ]
    losses = []
    for epoch in range(epochs):
        order = np.random.default_rng(epoch).permutation(1408)
        for rows in order.reshape(-1, batch_size):
            *state, loss = train_step(*state, images[train][rows], labels[train][rows])
            losses.append(loss)
    logits, _ = model.stateless_call(state[0], state[1], images[test], training=False)
    accuracy = np.mean(np.asarray(logits).argmax(-1) == labels[test])
    print(f"loss {losses[-1]:.4f}, test accuracy {accuracy:.4f}")
    return [float(loss) for loss in losses], float(accuracy)


if __name__ == "__main__":
    main()

"""A polynomial: learn y = 5 x^2 + 3 as w0 x^2 + w1 x + w2. All devices."""

import sys

import jax
import multitower as mt
import numpy as np
import optax


def losses(w, x, y):
    return (w[0] * x**2 + w[1] * x + w[2] - y) ** 2


optimizer = optax.adam(0.1)


@jax.jit
def train(w, opt_state, x, y):
    loss, gradients = mt.value_and_grad(losses)(w, x, y)
    updates, opt_state = optimizer.update(gradients, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, loss


def main(num_steps=1001):
    rng = np.random.default_rng(0)
    w, loss = np.ones(3, np.float32), None
    opt_state = optimizer.init(w)
    for _ in range(num_steps):
        x = rng.uniform(-10, 10, size=100).astype(np.float32)
        w, opt_state, loss = train(w, opt_state, x, 5 * x**2 + 3)
    print(f"loss {loss:.5f}, weights {w[0]:.4f} {w[1]:.4f} {w[2]:.4f}")
    return loss, w


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

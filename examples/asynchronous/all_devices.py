"""Asynchronous updates: towers take turns, and none waits for the others. All devices."""

import sys

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax


def losses(params, batch):
    hidden = jnp.tanh(batch["x"] @ params["in"])
    return ((hidden @ params["out"])[:, 0] - batch["y"]) ** 2


def init(key):
    first, second = jax.random.split(key)
    return {
        "in": jax.random.normal(first, (2, 32)),
        "out": jax.random.normal(second, (32, 1)) / 32**0.5,
    }


def batch_of(number, num_rows=64):
    x = np.random.default_rng(number).normal(size=(num_rows, 2)).astype(np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1]}


def main(num_updates=400):
    step = mt.train_step(losses, optax.sgd(0.01), towers=8, updates="asynchronous")
    state = step.init(init(jax.random.key(0)))
    waiting = []  # metrics are read eight updates late, so that eight towers compute at a time
    for number in range(num_updates):
        state, metrics = step(state, batch_of(number))
        waiting.append(metrics)
        if len(waiting) > 8:
            metrics = waiting.pop(0)
            if number % 100 == 0:
                loss, staleness = float(metrics["loss"]), int(metrics["staleness"])
                print(f"update {number - 7}: loss {loss:.3f}, staleness {staleness}")
    loss = float(losses(state.params, batch_of(num_updates, 1000)).mean())
    print(f"loss on other rows {loss:.3f}, fingerprint {mt.fingerprint(state)[:12]}")
    return loss, state


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))

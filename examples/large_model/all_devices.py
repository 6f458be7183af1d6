"""A deep network cut over devices: each keeps the weights and the optimizer state of its blocks."""

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from sklearn.datasets import load_digits


def init(key, num_blocks=4, width=64, hidden=128):
    keys = jax.random.split(key, 2 * num_blocks + 1)
    shapes = [(width, hidden), (hidden, width)] * num_blocks + [(width, 10)]
    return [jax.random.normal(k, s) / s[0] ** 0.5 / 4 for k, s in zip(keys, shapes, strict=True)]


def logits(params, x):
    for wide, narrow in zip(params[:-1:2], params[1:-1:2], strict=True):
        x = mt.cut(x + jax.nn.relu(x @ wide) @ narrow)
    return x @ params[-1]


def losses(params, batch):
    found = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(found, batch["label"])


optimizer = optax.adamw(1e-3)


step = mt.train_step(losses, optimizer, towers=8, stages=4)


def main(steps=150, global_batch=128):
    digits = load_digits()
    x, label = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    state = step.init(init(jax.random.key(0)))
    for number in range(steps):
        rows = np.random.default_rng(number).choice(len(x), global_batch, replace=False)
        batch = {"x": x[rows], "label": label[rows]}
        state, metrics = step(state, batch)
    params, loss = jax.device_get((state.params, metrics["loss"]))
    accuracy = float(jnp.mean(logits(params, x).argmax(1) == label))
    print(f"loss {loss:.4f}, accuracy {accuracy:.3f} after {steps} steps")
    return float(loss), params, accuracy


if __name__ == "__main__":
    main()

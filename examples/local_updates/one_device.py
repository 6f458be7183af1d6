"""A network on one device that classifies digits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits


def init(key, sizes=(64, 128, 10)):
    keys = jax.random.split(key, len(sizes) - 1)
    shapes = zip(keys, sizes[:-1], sizes[1:], strict=True)
    return [jax.random.normal(k, (n, m)) / n**0.5 for k, n, m in shapes]


def logits(params, x):
    return jax.nn.relu(x @ params[0]) @ params[1]


def losses(params, batch):
    found = logits(params, batch["x"])
    return optax.softmax_cross_entropy_with_integer_labels(found, batch["label"])


optimizer = optax.adamw(3e-3)


@jax.jit
def update(params, opt_state, batch):
    loss, gradients = jax.value_and_grad(lambda *args: losses(*args).mean())(params, batch)
    updates, opt_state = optimizer.update(gradients, opt_state, params)
    return optax.apply_updates(params, updates), opt_state, loss


def main(steps=160, global_batch=128):
    digits = load_digits()
    x, label = (digits.data / 16).astype(np.float32), digits.target.astype(np.int32)
    params = init(jax.random.key(0))
    opt_state = optimizer.init(params)
    for number in range(steps):
        rows = np.random.default_rng(number).choice(len(x), global_batch, replace=False)
        batch = {"x": x[rows], "label": label[rows]}
        params, opt_state, loss = update(params, opt_state, batch)
    params = jax.device_get(params)
    accuracy = float(jnp.mean(logits(params, x).argmax(1) == label))
    print(f"loss {loss:.4f}, accuracy {accuracy:.3f} after {steps} steps")
    return float(loss), params, accuracy


if __name__ == "__main__":
    main()

"""The polynomial with multitower.train_step on all devices."""

import numpy as np
import optax

import multitower as mt

optimizer = optax.adam(0.1)


def losses(w, batch):
    return (w[0] * batch["x"] ** 2 + w[1] * batch["x"] + w[2] - batch["y"]) ** 2


step = mt.train_step(losses, optimizer)
w = np.ones(3, "f")
state = step.init(w)
x = np.linspace(-10, 10, 100, dtype="f")
batch = mt.shard({"x": x, "y": 5 * x**2 + 3})
for _ in range(20):
    state, metrics = step(state, batch)
print(np.asarray(state.params))

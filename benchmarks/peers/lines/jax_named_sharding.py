"""The polynomial in JAX with jit and NamedSharding on all devices."""

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("d",))
optimizer = optax.adam(0.1)


def losses(w, batch):
    return (w[0] * batch["x"] ** 2 + w[1] * batch["x"] + w[2] - batch["y"]) ** 2


@jax.jit
def step(w, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda w: losses(w, batch).mean())(w)
    updates, opt_state = optimizer.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, loss


w = np.ones(3, "f")
opt_state = optimizer.init(w)
x = np.linspace(-10, 10, 100, dtype="f")
batch = {"x": x, "y": 5 * x**2 + 3}
w, opt_state = jax.device_put((w, opt_state), NamedSharding(mesh, PartitionSpec()))
batch = jax.device_put(batch, NamedSharding(mesh, PartitionSpec("d")))
for _ in range(20):
    w, opt_state, loss = step(w, opt_state, batch)
print(np.asarray(w))

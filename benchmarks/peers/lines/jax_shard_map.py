"""The polynomial in JAX with shard_map and pmean on all devices."""

import functools

import jax
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

mesh = Mesh(np.array(jax.devices()), ("d",))
whole, split = PartitionSpec(), PartitionSpec("d")
optimizer = optax.adam(0.1)


def losses(w, batch):
    return (w[0] * batch["x"] ** 2 + w[1] * batch["x"] + w[2] - batch["y"]) ** 2


@jax.jit
@functools.partial(
    jax.shard_map, mesh=mesh, in_specs=(whole, whole, split), out_specs=whole, check_vma=False
)
def step(w, opt_state, batch):
    loss, grads = jax.value_and_grad(lambda w: losses(w, batch).mean())(w)
    loss, grads = jax.lax.pmean((loss, grads), "d")
    updates, opt_state = optimizer.update(grads, opt_state, w)
    return optax.apply_updates(w, updates), opt_state, loss


w = np.ones(3, "f")
opt_state = optimizer.init(w)
x = np.linspace(-10, 10, 100, dtype="f")
batch = {"x": x, "y": 5 * x**2 + 3}
w, opt_state = jax.device_put((w, opt_state), NamedSharding(mesh, whole))
batch = jax.device_put(batch, NamedSharding(mesh, split))
for _ in range(20):
    w, opt_state, loss = step(w, opt_state, batch)
print(np.asarray(w))

"""The host's time for a step, above the bare call of its program, on one device.

A batch of two arrays and a state of ten leaves, so small that the device has next to nothing to do.

    python benchmarks/host_time.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import multitower as mt

_STEPS, _BLOCKS = 200, 15


def main() -> None:
    """Prints microseconds: medians over blocks."""
    mt.configure(simulated_devices=2)
    import jax
    import numpy as np
    import optax

    def losses(params: Any, batch: Any) -> Any:
        hidden = batch["x"] * params["w0"] + params["w1"] * batch["x"]
        return hidden.sum(1) - params["w2"].sum() * batch["y"]

    params = {f"w{i}": np.ones(8, np.float32) for i in range(3)}
    batch = {"x": np.ones((8, 8), np.float32), "y": np.ones(8, np.float32)}
    for title, towers in (("fast", None), ("same bits, one tower", 1)):
        step = mt.train_step(losses, optax.adam(1e-3), devices=1, towers=towers)
        placed = mt.shard(batch, devices=1, towers=towers)
        print(f"{title:22} {_microseconds(step, step.init(params), placed):6.1f} us")

    def update(state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda p: losses(p, batch).mean())(state[0])
        updates, opt_state = optax.adam(1e-3).update(gradients, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), {"loss": loss}

    device = mt.devices()[0]
    first = jax.device_put((params, optax.adam(1e-3).init(params)), device)
    bare = jax.jit(update, donate_argnums=0)
    print(f"{'jax.jit by hand':22} {_microseconds(bare, first, jax.device_put(batch)):6.1f} us")


def _microseconds(step: Callable[..., Any], state: Any, batch: Any) -> float:
    times: list[float] = []
    metrics: Any = None
    for _ in range(1 + _BLOCKS):
        began = time.perf_counter()
        for _ in range(_STEPS):
            state, metrics = step(state, batch)
        metrics["loss"].block_until_ready()
        times.append((time.perf_counter() - began) / _STEPS * 1e6)
    return statistics.median(times[1:])


if __name__ == "__main__":
    main()

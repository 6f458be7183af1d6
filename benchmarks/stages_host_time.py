"""The host's time for each program that a step with stages starts, against a call of `jax.jit`.

Blocks of 8 x 8, a row for each of eight towers: devices have next to nothing to do. Measured is how
long calls take to return; between steps the host waits for the devices, and that is not counted.
The time of a program is its share of all that the host does in a step, moves between devices too.

    python benchmarks/stages_host_time.py
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

_WIDTH, _TOWERS, _BLOCKS, _STEPS = 8, 8, 15, 20


def losses(params: Any, x: Any) -> Any:
    for w in params:
        x = mt.cut(jnp.tanh(x @ w))
    return (x**2).sum(1)


def contrastive(params: Any, x: Any) -> Any:
    for w in params:
        x = mt.cut(jnp.tanh(x @ w))
    return jax.nn.logsumexp(x @ mt.all_rows(x).T, axis=1)


def main() -> None:
    """Prints a table: medians over blocks in which the step and the bare call take turns."""
    mt.configure(simulated_devices=4)
    print("| loss | stages | devices | programs a step | us a program | against a bare call |")
    print("| --- | --- | --- | --- | --- | --- |")
    for loss, stages, devices in (
        (losses, 2, 1),
        (losses, 4, 1),
        (losses, 4, 4),
        (contrastive, 4, 1),
        (contrastive, 4, 4),
    ):
        programs, microseconds, ratio = _measure(loss, stages, devices)
        name = "compares rows" if loss is contrastive else "of each row"
        print(
            f"| {name} | {stages} | {devices} | {programs} | {microseconds:.1f} | {ratio:.1f} |",
            flush=True,
        )


def _measure(loss: Callable[..., Any], stages: int, devices: int) -> tuple[int, float, float]:
    """Programs in a step, microseconds for each, and how many bare calls that are."""
    params = [np.eye(_WIDTH, dtype=np.float32)] * stages
    step = mt.train_step(loss, optax.sgd(1e-3), towers=_TOWERS, stages=stages, devices=devices)
    rows = mt.shard(np.ones((_TOWERS, _WIDTH), np.float32), towers=_TOWERS, devices=devices)
    state, metrics = step(step.init(params), rows)
    programs, state = _count(step, state, rows)
    bare = jax.jit(lambda w, x: jnp.tanh(x @ w))
    given = jax.device_put((params[0], np.ones((1, _WIDTH), np.float32)), mt.devices()[0])
    made = bare(*given)
    per_program: list[float] = []
    ratios: list[float] = []
    for _ in range(1 + _BLOCKS):
        own = calls = 0.0
        for _ in range(_STEPS):
            began = time.perf_counter()
            state, metrics = step(state, rows)
            own += time.perf_counter() - began
            jax.block_until_ready((state.params, metrics))
            began = time.perf_counter()
            for _ in range(programs):
                made = bare(*given)
            calls += time.perf_counter() - began
            jax.block_until_ready(made)
        ratios.append(own / calls)
        per_program.append(1e6 * own / (_STEPS * programs))
    return programs, statistics.median(per_program[1:]), statistics.median(ratios[1:])


def _count(step: Any, state: Any, rows: Any) -> tuple[int, Any]:
    """How many compiled programs one step starts; and the state after it."""
    started = 0
    call = jax.stages.Compiled.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal started
        started += 1
        return call(self, *args, **kwargs)

    jax.stages.Compiled.__call__ = counted
    try:
        state, _ = step(state, rows)
    finally:
        jax.stages.Compiled.__call__ = call
    return started, state


if __name__ == "__main__":
    main()

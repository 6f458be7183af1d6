"""The first step of a model in stages, which compiles: equal stages share programs on a device.

Prints a table: for each number of devices the seconds of the first step, as it is and with a
program compiled for every stage; medians over rounds in which both take turns.

    python benchmarks/stages_compile.py [--devices 1 2 4] [--rounds 3] [--layers 4]
"""

import argparse
import statistics
import time

import jax
import numpy as np
import optax

import multitower as mt
from multitower.engines.equal_programs import EqualPrograms

WIDTH, HIDDEN, ROWS, TOWERS = 64, 256, 16, 4


def losses(params, x):
    for into, out in params:
        middle = x - x.mean(-1, keepdims=True)
        h = middle * jax.lax.rsqrt((middle**2).mean(-1, keepdims=True) + 1e-6)
        x = mt.cut(x + jax.nn.gelu(h @ into) @ out)
    return (x**2).sum(1)


def first_step_s(layers, devices, compile_program):
    """Seconds of the first step, and the state's fingerprint."""
    EqualPrograms._compile = compile_program
    jax.clear_caches()
    draw = np.random.default_rng(0)
    shapes = (WIDTH, HIDDEN), (HIDDEN, WIDTH)
    params = [
        tuple(draw.normal(size=shape).astype(np.float32) / 16 for shape in shapes)
        for _ in range(layers)
    ]
    rows = draw.normal(size=(ROWS, WIDTH)).astype(np.float32)
    step = mt.train_step(losses, optax.adam(1e-3), towers=TOWERS, stages=layers, devices=devices)
    state = step.init(params)
    began = time.perf_counter()
    state, metrics = step(state, rows)
    jax.block_until_ready((state, metrics))
    return time.perf_counter() - began, mt.fingerprint(state)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--layers", type=int, default=4)
    given = parser.parse_args()
    mt.configure(simulated_devices=max(given.devices))
    shared = EqualPrograms._compile
    each = lambda self, traced, lowered, device: lowered.compile()
    first_step_s(given.layers, 1, shared)  # what is slow once in a process
    print("| devices | first step | a program for every stage |\n| --- | --- | --- |")
    for devices in given.devices:
        pairs = [
            [first_step_s(given.layers, devices, how) for how in (shared, each)]
            for _ in range(given.rounds)
        ]
        assert len({mark for pair in pairs for _, mark in pair}) == 1
        one, other = (statistics.median(pair[n][0] for pair in pairs) for n in range(2))
        print(f"| {devices} | {one:.1f} s | {other:.1f} s |", flush=True)


if __name__ == "__main__":
    main()

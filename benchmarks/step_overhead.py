"""What a multitower step costs, against the same step written by hand.

The hand-written step is `jax.jit(shard_map(... pmean ...))` with the same model, optimizer, data
and donation. All contenders run in one process and take turns in short blocks; what counts is the
ratio within a round, as the machine's speed drifts. On simulated devices the numbers say what the
library adds to a step, never how fast several devices are.

    python benchmarks/step_overhead.py [--devices 2] [--rounds 15] [--real] [--json FILE]
    python benchmarks/step_overhead.py --processes 2 --devices 1   # both steps, over two processes
"""

import argparse
import itertools
import json
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import multitower as mt


@dataclass(frozen=True)
class Work:
    """One model with its data."""

    name: str
    params: Any
    losses: Callable[[Any, Any], Any]
    batch: Any
    optimizer: Any
    steps_per_block: int


def polynomial(num_devices: int) -> Work:
    """A second-degree polynomial, batches of 100 rows."""
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    x = rng.uniform(-10, 10, size=100 // num_devices * num_devices).astype(np.float32)

    def losses(w: Any, batch: Any) -> Any:
        return (w[0] * batch["x"] ** 2 + w[1] * batch["x"] + w[2] - batch["y"]) ** 2

    params = tuple(np.float32(w) for w in (1.0, 1.0, 1.0))
    return Work("Polynomial", params, losses, {"x": x, "y": 5 * x**2 + 3}, optax.adam(0.1), 200)


def mlp(num_devices: int) -> Work:
    """A 784-1024-1024-10 perceptron, 64 rows a device."""
    import jax
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    sizes = (784, 1024, 1024, 10)
    params = [
        {"w": (rng.normal(size=(m, n)) / m**0.5).astype("f"), "b": np.zeros(n, "f")}
        for m, n in itertools.pairwise(sizes)
    ]

    def losses(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params[:-1]:
            x = jax.nn.relu(x @ layer["w"] + layer["b"])
        logits = x @ params[-1]["w"] + params[-1]["b"]
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    rows = 64 * num_devices
    batch = {
        "x": rng.normal(size=(rows, 784)).astype("f"),
        "y": rng.integers(0, 10, rows).astype("i"),
    }
    return Work("MLP-1024", params, losses, batch, optax.adam(1e-3), 20)


def lenet(num_devices: int) -> Work:
    """LeNet-5 on 28x28 images, 64 rows a device."""
    import jax
    import numpy as np
    import optax

    from multitower.recipes.networks import lenet5

    rng = np.random.default_rng(0)

    def losses(params: Any, batch: Any) -> Any:
        logits = lenet5.logits(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    rows = 64 * num_devices
    batch = {
        "x": rng.normal(size=(rows, 28, 28, 1)).astype("f"),
        "y": rng.integers(0, 10, rows).astype("i"),
    }
    params = lenet5.init(jax.random.key(0))
    return Work("LeNet-5", params, losses, batch, optax.adam(1e-3), 20)


def deep(num_devices: int) -> Work:
    """32 narrow layers with weights, biases and scales, 32 rows a device: many small leaves."""
    import jax
    import numpy as np
    import optax

    rng = np.random.default_rng(0)
    layers = [
        {
            "w": (rng.normal(size=(32, 32)) / 32**0.5).astype("f"),
            "b": np.zeros(32, "f"),
            "scale": np.ones(32, "f"),
        }
        for _ in range(32)
    ]

    def losses(params: Any, batch: Any) -> Any:
        x = batch["x"]
        for layer in params:
            x = x + layer["scale"] * jax.nn.relu(x @ layer["w"] + layer["b"])
        return ((x - batch["y"]) ** 2).mean(1)

    rows = 32 * num_devices
    batch = {name: rng.normal(size=(rows, 32)).astype("f") for name in ("x", "y")}
    return Work("32 layers", layers, losses, batch, optax.adam(1e-3), 60)


def hand_written(work: Work, devices: list[Any]) -> Callable[[int], None]:
    """The step that a careful user would write."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(devices), ("d",))
    split, whole = PartitionSpec("d"), PartitionSpec()

    def on_device(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            return work.losses(params, batch).mean()

        loss, grads = jax.value_and_grad(mean)(params)
        loss, grads = jax.lax.pmean((loss, grads), "d")
        updates, opt_state = work.optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss

    step = jax.jit(
        jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(whole, whole, split),
            out_specs=whole,
            check_vma=False,
        ),
        donate_argnums=(0, 1),
    )
    state = (work.params, work.optimizer.init(work.params))
    state = jax.tree.map(lambda x: jax.numpy.array(x, jax.numpy.asarray(x).dtype), state)
    state = jax.device_put(state, NamedSharding(mesh, whole))
    batch = jax.device_put(work.batch, NamedSharding(mesh, split))

    def run(num_steps: int) -> None:
        nonlocal state
        loss = None
        for _ in range(num_steps):
            params, opt_state, loss = step(*state, batch)
            state = (params, opt_state)
        jax.block_until_ready((state, loss))

    return run


def with_multitower(
    work: Work, num_devices: int, towers: int | None, **options: Any
) -> Callable[[int], None]:
    """The same through the library."""
    import jax

    given: dict[str, Any] = {"devices": num_devices, "towers": towers, **options}
    step = mt.train_step(work.losses, work.optimizer, **given)
    state = step.init(work.params)
    batch = mt.shard(work.batch, devices=num_devices, towers=towers)

    def run(num_steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(num_steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return run


def many_a_call(work: Work, num_devices: int) -> Callable[[int], None]:
    """The same, 20 steps in each call, with batches that are stacked on the devices already."""
    import jax
    import numpy as np

    at_once = 20
    step = mt.train_step(work.losses, work.optimizer, devices=num_devices, steps_per_call=at_once)
    state = step.init(work.params)
    mesh = step.placement.mesh
    there = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, *mesh.axis_names))
    stacked = jax.tree.map(lambda x: np.stack([x] * at_once), work.batch)
    batches = jax.device_put(stacked, there)

    def run(num_steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(-(-num_steps // at_once)):  # blocks of steps are multiples of it
            state, metrics = step(state, batches)
        jax.block_until_ready((state, metrics))

    return run


def measure(contenders: dict[str, Callable[[int], None]], rounds: int, steps: int) -> Any:
    """Milliseconds per step, one number per contender and round; the order turns every round."""
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for run in contenders.values():
        run(3)
    names = list(contenders)
    for round_number in range(rounds):
        for name in names if round_number % 2 == 0 else reversed(names):
            start = time.perf_counter()
            contenders[name](steps)
            times[name].append((time.perf_counter() - start) / steps * 1e3)
    return times


def report(times: dict[str, list[float]]) -> dict[str, Any]:
    """Medians, and the spread of the ratios to the hand-written step."""
    rows: dict[str, Any] = {}
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["hand-written"], strict=True)]
        quarter = statistics.quantiles(ratios, n=4)
        rows[name] = {
            "median_ms": statistics.median(values),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": [quarter[0], quarter[2]],
            "added_ms": statistics.median(
                a - b for a, b in zip(values, times["hand-written"], strict=True)
            ),
        }
    return rows


def devices_of_all(count: int) -> list[Any]:
    """The first devices of every process."""
    import jax

    return [
        one
        for process in range(jax.process_count())
        for one in [d for d in jax.devices() if d.process_index == process][:count]
    ]


def start_processes(count: int) -> int:
    """Runs this command as several processes; returns the first exit code that is not 0."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    running = [
        subprocess.Popen([sys.executable, *sys.argv, "--process", port, str(number)])
        for number in range(count)
    ]
    return next((code for code in [one.wait() for one in running] if code), 0)


def main() -> None:
    """Runs all work and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, default=2, help="of each process")
    parser.add_argument("--processes", type=int, default=1, help="on this machine")
    parser.add_argument("--process", nargs=2, metavar=("PORT", "NUMBER"), help="for its own use")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", default="", help="names of work, separated by commas")
    parser.add_argument("--real", action="store_true", help="accelerators, not simulated devices")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    options = parser.parse_args()
    if options.processes > 1 and options.process is None:
        sys.exit(start_processes(options.processes))
    together: dict[str, Any] = {}
    if options.process is not None:
        port, number = options.process
        together = dict(coordinator=f"127.0.0.1:{port}", process_id=int(number))
        together |= dict(distributed=True, num_processes=options.processes)
    if together or not options.real:
        mt.configure(simulated_devices=None if options.real else options.devices, **together)
    rows_for = options.processes * options.devices
    say = print if not together.get("process_id") else lambda *_, **__: None
    wanted = [name for name in options.only.split(",") if name]
    results: dict[str, Any] = {}
    say(f"{'work':10} {'contender':16} {'ms/step':>9} {'ratio':>7} {'quartiles':>15} {'+ms':>8}")
    works = [make(rows_for) for make in (polynomial, mlp, lenet, deep)]
    names = [work.name for work in works]
    if unknown := [name for name in wanted if name not in names]:
        parser.error(f"--only {unknown[0]}: the names are {', '.join(names)}")
    for work in works:
        if wanted and work.name not in wanted:
            continue
        contenders = {
            "hand-written": hand_written(work, devices_of_all(options.devices)),
            "fast": with_multitower(work, options.devices, None),
            "same bits": with_multitower(work, options.devices, rows_for),
            "shard_update": with_multitower(work, options.devices, rows_for, shard_update=True),
        }
        if not together:
            contenders["fast, 20 a call"] = many_a_call(work, options.devices)
        rows = report(measure(contenders, options.rounds, work.steps_per_block))
        results[work.name] = rows
        for name, row in rows.items():
            low, high = row["ratio_quartiles"]
            say(
                f"{work.name:10} {name:16} {row['median_ms']:9.3f} {row['ratio']:7.3f} "
                f"{low:7.3f}-{high:.3f} {row['added_ms']:8.3f}",
                flush=True,
            )
    if options.json and not together.get("process_id"):
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(results, file, indent=2)


if __name__ == "__main__":
    main()

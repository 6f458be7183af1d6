"""A long run: is memory flat, are steps even, what do checkpoints cost?

Polynomial (of degree 2, 20 000 steps) and LeNet-5 (on distorted images, 2000 steps), each with the
whole training system around it: Trainer, prefetch, checkpoints, metrics.jsonl, event files. The
time of a step is the time between two calls of a hook. On a shared machine any process is stopped
for a while now and then; a loop that only sleeps beside the run shows how often.

    python benchmarks/long_run.py [--work Polynomial,LeNet-5] [--json FILE]
"""

import argparse
import itertools
import json
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import multitower as mt

WARM_UP = 0.1  # of the steps: compiling, and the first checkpoints
SLOW = 5.0  # times the median
NAP_S = 0.001


def polynomial(run_dir: str, hooks: list[Any]) -> Callable[[], Any]:
    """20 000 steps of the second-degree polynomial, a checkpoint every 2000."""
    import numpy as np
    import optax

    def losses(w: Any, batch: Any) -> Any:
        return (w[0] * batch["x"] ** 2 + w[1] * batch["x"] + w[2] - batch["y"]) ** 2

    def batches(first: int) -> Iterator[Any]:
        for number in itertools.count(first):
            x = np.random.default_rng(number).uniform(-10, 10, 100).astype(np.float32)
            yield {"x": x, "y": 5 * x**2 + 3}

    trainer = mt.Trainer(
        losses,
        optax.adam(0.1),
        run_dir=run_dir,
        devices=2,
        towers=2,
        global_batch=100,
        checkpoint_every=2000,
        hooks=hooks,
    )
    params = tuple(np.float32(w) for w in (1, 1, 1))
    return lambda: trainer.fit(params, batches, steps=20_000)


def lenet(run_dir: str, hooks: list[Any]) -> Callable[[], Any]:
    """2000 steps of the recipe cifar10 on synthetic images, a checkpoint every 500."""
    import jax

    from multitower.recipes import find_recipe

    recipe = find_recipe("cifar10", {"synthetic": "true"})
    train = recipe.data().train
    trainer = mt.Trainer(
        mt.augmented(recipe.loss, recipe.augment),
        recipe.make_optimizer(2000, steps_per_epoch=1562.5),
        run_dir=run_dir,
        devices=2,
        towers=2,
        global_batch=32,
        ema_decay=recipe.ema_decay,
        checkpoint_every=500,
        hooks=hooks,
    )

    def batches(first: int) -> Iterator[Any]:
        return mt.make_batches(train, global_batch=32, seed=0, first=first, keyed=True)

    return lambda: trainer.fit(recipe.init(jax.random.key(0)), batches, steps=2000)


WORK = {"Polynomial": (polynomial, 20_000, 2000), "LeNet-5": (lenet, 2000, 500)}


def resident_bytes() -> int:
    """What this process holds in memory now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


class Naps:
    """A thread that only sleeps: how late it wakes is the machine's doing, not the run's."""

    def __init__(self) -> None:
        self.late_s: list[float] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._nap, daemon=True)

    def _nap(self) -> None:
        while not self._over.is_set():
            start = time.perf_counter()
            time.sleep(NAP_S)
            self.late_s.append(time.perf_counter() - start - NAP_S)

    def __enter__(self) -> "Naps":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def measure(name: str) -> dict[str, Any]:
    """Runs one work, and says how even it was."""
    make, steps, every = WORK[name]
    ends: list[float] = []
    resident: list[int] = []

    def note(progress: Any) -> None:
        ends.append(time.perf_counter())
        if progress.step % (steps // 100) == 0:
            resident.append(resident_bytes())

    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        with (
            mt.MetricsFile(path / "metrics.jsonl") as lines,
            mt.EventFiles(path / "events") as events,
        ):
            fit = make(directory, [lines, events, note])
            with Naps() as naps:
                fit()
    first = int(WARM_UP * steps)
    times = {n + 1: ends[n] - ends[n - 1] for n in range(first, len(ends))}
    median = statistics.median(times.values())
    # A step's metrics are read one step late, and the save is made after its own step.
    near = {c + d for c in range(every, steps + 1, every) for d in range(4)}
    slow = [n for n, t in times.items() if t > SLOW * median and n not in near]
    added = sum(t - median for n, t in times.items() if n in near)
    warm = statistics.median(resident[int(WARM_UP * 100) : int(WARM_UP * 100) + 5])
    return {
        "steps": steps,
        "median_ms": median * 1e3,
        "slow_steps": len(slow),
        "slowest_ms": max(t for n, t in times.items() if n not in near) * 1e3,
        "slowest_at": max((t, n) for n, t in times.items() if n not in near)[1],
        "naps_late_by_4_medians": sum(late > (SLOW - 1) * median for late in naps.late_s),
        "latest_nap_ms": max(naps.late_s) * 1e3,
        "checkpoints_share": added / sum(times.values()),
        "resident_mib_warm": warm / 2**20,
        "resident_growth": statistics.median(resident[-5:]) / warm - 1,
    }


def main() -> None:
    """Runs all work and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="Polynomial,LeNet-5", help="names, separated by commas")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    arguments = parser.parse_args()
    mt.configure(simulated_devices=2)
    found = {name: measure(name) for name in arguments.work.split(",")}
    for name, numbers in found.items():
        print(name)
        for key, value in numbers.items():
            print(f"  {key:24} {value:,.4f}" if isinstance(value, float) else f"  {key:24} {value}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(found, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

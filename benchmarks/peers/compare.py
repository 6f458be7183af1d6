"""multitower against what its users would pick instead, on identical work.

Every contender has processes of its own. All take turns in short blocks, in an order that moves on
by one every round, and whoever is not measured is stopped. What counts is the ratio, within a
round, to a step written by hand with `shard_map` and `pmean`. All start from the same weights and
see the same batches with the same optimizer; losses that differ from the hand-written ones are an
error. The devices are simulated: these are costs on one CPU, and nothing here shows a speed-up.

    benchmarks/peers/setup.sh                      once: environments for PyTorch and TensorFlow
    python benchmarks/peers/compare.py [--work Polynomial,MLP-1024] [--contenders multitower,ddp]
                                       [--rounds 9] [--steps N] [--json FILE]

README.md beside this file says how to read the numbers.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from contenders import CONTENDERS, GLOBAL_REFERENCE, REFERENCE, Contender
from report import Measurement, rows_of, table, versions_of
from worker_process import Worker, WorkerError
from works import NUM_BATCHES, NUM_DEVICES, WORKS, Work, draw

# Rounding, and the places where an Adam adds its eps, differ from one library to the next: the
# largest difference seen is 3e-4. See README.md for what five losses cannot tell.
TOLERANCE = 1e-3


class DifferentWorkError(ValueError):
    """A contender's losses are not the hand-written ones: it did other work."""


def measure(work: Work, contenders: Sequence[Contender], rounds: int, steps: int) -> Any:
    """Starts all contenders, checks that their work is the same, and lets them take turns."""
    workers: dict[str, Worker] = {}
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "work.npz"
        np.savez(data, **draw(work))
        try:
            losses: dict[str, list[float]] = {}
            for contender in contenders:
                worker = workers[contender.key] = Worker(contender, work.name, data)
                more = worker.ask("losses", NUM_BATCHES - 1)["losses"]
                losses[contender.key] = worker.first_losses + more
            check_losses(work, contenders, losses)
            times = take_turns(workers, rounds, steps)
            return {
                key: Measurement(
                    worker.contender,
                    losses[key],
                    times[key],
                    worker.ask("host", min(steps, 10))["seconds"],
                    worker.first_step_s,
                    worker.peak_memory_bytes(),
                    worker.versions,
                )
                for key, worker in workers.items()
            }
        finally:
            for worker in workers.values():
                worker.close()


def check_losses(
    work: Work, contenders: Sequence[Contender], losses: dict[str, list[float]]
) -> None:
    """Refuses contenders whose first losses are others than those of the hand-written step."""
    for contender in contenders:
        is_global = work.has_batch_norm and contender.batch_norm == "global"
        wanted = np.array(losses[GLOBAL_REFERENCE if is_global else REFERENCE])
        found = np.array(losses[contender.key])
        difference = float(np.max(np.abs(found - wanted) / np.abs(wanted)))
        if not difference < TOLERANCE:  # also where it is not a number
            raise DifferentWorkError(
                f"{contender.title} did other work at {work.name}: its first losses are "
                f"{found.tolist()}, the hand-written ones {wanted.tolist()}. They differ by "
                f"{difference:.2g}, and may by {TOLERANCE:.2g} (relative)."
            )


def take_turns(workers: dict[str, Worker], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step, one number per contender and round."""
    times: dict[str, list[float]] = {key: [] for key in workers}
    keys = list(workers)
    for number in range(rounds):
        first = number % len(keys)
        for key in keys[first:] + keys[:first]:
            times[key].append(workers[key].ask("time", steps)["seconds"] / steps)
    return times


def chosen(work: Work, keys: Sequence[str], known: dict[str, Contender]) -> list[Contender]:
    """Who was asked for and can run, with the hand-written steps that they are compared with."""
    able = [known[key] for key in keys if not known[key].why_not()]
    keys = [contender.key for contender in able]
    needed = {REFERENCE}
    if work.has_batch_norm and any(contender.batch_norm == "global" for contender in able):
        needed.add(GLOBAL_REFERENCE)
    return [known[key] for key in known if key in needed or key in keys]


def names(text: str, known: dict[str, Any]) -> list[str]:
    """The names in a list with commas; all of them for an empty one."""
    wanted = [name for name in text.split(",") if name] or list(known)
    for name in wanted:
        if name not in known:
            raise SystemExit(f"no {name!r} here: choose from {', '.join(known)}")
    return wanted


def use_two_cores() -> None:
    """One core for each device, also on a larger machine; workers inherit it."""
    if hasattr(os, "sched_setaffinity"):  # Linux
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:NUM_DEVICES])


def compare(
    arguments: Sequence[str] | None = None, known: dict[str, Contender] = CONTENDERS
) -> dict[str, Any]:
    """Measures what the arguments ask for, and prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", default="", help=f"from: {', '.join(WORKS)}")
    parser.add_argument("--contenders", default="", help=f"from: {', '.join(known)}")
    parser.add_argument("--rounds", type=int, default=9, help="two at least")
    parser.add_argument("--steps", type=int, default=0, help="a turn; 0: as each work has it")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    options = parser.parse_args(arguments)
    if options.rounds < 2:
        raise SystemExit(f"--rounds {options.rounds}: quartiles need 2 at least")
    keys = names(options.contenders, known)
    for key in keys:
        if reason := known[key].why_not():
            print(f"skipped: {known[key].title} ({reason})", flush=True)
    results: dict[str, Any] = {}
    for name in names(options.work, WORKS):
        work = WORKS[name]
        steps = options.steps or work.steps_per_block
        measured = measure(work, chosen(work, keys, known), options.rounds, steps)
        results[name] = rows_of(measured)
        print(f"\n{table(work, results[name])}", flush=True)
        if options.json:  # after every work: a later one may fail
            Path(options.json).write_text(json.dumps(results, indent=2), encoding="utf-8")
    print(f"\nPython {sys.version.split()[0]}, {versions_of(results)}")
    return results


def main(run: Callable[[], Any] = compare) -> None:
    use_two_cores()
    # As Ctrl-C: without a chance to end them, stopped workers would stay for ever.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run()
    except (DifferentWorkError, WorkerError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

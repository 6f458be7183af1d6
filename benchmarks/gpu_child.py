"""What `gpu_keras.py` and `gpu_torch.py` share: their options, and the line that they print."""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any


def options_of(doc: str | None) -> argparse.Namespace:
    """What was asked for on the command line."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("model", choices=["lenet", "resnet50", "transformer"])
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    return parser.parse_args()


def report(run: Callable[[int], None], options: argparse.Namespace) -> None:
    """Prints one line of JSON: seconds of the first two steps, milliseconds per step of each round.

    Args:
        run: makes so many steps, and waits for them.
        options: from `options_of`.
    """
    started = time.perf_counter()
    run(2)
    found: dict[str, Any] = {"start_s": time.perf_counter() - started, "ms": []}
    for _ in range(options.rounds):
        start = time.perf_counter()
        run(options.steps)
        found["ms"].append((time.perf_counter() - start) / options.steps * 1e3)
    print(json.dumps(found))

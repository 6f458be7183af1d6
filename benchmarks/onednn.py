"""oneDNN's kernels against XLA's own on CPUs: gradients of the networks that ship, one device.

Each network is compiled twice, with and without the settings of `mt.configure(onednn=True)`; the
two programs take turns. Times are those of the processor, in all threads.

    python benchmarks/onednn.py [--rounds 9]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import multitower as mt

_CALLS = 3
_OPTIONS = {"xla_cpu_use_onednn": True, "xla_cpu_experimental_onednn_custom_call": True}


def main() -> None:
    """Prints a row for each network."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    mt.configure(simulated_devices=1)
    import jax

    print("| network | XLA's own | oneDNN | ratio | bits, run to run |")
    print("| --- | --- | --- | --- | --- |")
    for name, loss, params, images in networks():
        gradient = jax.value_and_grad(loss)
        runs: list[Callable[[], Any]] = []
        for settings in (None, _OPTIONS):
            compiled = jax.jit(gradient, compiler_options=settings).lower(params, images).compile()
            runs.append(partial(compiled, params, images))
        first, again = ([mt.fingerprint(run()) for run in runs] for _ in range(2))
        times: list[list[float]] = [[], []]
        for number in range(options.rounds):
            for which in (0, 1) if number % 2 else (1, 0):
                times[which].append(_seconds(runs[which]))
        ratio = statistics.median(b / a for a, b in zip(*times, strict=True))
        own, other = (f"{statistics.median(one) * 1e3:.1f} ms" for one in times)
        bits = "the same" if first == again else "DIFFERENT"
        print(f"| {name} | {own} | {other} | {ratio:.2f} | {bits} |")


def networks() -> list[tuple[str, Callable[..., Any], Any, Any]]:
    """Name, mean loss, parameters and 64 images."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    from multitower.recipes.networks import lenet5, resnet20

    labels = np.arange(64) % 10

    def mean(logits: Any) -> Any:
        return -jax.nn.log_softmax(logits)[jnp.arange(64), labels].mean()

    def images(*shape: int) -> Any:
        return np.random.default_rng(0).normal(size=(64, *shape)).astype(np.float32)

    def resnet(params: Any, x: Any) -> Any:
        return mean(resnet20.logits(params, statistics, x, training=True)[0])

    statistics, key = resnet20.init_statistics(), jax.random.key(0)
    return [
        ("LeNet-5", lambda p, x: mean(lenet5.logits(p, x)), lenet5.init(key), images(28, 28, 1)),
        ("ResNet-20", resnet, resnet20.init(key), images(32, 32, 3)),
    ]


def _seconds(run: Callable[[], Any]) -> float:
    import jax

    began = time.process_time()
    for _ in range(_CALLS):
        jax.block_until_ready(run())
    return (time.process_time() - began) / _CALLS


if __name__ == "__main__":
    main()

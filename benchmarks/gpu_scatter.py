"""What a deterministic scatter-add costs on a GPU, at rising sizes, and whether it repeats itself.

With `xla_gpu_deterministic_ops` XLA sorts the indices of a scatter-add, as in the gradient of max
pooling. Where they are not int32 or int64, as in the gradient of `jnp.sort`, it makes a loop with
one trip per index (gpu_compiled.py shows which). Each is compiled in two ways. A way is measured at
larger sizes until one run takes over five seconds. The error is against NumPy in float64.

    python benchmarks/gpu_scatter.py [--small]

`--small` leaves out the large sizes and runs on a CPU, to test the program.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

import multitower as mt

WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "deterministic": {"xla_gpu_deterministic_ops": True},
}
SIZES = (1_000, 10_000, 100_000, 1_000_000)
CHANNELS = 64
LIMIT_S = 5.0

# A function of two arrays, the arrays, and what it should give.
Case = tuple[Callable[..., Any], tuple[Any, Any], Any]


def scatter_add(size: int) -> Case:
    """`size` numbers, into a quarter as many places."""
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    bins = size // 4
    places, values = draw.integers(0, bins, size), draw.normal(size=size).astype("f")
    wanted = np.zeros(bins)
    np.add.at(wanted, places, values.astype(float))
    fn = lambda places, values: jnp.zeros(bins, values.dtype).at[places].add(values)
    return fn, (places.astype(np.int32), values), wanted


def max_pooling(size: int) -> Case:
    """The gradient of max pooling, 3x3 with stride 2, with about `size` windows."""
    import jax
    from jax import lax

    draw = np.random.default_rng(0)
    side = round((size / CHANNELS) ** 0.5)
    images = draw.normal(size=(1, 2 * side, 2 * side, CHANNELS)).astype("f")
    grads = draw.normal(size=(1, side, side, CHANNELS)).astype("f")

    def pooled(x: Any) -> Any:
        return lax.reduce_window(x, -np.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    # "SAME" adds one row below, and one column to the right.
    padded = np.pad(images, ((0, 0), (0, 1), (0, 1), (0, 0)), constant_values=-np.inf)
    windows = np.lib.stride_tricks.sliding_window_view(padded, (3, 3), (1, 2))[:, ::2, ::2]
    row, column = np.divmod(windows.reshape(*grads.shape, 9).argmax(-1), 3)
    image, top, left, channel = np.indices(grads.shape)
    wanted = np.zeros(images.shape)
    np.add.at(wanted, (image, 2 * top + row, 2 * left + column, channel), grads.astype(float))
    return lambda x, grads: jax.vjp(pooled, x)[1](grads)[0], (images, grads), wanted


def sort(size: int) -> Case:
    """The gradient of a sort of `size` numbers."""
    import jax
    import jax.numpy as jnp

    draw = np.random.default_rng(0)
    numbers, grads = draw.normal(size=(2, size)).astype("f")
    wanted = np.zeros(size)
    wanted[np.argsort(numbers, kind="stable")] = grads
    return lambda x, grads: jax.vjp(jnp.sort, x)[1](grads)[0], (numbers, grads), wanted


def measure(case: Case, options: dict[str, Any]) -> dict[str, Any]:
    """Seconds of a run and of compiling, the error, and whether two runs have the same bits."""
    import jax

    fn, arguments, wanted = case
    arguments = jax.device_put(arguments, mt.devices(1)[0])
    start = time.perf_counter()
    program = jax.jit(fn, compiler_options=options).lower(*arguments).compile()
    compile_s = time.perf_counter() - start
    outputs, times_s = [], []
    for _ in range(6):  # the first one also loads the program
        start = time.perf_counter()
        outputs.append(jax.block_until_ready(program(*arguments)))
        times_s.append(time.perf_counter() - start)
        if sum(times_s) > LIMIT_S:
            break
    seen = [np.asarray(output) for output in outputs]
    return {
        "compile_s": compile_s,
        "run_s": statistics.median(times_s[1:] or times_s),
        "error": float(np.abs(seen[0] - wanted).max() / np.abs(wanted).max()),
        "same": all(one.tobytes() == seen[0].tobytes() for one in seen) if seen[1:] else None,
    }


def line(found: dict[str, Any]) -> str:
    """The cells of one measurement."""
    if "failed" in found:
        return f"{found['failed']} | | | |"
    same = {True: "same", False: "differ", None: "-"}[found["same"]]
    times = f"{found['run_s'] * 1e3:,.3f} | {found['compile_s']:.1f}"
    return f"{times} | {found['error']:.1e} | {same} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small sizes on a CPU")
    options = parser.parse_args()
    if options.small:
        mt.configure(simulated_devices=1)
    import jax

    print(f"{mt.devices(1)[0].device_kind}, JAX {jax.__version__}\n")
    print("| kernel | indices | compiled | ms | compile s | error | bits of several runs |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    cases = {"scatter-add": scatter_add, "max pooling": max_pooling, "sort": sort}
    for name, make in cases.items():
        ways = dict(WAYS)
        for size in SIZES[:2] if options.small else SIZES:
            case = make(size)
            for way in list(ways):
                try:
                    found = measure(case, ways[way])
                except Exception as error:  # such as an option that this JAX does not know
                    found = {"failed": (str(error).strip().splitlines() or [repr(error)])[0][:160]}
                if "failed" in found or found["run_s"] > LIMIT_S:
                    del ways[way]  # it is left out at larger sizes
                print(f"| {name} | {size:,} | {way} | {line(found)}", flush=True)


if __name__ == "__main__":
    main()

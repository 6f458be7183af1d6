"""Same bits on a GPU, kernel by kernel: over runs, processes and devices, in three precisions.

Each kernel is in the middle of a small model that is trained for three steps, with 1, 2, 4 and 8
towers in float32, with 1 and 8 in the others. Two processes do it at once, each with a part of the
GPU's memory, and each does it twice. "plain" is the hand-written step, compiled twice in each
process without `xla_gpu_deterministic_ops`, which same-bits steps are compiled with: where it
differs, this option is what keeps the bits. Kernels that scatter come last: they may be slow.

    python benchmarks/gpu_bits.py [--small] [--only convolution,sort] [--towers 1,8]

`--small` runs on two simulated devices, to test the program.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

import multitower as mt

ROWS, NUM_STEPS, SHARE_OF_MEMORY = 64, 3, 0.4
PRECISIONS = {"float32": "highest", "TF32": "tensorfloat32", "bfloat16": None}
TOWERS = {"float32": "1,2,4,8", "TF32": "1,8", "bfloat16": "1,8"}
TITLES = ["kernel", "precision", "two runs", "two processes", "1 and all devices", "plain, 4 times"]


class Work(NamedTuple):
    """A small model around one kernel: first weights, a batch, and one loss per row."""

    params: Any
    batch: Any
    losses: Callable[..., Any]
    precisions: tuple[str, ...] = tuple(PRECISIONS)


def works(*, small: bool) -> dict[str, Work]:
    """The models by the name of their kernel."""
    import jax
    import jax.numpy as jnp
    from jax import lax

    draw = np.random.default_rng(0)
    wide, side, words = (16, 8, 32) if small else (256, 32, 4096)

    def normal(*shape: int) -> Any:
        return (draw.normal(size=shape) / shape[-1] ** 0.5).astype("f")

    def dense(h: Any, params: Any) -> Any:
        out = jnp.tanh(h.reshape(len(h), -1).astype(params["out"].dtype)) @ params["out"]
        return jnp.square(out.astype(jnp.float32)).mean(1)

    def convolved(params: Any, x: Any) -> Any:
        shape = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(
            x.astype(params["w"].dtype), params["w"], (2, 2), "SAME", dimension_numbers=shape
        )

    def pooled(params: Any, x: Any) -> Any:
        h = x * params["w"]
        return lax.reduce_window(h, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")

    def attended(params: Any, x: Any, implementation: Any = None) -> Any:
        q, k, v = (x.astype(w.dtype) @ w for w in params["w"])
        heads = lambda y: y.reshape(*y.shape[:2], -1, min(wide, 64))
        found = jax.nn.dot_product_attention(
            heads(q), heads(k), heads(v), is_causal=True, implementation=implementation
        )
        return found.mean(1)

    def scattered(params: Any, batch: Any) -> Any:
        put = lambda places, values: jnp.zeros(wide, values.dtype).at[places].add(values)
        return jax.vmap(put)(batch["places"], batch["x"] * params["w"])

    def normed(params: Any, x: Any) -> Any:
        h = x.astype(params["w"].dtype) @ params["w"]
        mean, square = lax.pmean((h.mean(0), jnp.square(h).mean(0)), "towers")
        return (h - mean) * lax.rsqrt(square - jnp.square(mean) + 1e-3)

    images, sequences, rows = (
        normal(ROWS, side, side, 8),
        normal(ROWS, side, wide),
        normal(ROWS, wide),
    )
    places = draw.integers(0, 8, (ROWS, wide))  # many of them twice
    square = {"w": normal(wide, wide), "out": normal(wide, 8)}
    flat = {"w": normal(wide), "out": normal(wide, 8)}
    attention = {"w": [normal(wide, wide) for _ in range(3)], "out": normal(wide, 8)}
    quarter = side * side // 4

    def around(kernel: Callable[..., Any]) -> Callable[..., Any]:
        return lambda params, batch: dense(kernel(params, batch), params)

    def dropped(params: Any, x: Any, *, rng: Any) -> Any:
        return dense(jnp.where(jax.random.bernoulli(rng, 0.5, x.shape), x * params["w"], 0), params)

    found = {
        "product": Work(square, rows, around(lambda p, x: x.astype(p["w"].dtype) @ p["w"])),
        "convolution": Work(
            {"w": normal(3, 3, 8, 16), "out": normal(quarter * 16, 8)}, images, around(convolved)
        ),
        "attention": Work(attention, sequences, around(attended)),
        "sort": Work(flat, rows, around(lambda p, x: jnp.sort(x * p["w"]))),
        "dropout": Work(flat, rows, dropped),
        "mean over towers": Work(square, rows, around(normed)),
    }
    if mt.devices()[0].platform == "gpu":
        kernel = lambda params, x: attended(params, x, "cudnn")
        found["cuDNN attention"] = Work(attention, sequences, around(kernel), ("bfloat16",))
    return found | {
        "embedding": Work(
            {"w": normal(words, wide), "out": normal(wide, 8)},
            draw.integers(0, 16, (ROWS, side)),
            around(lambda p, x: p["w"][x].mean(1)),
        ),
        "scatter-add": Work(flat, {"x": rows, "places": places}, around(scattered)),
        "max pooling": Work(
            {"w": normal(8), "out": normal(quarter * 8, 8)}, images, around(pooled)
        ),
    }


def trained(work: Work, precision: str, towers: int, devices: int) -> list[str]:
    """Fingerprints of two trainings with the same step."""
    import jax
    import jax.numpy as jnp
    import optax

    dtype = jnp.bfloat16 if precision == "bfloat16" else None
    with jax.default_matmul_precision(PRECISIONS[precision]):
        step = mt.train_step(
            work.losses, optax.adam(1e-2), towers=towers, devices=devices, compute_dtype=dtype
        )
        return [_fingerprint(step, work) for _ in range(2)]


def _fingerprint(step: Any, work: Work) -> str:
    import jax

    takes_rng = "rng" in work.losses.__code__.co_varnames
    state = step.init(work.params, **({"rng": jax.random.key(0)} if takes_rng else {}))
    metrics = None
    for _ in range(NUM_STEPS):
        state, metrics = step(state, work.batch)
    return mt.fingerprint((state, metrics))[:12]


def plain(work: Work, precision: str) -> list[str]:
    """The same of the step as one writes it by hand, compiled anew each time."""
    import jax
    import jax.numpy as jnp
    import optax

    optimizer = optax.adam(1e-2)

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            if precision == "bfloat16":
                params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
            return work.losses(params, batch).mean()

        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    found = []
    for _ in range(2):
        with jax.default_matmul_precision(PRECISIONS[precision]):
            step = jax.jit(partial(update))  # a new function is compiled anew
            params, opt_state = work.params, optimizer.init(work.params)
            for _ in range(NUM_STEPS):
                params, opt_state = step(params, opt_state, work.batch)
        found.append(mt.fingerprint((params, opt_state))[:12])
    return found


def results(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What one process finds, a line for each kernel and precision."""
    counts = sorted({1, len(mt.devices())})
    for name, work in works(small=options.small).items():
        if options.only and name not in options.only.split(","):
            continue
        has_plain = name not in ("dropout", "mean over towers")
        for precision in work.precisions:
            row: dict[str, Any] = {"kernel": name, "precision": precision, "bits": {}}
            try:
                for towers in map(int, (options.towers or TOWERS[precision]).split(",")):
                    usable = [count for count in counts if count <= towers]
                    found = [trained(work, precision, towers, count) for count in usable]
                    row["bits"][towers] = found
                row["plain"] = plain(work, precision) if has_plain else []
            except Exception as error:  # one kernel that fails is a result, too
                row["error"] = (str(error).strip().splitlines() or [repr(error)])[0][:120]
            yield row


def line(rows: list[dict[str, Any]]) -> str:
    """A line of the table, of what each process has found."""
    first = rows[0]
    title = f"| {first['kernel']} | {first['precision']} |"
    errors = [row["error"] for row in rows if "error" in row]
    if errors:
        return f"{title} {errors[0]} | | | |"

    def verdict(unequal: list[str]) -> str:
        return f"differs ({', '.join(unequal)})" if unequal else "same"

    runs, processes, devices = [], [], []
    for towers in first["bits"]:
        found = [row["bits"][towers] for row in rows]
        if any(one != two for each in found for one, two in each):
            runs.append(f"T={towers}")
        if any(each != found[0] for each in found):
            processes.append(f"T={towers}")
        if any(pair != each[0] for each in found for pair in each):
            devices.append(f"T={towers}")
    several = any(len(found) > 1 for found in first["bits"].values())
    over_devices = verdict(devices) if several else "-"
    by_hand = {0: "-", 1: "same"}.get(
        len({bits for row in rows for bits in row["plain"]}), "differs"
    )
    return f"{title} {verdict(runs)} | {verdict(processes)} | {over_devices} | {by_hand} |"


def main() -> None:
    """Starts two processes, and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models on two CPU devices")
    parser.add_argument("--only", default="", help="names of kernels, separated by commas")
    parser.add_argument("--towers", default="", help="numbers of them, in every precision")
    parser.add_argument("--memory", type=float, default=SHARE_OF_MEMORY, help="of one process")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        if options.small:
            mt.configure(simulated_devices=2)
        else:
            mt.configure(memory_fraction=options.memory)
        for row in results(options):
            print(json.dumps(row), flush=True)
        return
    sys.exit(table([sys.executable, __file__, "--worker", *sys.argv[1:]]))


def table(command: list[str]) -> int:
    """Prints the table of what two processes with this command find; their highest exit code."""
    print(f"| {' | '.join(TITLES)} |")
    print(f"|{' --- |' * len(TITLES)}")
    workers = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, bufsize=1) for _ in range(2)
    ]
    try:
        for said in zip_longest(*(worker.stdout or [] for worker in workers)):
            rows = [json.loads(one) for one in said if one]
            for worker, one in zip(workers, said, strict=True):
                if one is None:  # the other one goes on, and its rows say what is missing
                    rows[0]["error"] = f"a process has ended with exit code {worker.wait()}"
            print(line(rows), flush=True)
        return max(abs(worker.wait()) for worker in workers)
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()


if __name__ == "__main__":
    main()

"""What XLA makes of multitower's programs for a GPU, seen on a machine without one.

The programs of a step with `towers=8` are compiled for H100s, from shapes (see gpu_compiler.py):

- kernels: of small models around one kernel each (those of gpu_bits.py). "Order" counts atomic
  instructions whose result depends on which thread comes first: with one, two runs may differ.
  "Loops" are loops that XLA puts in place of a kernel, with their trips. "Default" is the step
  written by hand, compiled as JAX compiles it.
- operations: of single ones, with the option of same-bits steps, xla_gpu_deterministic_ops.
- reductions: which collectives the program that adds up over devices has, and what its kernels do
  with floats.
- steps and plans: of models that fill a GPU, in gpu_compiled_models.py.

    pip install --no-deps --target cuda jax-cuda13-plugin==VERSION jax-cuda13-pjrt==VERSION
    PYTHONPATH=src:cuda python benchmarks/gpu_compiled.py [PART ...] [--only sort,embedding]

VERSION is that of JAX.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import gpu_compiler
import numpy as np
from gpu_compiled_models import plans, steps
from gpu_compiler import in_words

TOWERS, DEVICES = 8, 2


def texts_of(work: Any, gpus: list[Any], dtype: Any) -> list[list[str]]:
    """Of each program of a step with towers its text on every GPU; no tower's, where they meet."""
    import jax
    import optax

    from multitower.planning.shapes import planned

    rng = jax.random.key(0) if "rng" in work.losses.__code__.co_varnames else None
    step = gpu_compiler.step_parts(work.losses, optax.adam(1e-2), dtype)
    given = planned(step, work.params, work.batch, model_state=None, rng=rng)
    programs = gpu_compiler.same_bits(given, gpus, TOWERS)
    found = [programs.add, programs.finish]
    if isinstance(programs.tower, list):
        found.append(programs.tower)
    # Without what says where an operation comes from.
    bare = lambda text: re.sub(r", metadata=\{[^}]*\}", "", text)
    return [[bare(one.as_text()) for one in each] for each in found if each]


def by_hand(work: Any, gpu: Any, dtype: Any) -> str:
    """The text of the step as one writes it by hand, compiled as JAX compiles it."""
    import jax
    import optax

    optimizer = optax.adam(1e-2)

    def update(params: Any, opt_state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            if dtype is not None:
                params = jax.tree.map(lambda x: x.astype(dtype), params)
            return work.losses(params, batch).mean()

        updates, opt_state = optimizer.update(jax.grad(mean)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    given = (work.params, jax.eval_shape(optimizer.init, work.params), work.batch)
    return text_of(update, given, gpu)


def text_of(fn: Callable[..., Any], given: Sequence[Any], gpu: Any, **options: bool) -> str:
    """The text of a function's program, of arguments with these shapes."""
    import jax
    from jax.sharding import SingleDeviceSharding

    there = SingleDeviceSharding(gpu)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), given)
    traced = jax.jit(fn, compiler_options=options).trace(*shapes)
    return traced.lower(lowering_platforms=("cuda",)).compile().as_text()


def loops_of(text: str) -> str:
    """Trips of the loops in a program."""
    loops = re.findall(r" while\(.*", text)
    trips = [re.search(r"known_trip_count\":\{\"n\":\"(\d+)", loop) for loop in loops]
    return ", ".join(f"{int(known[1]):,}" if known else "unknown" for known in trips) or "-"


def calls_of(text: str) -> str:
    """Calls of NVIDIA's libraries."""
    return in_words(Counter(re.findall(r'custom_call_target="__(\w+)', text)))


def kernels(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each kernel."""
    import jax.numpy as jnp
    from gpu_bits import works

    gpus = gpu_compiler.described_gpus(DEVICES)
    yield "| kernel | default: order | loops | same bits: order | loops | libraries | GPUs |"
    yield "| --- | --- | --- | --- | --- | --- | --- |"
    for name, work in works(small=False).items():
        for title, dtype in (("float32", None), ("bfloat16", jnp.bfloat16)):
            if only and name not in only:
                continue
            default = ["", ""]
            if name not in ("dropout", "mean over towers"):  # what they need is the library's
                gpu_compiler.forget(folder)
                text = by_hand(work, gpus[0], dtype)
                default = [in_words(gpu_compiler.order_dependent(folder)), loops_of(text)]
            gpu_compiler.forget(folder)
            texts = texts_of(work, gpus, dtype)
            order = in_words(gpu_compiler.order_dependent(folder))
            one = "\n".join(of_gpus[0] for of_gpus in texts)
            same = "same" if all(len(set(of_gpus)) == 1 for of_gpus in texts) else "differ"
            cells = [f"{name}, {title}", *default, order, loops_of(one), calls_of(one), same]
            yield f"| {' | '.join(cells)} |"


def operations(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each operation, on 100 numbers or 100 rows of 8; indices are int32 if not said."""
    import jax
    import jax.numpy as jnp
    import optax

    def gradient(fn: Callable[..., Any]) -> Callable[..., Any]:
        return jax.grad(lambda x, *rest: jnp.square(fn(x, *rest)).sum())

    row, table = np.ones(100, "f"), np.ones((100, 8), "f")
    of = lambda dtype: np.ones(100, dtype)
    labels = optax.softmax_cross_entropy_with_integer_labels
    found: dict[str, tuple[Callable[..., Any], tuple[Any, ...]]] = {
        "gradient of x[i]": (gradient(lambda x, i: x[i]), (table, of("i4"))),
        "gradient of x[i], uint16": (gradient(lambda x, i: x[i]), (table, of("u2"))),
        "gradient of take(x, i)": (gradient(lambda x, i: jnp.take(x, i, 0)), (table, of("i4"))),
        "gradient of take(x, i), uint16": (
            gradient(lambda x, i: jnp.take(x, i, 0)),
            (table, of("u2")),
        ),
        "segment_sum": (lambda x, i: jax.ops.segment_sum(x, i, 10), (table, of("i4"))),
        "x.at[i].add": (lambda x, i: jnp.zeros_like(x).at[i].add(x), (table, of("i4"))),
        "x.at[i].multiply": (lambda x, i: jnp.ones_like(x).at[i].multiply(x), (table, of("i4"))),
        "x.at[i].max": (lambda x, i: jnp.zeros_like(x).at[i].max(x), (table, of("i4"))),
        "bincount": (lambda i: jnp.bincount(i, length=10), (of("i4"),)),
        "gradient of cross-entropy": (gradient(labels), (table, of("i4"))),
        "gradient of sort": (gradient(jnp.sort), (row,)),
        "gradient of take_along_axis(x, argsort(x))": (
            gradient(lambda x: jnp.take_along_axis(x, jnp.argsort(x), 0)),
            (row,),
        ),
        "gradient of median": (gradient(jnp.median), (row,)),
        "gradient of quantile": (gradient(lambda x: jnp.quantile(x, 0.9)), (row,)),
        "gradient of top_k": (gradient(lambda x: jax.lax.top_k(x, 5)[0]), (row,)),
        "gradient of cumsum": (gradient(jnp.cumsum), (row,)),
        "sum": (jnp.sum, (np.ones((4096, 4096), "f"),)),
    }
    (gpu,) = gpu_compiler.described_gpus(1)
    yield "| operation | default: order | loops | deterministic: order | loops |"
    yield "| --- | --- | --- | --- | --- |"
    for name, (fn, given) in found.items():
        if only and name not in only:
            continue
        cells = [name]
        for options in ({}, {"xla_gpu_deterministic_ops": True}):
            gpu_compiler.forget(folder)
            text = text_of(fn, given, gpu, **options)
            cells += [in_words(gpu_compiler.order_dependent(folder)), loops_of(text)]
        yield f"| {' | '.join(cells)} |"


def reductions(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each number of GPUs: eight towers of 100,000 and of 1,000 numbers."""
    import jax

    from multitower.engines.reduction import make_reduction, plan
    from multitower.towers.placement import contiguous

    yield "| GPUs | parts | numbers | collectives | floats in kernels |"
    yield "| --- | --- | --- | --- | --- |"
    for count in (2, 3, 5, 8):
        placement = contiguous(gpu_compiler.described_gpus(count), TOWERS)
        parts = plan(placement).num_parts
        for size in (1_000, 100_000):
            gpu_compiler.forget(folder)
            shape = jax.ShapeDtypeStruct((count * size,), np.float32, sharding=placement.split)
            lowered = make_reduction(placement).lower([[shape]] * parts, [[]] * parts)
            text = lowered.compile().as_text()
            sent = in_words(gpu_compiler.collectives_of(text))
            floats = in_words(gpu_compiler.float_operations(folder))
            yield f"| {count} | {parts} | {size:,} | {sent} | {floats} |"


PARTS: dict[str, Callable[[Path, list[str]], Iterator[str]]] = {
    "kernels": kernels,
    "operations": operations,
    "reductions": reductions,
    "steps": steps,
    "plans": plans,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=[], choices=[*PARTS, []], metavar="PART")
    parser.add_argument("--only", default="", help="rows, by their first cell")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        gpu_compiler.start(Path(folder))
        import jax

        import multitower as mt

        mt.configure(simulated_devices=TOWERS)
        print(f"{gpu_compiler.described_gpus(1)[0].device_kind}, JAX {jax.__version__}")
        for part in options.parts or PARTS:
            print(f"\n{part}:\n", flush=True)
            for line in PARTS[part](Path(folder), list(filter(None, options.only.split(",")))):
                print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main())

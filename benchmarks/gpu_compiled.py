"""What XLA makes of multitower's programs for a GPU, seen on a machine without one.

The programs of a step with `towers=8` are compiled for H100s, from shapes (see gpu_compiler.py):

- kernels: of small models around one kernel each (those of gpu_bits.py). "Order" counts atomic
  instructions whose result depends on which thread comes first: with one, two runs may differ.
  "Loops" are loops that XLA puts in place of a kernel, with their trips. "Default" is the step
  written by hand, compiled as JAX compiles it.
- operations: of single ones, with the option of same-bits steps, xla_gpu_deterministic_ops.
- reductions: which collectives the program that adds up over devices has, and what its kernels do
  with floats.
- plans: what `mt.plan` says, compiled for CPUs and compiled for H100s.

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

TOWERS, DEVICES = 8, 2
COLLECTIVES = ("all-to-all", "all-gather", "all-reduce", "reduce-scatter", "collective-permute")


class Compiled:
    """The programs of a step with towers, for described GPUs."""

    def __init__(self, work: Any, gpus: list[Any], dtype: Any) -> None:
        from dataclasses import replace

        import jax
        import optax

        from multitower.engines.job import Shared
        from multitower.engines.same_bits import SameBits
        from multitower.planning.shapes import planned, row_shapes
        from multitower.steps.job import make_job
        from multitower.steps.loss import LossFunction
        from multitower.steps.parts import StepParts
        from multitower.steps.state.bundles import bundled, bundled_job
        from multitower.towers.placement import contiguous

        loss = replace(LossFunction.of(work.losses), compute_dtype=dtype)
        step = StepParts(loss, optax.adam(1e-2), None, "mean", False, False, None, "mean")
        rng = jax.random.key(0) if "rng" in work.losses.__code__.co_varnames else None
        given = planned(step, work.params, work.batch, model_state=None, rng=rng)
        tower_rows = -(-given.batch.num_rows // TOWERS)
        job = bundled_job(make_job(given.step, given.batch.split, tower_rows, TOWERS))
        (state,) = jax.eval_shape(bundled, [given.fields])
        engine = SameBits(job, contiguous(gpus, TOWERS))
        rows = row_shapes(given.batch, tower_rows)
        self.programs = engine._compile(Shared(state, given.batch.shared), rows)

    def texts(self) -> list[list[str]]:
        """Of each program its text on every GPU; where towers meet, the update's alone."""
        found = [self.programs.add, self.programs.finish]
        if isinstance(self.programs.tower, list):
            found.append(self.programs.tower)
        return [[_bare(one.as_text()) for one in programs] for programs in found if programs]


def _bare(text: str) -> str:
    """The text without what says where it comes from."""
    return re.sub(r", metadata=\{[^}]*\}", "", text)


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
    found = re.findall(r" while\(.*?known_trip_count\":\{\"n\":\"(\d+)", text)
    return ", ".join(f"{int(trips):,}" for trips in found) or "-"


def calls_of(text: str) -> str:
    """Calls of NVIDIA's libraries."""
    found = Counter(re.findall(r'custom_call_target="__(\w+)', text))
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "-"


def in_words(found: Counter[str]) -> str:
    """Counted instructions."""
    return ", ".join(f"{count} {name}" for name, count in sorted(found.items())) or "-"


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
            texts = Compiled(work, gpus, dtype).texts()
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
            sent = Counter(re.findall(rf" ({'|'.join(COLLECTIVES)})(?:-start)?\(", text))
            floats = in_words(gpu_compiler.float_operations(folder))
            yield f"| {count} | {parts} | {size:,} | {in_words(sent)} | {floats} |"


def plans(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each layout of each model."""
    from gpu_models import resnet50, transformer
    from gpu_steps import lenet

    import multitower as mt

    gpus = gpu_compiler.described_gpus(TOWERS)
    yield "| model | layout | for CPUs | for H100s | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for make in (lenet, transformer, resnet50):
        model = make(small=False)
        if only and model.name not in only:
            continue
        here = planned_bytes(model)
        with gpu_compiler.in_place_of_devices(gpus):
            assert mt.devices()[0].platform != "cpu"
            there = planned_bytes(model)
        for layout, num_bytes in here.items():
            found = there.get(layout)
            cells = [f"{num_bytes / 2**30:.2f} GiB", "-", "-"]
            if found is not None:
                cells[1:] = [f"{found / 2**30:.2f} GiB", f"{found / num_bytes:.2f}"]
            yield f"| {model.name} | {layout} | {' | '.join(cells)} |"


def planned_bytes(model: Any) -> dict[str, int]:
    """The bytes of a device in each layout for eight of them."""
    import jax
    import optax

    import multitower as mt

    def losses(params: Any, batch: Any) -> Any:
        return model.loss(params, None, batch)[0]

    def losses_and_state(params: Any, batch: Any, *, model_state: Any) -> Any:
        values, new = model.loss(params, model_state, batch)
        return values, {}, new

    shapes = lambda tree: jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)
    batch = jax.eval_shape(lambda: jax.tree.map(jax.numpy.asarray, model.batch(1)))
    rows = model.rows * TOWERS
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype), batch)
    found = mt.plan(
        losses if model.state is None else losses_and_state,
        optax.adam(1e-4),
        shapes(model.params),
        batch,
        devices=TOWERS,
        towers=TOWERS,
        model_state=None if model.state is None else shapes(model.state),
    )
    return {
        ", ".join(f"{k}={v}" for k, v in one.options.items() if k != "devices") or "no option": (
            one.total_bytes
        )
        for one in found.layouts
        if "stages" not in one.options
    }


PARTS: dict[str, Callable[[Path, list[str]], Iterator[str]]] = {
    "kernels": kernels,
    "operations": operations,
    "reductions": reductions,
    "plans": plans,
}


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("parts", nargs="*", default=list(PARTS), choices=[*PARTS, []])
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

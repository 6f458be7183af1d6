"""The steps and plans of gpu_compiled.py: models that fill a GPU, compiled for eight of them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gpu_compiler
import numpy as np
from gpu_compiler import collectives_of, in_words, num_kernels

DEVICES = 8


def steps(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each way to make a step: how many kernels it starts, what it sends, its memory."""
    import optax

    from multitower.planning.shapes import planned

    gpus = gpu_compiler.described_gpus(DEVICES)
    optimizer = optax.adam(1e-4)
    yield "| model | step | kernels | sent | memory |"
    yield "| --- | --- | --- | --- | --- |"
    for name, model in models(only):
        step = gpu_compiler.step_parts(loss_of(model), optimizer)
        with gpu_compiler.in_place_of_devices(gpus):
            given = planned(step, *shapes_of(model), model_state=state_of(model), rng=None)
            ways = {
                "hand-written": [hand_written(model, optimizer, gpus)],
                "fast": [fast(given, gpus, model.rows)],
            }
        programs = gpu_compiler.same_bits(given, gpus[:1], DEVICES)
        ways["same bits, a tower"] = programs.tower
        ways["same bits, the update"] = programs.finish
        for way, (program,) in ways.items():
            text, memory = program.as_text(), program.memory_analysis()
            needed = memory.temp_size_in_bytes + memory.output_size_in_bytes
            cells = [name, way, str(num_kernels(text)), in_words(collectives_of(text))]
            num_bytes = needed - memory.alias_size_in_bytes
            yield f"| {' | '.join(cells)} | {num_bytes / 2**30:.2f} GiB |"


def hand_written(model: Any, optimizer: Any, gpus: list[Any]) -> Any:
    """`jit(shard_map(... pmean ...))`."""
    import jax
    from gpu_steps import by_hand
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(gpus), ("d",))
    whole, split = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("d",)))
    params, batch = shapes_of(model)
    first = (params, jax.eval_shape(optimizer.init, params), state_of(model))
    step = jax.jit(by_hand(model, optimizer, mesh), donate_argnums=(0, 1, 2))
    return step.lower(*_on(whole, first), _on(split, batch)).compile()


def fast(given: Any, gpus: list[Any], rows: int) -> Any:
    """`mt.train_step` without towers."""
    import jax

    from multitower.steps.runner import fast_step
    from multitower.towers.leaves import row_shapes
    from multitower.towers.placement import contiguous

    placement = contiguous(gpus, len(gpus))
    step = fast_step(given.step, given.batch.split, rows, placement, has_weights=False)
    whole, split = placement.shared, placement.split
    count = jax.ShapeDtypeStruct((), np.int32)
    batch = row_shapes(given.batch.rows, rows * len(gpus))
    shapes = [_on(whole, given.fields), _on(whole, given.batch.shared), _on(split, batch)]
    return jax.jit(step, donate_argnums=0).lower(*shapes, _on(whole, count)).compile()


def plans(folder: Path, only: list[str]) -> Iterator[str]:
    """A line for each layout of each model."""
    gpus = gpu_compiler.described_gpus(DEVICES)
    yield "| model | layout | for CPUs | for H100s | ratio |"
    yield "| --- | --- | --- | --- | --- |"
    for name, model in models(only):
        here = planned_bytes(model)
        with gpu_compiler.in_place_of_devices(gpus):
            there = planned_bytes(model)
        for layout, num_bytes in here.items():
            cells = [f"{size / 2**30:.2f} GiB" for size in (num_bytes, there[layout])]
            yield f"| {name} | {layout} | {' | '.join(cells)} | {there[layout] / num_bytes:.2f} |"


def planned_bytes(model: Any) -> dict[str, int]:
    """The bytes of a device in each layout without stages."""
    import optax

    import multitower as mt

    found = mt.plan(
        loss_of(model),
        optax.adam(1e-4),
        *shapes_of(model),
        devices=DEVICES,
        towers=DEVICES,
        model_state=state_of(model),
    )
    named = lambda options: ", ".join(f"{k}={v}" for k, v in options.items() if k != "devices")
    return {
        named(one.options) or "no option": one.total_bytes
        for one in found.layouts
        if "stages" not in one.options
    }


def models(only: list[str]) -> Iterator[tuple[str, Any]]:
    """Those of gpu_steps.py, by the first word of their names."""
    from gpu_models import resnet50, transformer
    from gpu_steps import lenet

    for make in (lenet, transformer, resnet50):
        model = make(small=False)
        name = model.name.partition(",")[0]
        if not only or name in only:
            yield name, model


def loss_of(model: Any) -> Callable[..., Any]:
    """Its loss as `mt.train_step` takes it."""

    def losses(params: Any, batch: Any) -> Any:
        return model.loss(params, None, batch)[0]

    def losses_and_state(params: Any, batch: Any, *, model_state: Any) -> Any:
        values, new = model.loss(params, model_state, batch)
        return values, {}, new

    return losses if model.state is None else losses_and_state


def shapes_of(model: Any) -> tuple[Any, Any]:
    """Of the parameters, and of a batch for all devices."""
    import jax

    rows = model.rows * DEVICES
    many = lambda x: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype)
    return _shapes(model.params), jax.tree.map(many, model.batch(1))


def state_of(model: Any) -> Any:
    """Shapes of its running statistics, or None."""
    return None if model.state is None else _shapes(model.state)


def _shapes(tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def _on(there: Any, tree: Any) -> Any:
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=there), tree)

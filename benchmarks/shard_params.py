"""What a step with shards costs and takes, against the same step written by hand.

The hand-written step is `jax.jit` over arrays with the same `NamedSharding`: the batch is split by
rows, parameters (or only the optimizer's state) over the devices, gradients and new parameters are
constrained to the same parts, and XLA puts in the exchanges. Both take turns in one process; what
counts is the ratio within a round. Bytes are those of the compiled programs, on each device.

On simulated devices this says what the library adds to a step, never how fast several devices are,
and XLA's CPU compiler orders and joins exchanges otherwise than that of GPUs.

    python benchmarks/shard_params.py [--devices 4] [--rounds 15] [--steps 4] [--layers 8]
"""

import argparse
import itertools
import math
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import multitower as mt

WAYS = ("shard_params", "shard_update")
FORMS = ("list", "scan")
WIDTH, WORDS, ROWS = 256, 1024, 512
COLLECTIVE = re.compile(
    r"= (\S+|\(.*?\)) (all-gather|reduce-scatter|all-reduce|all-to-all)(?:-start)?\("
)


def make_model(form: str, num_layers: int) -> tuple[Any, Callable[[Any, Any], Any], Any]:
    """Parameters, losses and a batch: words, residual blocks, and a product with all words."""
    import jax
    import jax.numpy as jnp
    import numpy as np

    draw = np.random.default_rng(0)
    normal = lambda *shape: (draw.normal(size=shape) / shape[0] ** 0.5).astype(np.float32)
    layers: Any = [
        {"in": normal(WIDTH, 4 * WIDTH), "out": normal(4 * WIDTH, WIDTH), "scale": np.ones(WIDTH)}
        for _ in range(num_layers)
    ]
    if form == "scan":
        layers = jax.tree.map(lambda *each: np.stack(each), *layers)
    layers = jax.tree.map(lambda leaf: leaf.astype(np.float32), layers)
    params = {"words": normal(WORDS, WIDTH), "layers": layers, "head": normal(WIDTH, WORDS)}

    def block(h: Any, layer: Any) -> Any:
        return h + jnp.tanh((h * layer["scale"]) @ layer["in"]) @ layer["out"]

    def losses(params: Any, batch: Any) -> Any:
        h = params["words"][batch["word"]]
        if form == "scan":
            h, _ = jax.lax.scan(lambda h, layer: (block(h, layer), None), h, params["layers"])
        else:
            for layer in params["layers"]:
                h = block(h, layer)
        logits = h @ params["head"]
        right = jnp.take_along_axis(logits, batch["next"][:, None], 1)[:, 0]
        return jax.nn.logsumexp(logits, axis=1) - right

    words = draw.integers(0, WORDS, (2, ROWS)).astype(np.int32)
    return params, losses, {"word": words[0], "next": words[1]}


def hand_written(
    losses: Any, optimizer: Any, state: Any, split: Any, batch: Any
) -> tuple[Any, Callable[[int], None]]:
    """The compiled step that a careful user would write, and what makes steps with it."""
    import jax
    import jax.numpy as jnp
    import optax

    params, opt_state = jax.tree.map(jnp.copy, (state.params, state.opt_state))
    there = jax.tree.map(lambda leaf: leaf.sharding, (params, opt_state))

    def step(params: Any, opt_state: Any, batch: Any) -> Any:
        loss, gradients = jax.value_and_grad(lambda params: losses(params, batch).mean())(params)
        gradients = jax.lax.with_sharding_constraint(gradients, split)
        own = jax.lax.with_sharding_constraint(params, split)
        updates, opt_state = optimizer.update(gradients, opt_state, own)
        params = jax.lax.with_sharding_constraint(optax.apply_updates(own, updates), split)
        return params, opt_state, loss

    program = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*there, None))
    compiled = program.lower(params, opt_state, batch).compile()

    def run(num_steps: int) -> None:
        nonlocal params, opt_state
        loss = None
        for _ in range(num_steps):
            params, opt_state, loss = compiled(params, opt_state, batch)
        jax.block_until_ready((params, opt_state, loss))

    return compiled, run


def with_multitower(step: Any, state: Any, batch: Any) -> tuple[Any, Callable[[int], None]]:
    """The same through the library."""
    import jax

    state, _ = step(state, batch)
    (runner,) = step._makers.newest.runners.values()
    fields = state.kept.fields()
    rows = jax.tree.leaves(batch)
    lowered = runner.program(fields).lower(fields, [], rows, runner._feeder._count(ROWS))

    def run(num_steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(num_steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state, metrics))

    return lowered.compile(), run


def facts(compiled: Any) -> str:
    """Megabytes that one device needs, and the exchanges of a step with megabytes of results."""
    memory = compiled.memory_analysis()
    new = memory.output_size_in_bytes - memory.alias_size_in_bytes
    need = memory.argument_size_in_bytes + memory.temp_size_in_bytes + new
    sent: dict[str, float] = {}
    for shapes, name in COLLECTIVE.findall(compiled.as_text()):
        for dims in re.findall(r"\w+\[([\d,]*)\]", shapes):
            size = 4 * math.prod(int(n) for n in dims.split(",") if n)
            sent[name] = sent.get(name, 0) + size / 1e6
    exchanges = ", ".join(f"{name} {size:.1f}" for name, size in sorted(sent.items()))
    return f"{need / 1e6:.1f} | {memory.temp_size_in_bytes / 1e6:.1f} | {exchanges}"


def compare(form: str, way: str, args: argparse.Namespace) -> list[str]:
    """Two rows of the table."""
    import optax

    from multitower.towers.leaf_shards import shardings_of

    params, losses, batch = make_model(form, args.layers)
    optimizer = optax.adam(1e-4)
    step = mt.train_step(losses, optimizer, devices=args.devices, **{way: True})
    state = step.init(params)
    batch = mt.shard(batch, devices=args.devices)
    split = shardings_of(params, step.placement)
    made = {
        "hand-written": hand_written(losses, optimizer, state, split, batch),
        "multitower": with_multitower(step, state, batch),
    }
    times: dict[str, list[float]] = {name: [] for name in made}
    for _, run in made.values():
        run(2)
    for number in range(args.rounds):
        for name in list(made)[:: 1 if number % 2 else -1]:
            start = time.perf_counter()
            made[name][1](args.steps)
            times[name].append((time.perf_counter() - start) / args.steps * 1e3)
    rows: list[str] = []
    for name, values in times.items():
        ratios = [a / b for a, b in zip(values, times["hand-written"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        rows.append(
            f"| {way}, {form} | {name} | {statistics.median(values):.1f} | {middle:.2f} | "
            f"{low:.2f}-{high:.2f} | {facts(made[name][0])} |"
        )
    return rows


def main() -> None:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--devices", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--layers", type=int, default=8)
    args = parser.parse_args()
    mt.configure(simulated_devices=args.devices)
    import jax

    print(f"JAX {jax.__version__}, {args.devices} devices, {args.layers} layers", flush=True)
    print(
        "| what | contender | ms/step | ratio | quartiles | MB a device | temporary | exchanges |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- | --- |", flush=True)
    for way, form in itertools.product(WAYS, FORMS):
        print("\n".join(compare(form, way, args)), flush=True)


if __name__ == "__main__":
    main()

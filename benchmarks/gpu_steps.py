"""Steps that fill a GPU: multitower against hand-written JAX, Keras on JAX, compiled PyTorch.

LeNet-5, a 124M-parameter transformer and ResNet-50, the last two in bfloat16, with Adam, on all
devices. JAX's contenders take turns in one process; with `--peers`, PyTorch and Keras run each
model in processes of their own, on one device, afterwards. "deterministic" is the hand-written step
compiled with xla_gpu_deterministic_ops, as same-bits steps are. That leaves out kernels that do not
repeat themselves, and takes the first that fits, without trying which is the fastest; "tuned", if
it is asked for, leaves out the same kernels and tries the others. What they cost is what repeatable
kernels cost. A contender whose step takes longer than two seconds is left out. The matrix rate is
the fastest bfloat16 matrix product measured here; a step's share of it is counted from the
floating-point operations of the forward pass, three times.

    python benchmarks/gpu_steps.py [--small] [--peers torch,keras] [--rounds 7] [--steps 10]
                                   [--json FILE]

`--small` runs small models of the same structure on simulated devices, to test the program.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import multitower as mt

Run = Callable[[int], None]
CHILD_LIMIT_S = 120.0
PEERS = {"torch": "PyTorch, compiled", "keras": "Keras on JAX"}
STEP_LIMIT_S = 2.0
# A version of XLA may make a deterministic scatter-add, such as the gradient of ResNet-50's max
# pooling, a loop with one trip per index: minutes for a step, which nothing can stop. (Those of JAX
# 0.10.2 and 0.12.0 do not, see gpu_compiled.py.) So these contenders first make a step with a
# fraction of the rows.
DETERMINISTIC, FEWER = ("deterministic", "tuned", "same bits"), 64
REPEATABLE = "xla_gpu_deterministic_ops"
REPEATABLE_TUNED = "xla_gpu_exclude_nondeterministic_ops"
NOMINAL_TFLOPS = {"H100": 989, "H200": 989, "A100": 312, "L4": 121, "B200": 2250}  # dense bfloat16


def by_hand(model: Any, optimizer: Any, mesh: Any) -> Callable[..., Any]:
    """A step as `shard_map(... pmean ...)`, over a mesh whose axis is "d", to be jitted."""
    import jax
    import optax
    from jax.sharding import PartitionSpec

    split, whole = PartitionSpec("d"), PartitionSpec()

    def on_device(params: Any, opt_state: Any, state: Any, batch: Any) -> Any:
        def mean(params: Any) -> Any:
            losses, new = model.loss(params, state, batch)
            return losses.mean(), new

        (loss, state), grads = jax.value_and_grad(mean, has_aux=True)(params)
        loss, state, grads = jax.lax.pmean((loss, state, grads), "d")
        updates, opt_state = optimizer.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, loss

    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(whole, whole, whole, split),
        out_specs=whole,
        check_vma=False,
    )


def hand_written(model: Any, num_devices: int, option: str = "") -> Run:
    """`jit(shard_map(... pmean ...))`, or plain `jit` on one device; compiled with an option."""
    import jax
    import numpy as np
    import optax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(mt.devices(num_devices)), ("d",))
    split, whole = PartitionSpec("d"), PartitionSpec()
    optimizer = optax.adam(1e-4)
    mapped = by_hand(model, optimizer, mesh)
    # It means nothing to a CPU, which then need not compile the step once more.
    options = {option: True} if option and mt.devices()[0].platform != "cpu" else None
    step = jax.jit(mapped, donate_argnums=(0, 1, 2), compiler_options=options)
    first = (model.params, optimizer.init(model.params), model.state)
    held = jax.device_put(
        jax.tree.map(lambda x: jax.numpy.array(x, jax.numpy.asarray(x).dtype), first),
        NamedSharding(mesh, whole),
    )
    batch = jax.device_put(model.batch(model.rows * num_devices), NamedSharding(mesh, split))

    def run(num_steps: int) -> None:
        nonlocal held
        loss = None
        for _ in range(num_steps):
            *held, loss = step(*held, batch)
        jax.block_until_ready((held, loss))

    return run


def with_multitower(model: Any, num_devices: int, towers: int | None) -> Run:
    """The same through the library."""
    import jax
    import optax

    def losses(params: Any, batch: Any) -> Any:
        return model.loss(params, None, batch)[0]

    def losses_and_state(params: Any, batch: Any, *, model_state: Any) -> Any:
        values, new = model.loss(params, model_state, batch)
        return values, {}, new

    fn = losses if model.state is None else losses_and_state
    step = mt.train_step(fn, optax.adam(1e-4), devices=num_devices, towers=towers)
    state = step.init(model.params, model_state=model.state)
    batch = mt.shard(model.batch(model.rows * num_devices), devices=num_devices, towers=towers)

    def run(num_steps: int) -> None:
        nonlocal state
        metrics = None
        for _ in range(num_steps):
            state, metrics = step(state, batch)
        jax.block_until_ready((state.kept.parts(), metrics))

    return run


def lenet(*, small: bool) -> Any:
    """LeNet-5 as shipped, float32, on 28x28 images."""
    import jax
    import numpy as np
    from gpu_models import Model, cross_entropy

    from multitower.recipes.networks import lenet5

    def loss(params: Any, state: Any, batch: Any) -> Any:
        return cross_entropy(lenet5.logits(params, batch["x"]), batch["y"]), state

    def batch(rows: int) -> Any:
        images = np.random.default_rng(1).normal(size=(rows, 28, 28, 1)).astype("f")
        return {"x": images, "y": np.arange(rows, dtype=np.int32) % 10}

    params = lenet5.init(jax.random.key(0))
    return Model("LeNet-5", params, None, loss, batch, 8 if small else 1024, ("images", 1))


def matrix_rate(*, small: bool) -> float:
    """Operations per second of a bfloat16 matrix product on the first device, the best of ten."""
    import jax
    import jax.numpy as jnp

    size, repeats = (128, 2) if small else (8192, 20)
    # Random numbers: with zeros or ones a GPU takes less power, and is faster than in a model.
    matrix = jax.random.normal(jax.random.key(0), (size, size), jnp.bfloat16)
    matrix = jax.device_put(matrix, mt.devices(1)[0])
    product = jax.jit(lambda a, b: a @ b)
    jax.block_until_ready(product(matrix, matrix))
    best = float("inf")
    for _ in range(10):
        start = time.perf_counter()
        for _ in range(repeats):
            result = product(matrix, matrix)
        jax.block_until_ready(result)
        best = min(best, (time.perf_counter() - start) / repeats)
    return 2 * size**3 / best


def operations(model: Any) -> float | None:
    """Floating-point operations of one step on one device: the forward pass, three times.

    They are counted in the program that is lowered for the host's CPU: JAX does not count them for
    a GPU. None where it cannot count them at all.
    """
    import jax

    loss = model.unrolled or model.loss
    try:
        with jax.default_device(jax.local_devices(backend="cpu")[0]):
            lowered = jax.jit(lambda p, s, b: loss(p, s, b)[0]).lower(
                model.params, model.state, model.batch(model.rows)
            )
            costs = lowered.cost_analysis()
    except Exception:  # a column less, not the table
        return None
    costs = costs[0] if isinstance(costs, list) else costs or {}
    return 3 * float(costs["flops"]) if costs.get("flops") else None


def trial(make: Callable[[Any], Run], model: Any) -> float:
    """Seconds that a step may take, from one with few rows: see `DETERMINISTIC`."""
    few = replace(model, rows=model.rows // FEWER)
    run = make(few)
    run(1)
    start = time.perf_counter()
    run(1)
    return (time.perf_counter() - start) * model.rows / few.rows


def started(name: str, make: Callable[[Any], Run], model: Any, *, untried: bool) -> Run:
    """A contender that has made two steps.

    Raises:
        TimeoutError: a step takes longer than the limit.
    """
    if name in DETERMINISTIC and not untried and model.rows >= FEWER:
        _refuse(trial(make, model), f"by a step with 1/{FEWER} of the rows")
    run = make(model)
    run(1)
    start = time.perf_counter()
    run(1)
    _refuse(time.perf_counter() - start, "measured once")
    return run


def _refuse(step_s: float, how: str) -> None:
    if step_s > STEP_LIMIT_S:
        raise TimeoutError(f"left out: a step takes {step_s:.1f} s, {how}")


def measure(
    contenders: dict[str, Callable[[Any], Run]],
    model: Any,
    rounds: int,
    steps: int,
    *,
    untried: bool = False,
) -> dict[str, Any]:
    """Milliseconds per step of each round, or the error that kept a contender out."""
    runs: dict[str, Run] = {}
    found: dict[str, Any] = {}
    for name, make in contenders.items():
        start = time.perf_counter()
        try:
            runs[name] = started(name, make, model, untried=untried)
        except Exception as error:  # a kernel that a platform lacks costs one row, not the table
            found[name] = {"error": (str(error).splitlines() or [repr(error)])[0][:160]}
            continue
        found[name] = {"ms": [], "start_s": time.perf_counter() - start}
    for number in range(rounds):
        for name in list(runs) if number % 2 == 0 else list(reversed(runs)):
            start = time.perf_counter()
            runs[name](steps)
            found[name]["ms"].append((time.perf_counter() - start) / steps * 1e3)
    return found


def with_peer(peer: str, name: str, options: argparse.Namespace) -> dict[str, Any]:
    """The same model in another library, on one device."""
    command = [sys.executable, str(Path(__file__).parent / f"gpu_{peer}.py"), name]
    command += ["--rounds", str(options.rounds), "--steps", str(options.steps)]
    command += ["--small"] if options.small else []
    return answer(command)


def answer(command: list[str], limit_s: float = CHILD_LIMIT_S) -> dict[str, Any]:
    """The line of JSON that a process of its own prints last, or why there is none."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {limit_s:g} s"}
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"exit code {done.returncode}: {last[:160]}"}
    return json.loads(done.stdout.splitlines()[-1])


def rows_of(
    found: dict[str, Any], model: Any, rate: float, flops: float | None, base: list[float] | None
) -> list[str]:
    """The lines of the table for one model; `base` has the times of the hand-written step."""
    lines = []
    for name, row in found.items():
        if "error" in row:
            lines.append(f"| {model.name} | {name} | {row['error']} | | | | |")
            continue
        median = statistics.median(row["ms"])
        ratio = quartiles = ""
        if base and name not in PEERS.values():
            ratios = [a / b for a, b in zip(row["ms"], base, strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            ratio, quartiles = f"{statistics.median(ratios):.3f}", f"{low:.3f}-{high:.3f}"
        elif base:
            ratio = f"{median / statistics.median(base):.3f}"
        per_s = model.rows * model.unit[1] / median * 1e3
        share = f"{flops / median * 1e3 / rate:.1%}" if flops else "unknown"
        lines.append(
            f"| {model.name} | {name} | {median:.3f} | {ratio} | {quartiles} | "
            f"{per_s:,.0f} {model.unit[0]}/s | {share} |"
        )
    return lines


def main() -> None:
    """Runs all models and prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="small models on two CPU devices")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--only", default="", help="names of models, separated by commas")
    parser.add_argument("--contenders", default="", help="names of ours, separated by commas")
    parser.add_argument("--attention", choices=["cudnn"], help="of the transformer; else XLA's")
    parser.add_argument("--unroll", action="store_true", help="no scan over the transformer")
    parser.add_argument("--untried", action="store_true", help="no step with fewer rows at first")
    parser.add_argument("--peers", default="", help="other libraries: torch,keras")
    parser.add_argument("--json", default="", help="also write the numbers to this file")
    options = parser.parse_args()
    peers = options.peers.split(",") if options.peers else []
    if unknown := set(peers) - set(PEERS):
        parser.error(f"--peers {options.peers}: {unknown.pop()} is none of {', '.join(PEERS)}")
    if options.small:
        mt.configure(simulated_devices=2)
    elif peers:
        mt.configure(preallocate=False)  # leave memory to their processes
    import jax
    from gpu_models import resnet50, transformer

    num_devices = len(mt.devices())
    kind = mt.devices()[0].device_kind
    rate = matrix_rate(small=options.small)
    nominal = next((v for k, v in NOMINAL_TFLOPS.items() if k in kind), None)
    print(f"{num_devices} x {kind}, JAX {jax.__version__}")
    said = f" of {nominal} by its data sheet" if nominal else ""
    print(f"matrix rate: {rate / 1e12:.3g} Tflop/s{said} (bfloat16, one device)\n")
    print("| model | contender | ms/step | ratio | quartiles | a device | of the matrix rate |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    all_contenders: dict[str, Callable[[Any], Run]] = {
        "hand-written": lambda model: hand_written(model, num_devices),
        "deterministic": lambda model: hand_written(model, num_devices, REPEATABLE),
        "tuned": lambda model: hand_written(model, num_devices, REPEATABLE_TUNED),
        "fast": lambda model: with_multitower(model, num_devices, None),
        "same bits": lambda model: with_multitower(model, num_devices, num_devices),
    }
    wanted = (options.contenders or "hand-written,deterministic,fast,same bits").split(",")
    contenders = {name: all_contenders[name] for name in wanted}
    results: dict[str, Any] = {"device": kind, "devices": num_devices, "matrix_flop_per_s": rate}
    makers = {
        "lenet": lenet,
        "transformer": partial(transformer, attention=options.attention, unroll=options.unroll),
        "resnet50": resnet50,
    }
    for key, make in makers.items():
        if options.only and key not in options.only.split(","):
            continue
        model = make(small=options.small)
        flops = operations(model)
        found = measure(contenders, model, options.rounds, options.steps, untried=options.untried)
        base = found.get("hand-written", {}).get("ms")
        print(*rows_of(found, model, rate, flops, base), sep="\n", flush=True)
        for peer in peers:
            row = {PEERS[peer]: with_peer(peer, key, options)}
            print(*rows_of(row, model, rate, flops, base), sep="\n", flush=True)
            found |= row
        results[key] = found
        if options.json:
            Path(options.json).write_text(json.dumps(results, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()

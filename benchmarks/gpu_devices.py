"""Device control on a GPU, and a plan's bytes against those that a step takes.

The first table has a process for each setting of `mt.configure`: the GPUs that it sees, and what
nvidia-smi says is taken at JAX's start, with an array of 1 GiB, and after the array is gone. The
second has a process for each model of `gpu_steps.py`: `mt.plan` against JAX's peak of bytes.

    python benchmarks/gpu_devices.py [--only control] [--small]

`--small` runs on CPU devices, where nothing of memory can be seen, to test the program.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
import warnings
from typing import Any

from gpu_steps import answer

import multitower as mt

SETTINGS: list[dict[str, Any]] = [
    {},
    {"visible_devices": "0"},
    {"memory_fraction": 0.25},
    {"memory_fraction": 0.9},
    {"preallocate": False},
    {"preallocate": False, "memory_fraction": 0.1},
]
MODELS = ("lenet", "transformer", "resnet50")
TOWERS = 4


def taken_mib() -> int | None:
    """What all processes have taken of all GPUs; None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    time.sleep(1)  # a program that has just freed something is shown a moment later
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return sum(int(line) for line in said.split())


def device_control(settings: dict[str, Any], *, small: bool) -> dict[str, Any]:
    """What one process sees with these settings."""
    before = taken_mib()
    mt.configure(**settings)
    import jax.numpy as jnp

    seen = [f"{device.platform}:{device.id}" for device in mt.devices()]
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        soft = mt.devices("gpu:99", soft=True)[0]
    taken = [taken_mib()]
    array = jnp.ones(256 if small else 2**28, jnp.float32).block_until_ready()
    taken.append(taken_mib())
    array.delete()
    taken.append(taken_mib())
    grown = [None if t is None or before is None else t - before for t in taken]
    return {"seen": seen, "taken": grown, "soft": f"{soft.platform}:{soft.id}", "said": len(said)}


def memory(name: str, *, small: bool) -> dict[str, Any]:
    """The bytes of a device in a plan, and the most that JAX's allocator has handed out."""
    import jax
    import optax
    from gpu_models import resnet50, transformer
    from gpu_steps import lenet

    model = {"lenet": lenet, "resnet50": resnet50, "transformer": transformer}[name](small=small)
    batch, optimizer = model.batch(model.rows), optax.adam(1e-4)

    def losses(params: Any, batch: Any, *, model_state: Any) -> Any:
        found, new = model.loss(params, model_state, batch)
        return found, {}, new

    given = {"model_state": model.state or {}}
    step = mt.train_step(losses, optimizer, devices=1, towers=TOWERS)
    state = step.init(model.params, **given)
    placed = mt.shard(batch, devices=1, towers=TOWERS)
    for _ in range(3):
        state, _ = step(state, placed)
    jax.block_until_ready(state.params)
    stats = jax.local_devices()[0].memory_stats() or {}
    peak = stats.get("peak_bytes_in_use")  # before the plan, which compiles other programs
    plan = mt.plan(losses, optimizer, model.params, batch, devices=1, towers=TOWERS, **given)
    (planned,) = [one for one in plan.layouts if one.options.get("towers") == TOWERS][:1]
    return {"name": model.name, "planned": planned.total_bytes, "peak": peak}


def child(words: list[str], options: argparse.Namespace) -> dict[str, Any]:
    """What a process of its own answers, or why it does not."""
    command = [sys.executable, __file__, *(["--small"] if options.small else []), *words]
    return answer(command)


def main() -> None:
    """Prints both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="on CPU devices, to test the program")
    parser.add_argument("--only", choices=["control", "plans"], help="one of the two tables")
    parser.add_argument("--settings", help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.settings:
        print(json.dumps(device_control(json.loads(options.settings), small=options.small)))
        return
    if options.model:
        print(json.dumps(memory(options.model, small=options.small)))
        return
    if options.only != "plans":
        control_table(options)
    if options.only != "control":
        plans_table(options)


def control_table(options: argparse.Namespace) -> None:
    """A line for each setting."""
    print("| mt.configure | devices | MiB at the start | with 1 GiB | after it | gpu:99, soft |")
    print("| --- | --- | --- | --- | --- | --- |")
    for settings in SETTINGS:
        said = ", ".join(f"{name}={value!r}" for name, value in settings.items()) or "(nothing)"
        found = child(["--settings", json.dumps(settings)], options)
        if "error" in found:
            print(f"| {said} | {found['error']} | | | | |", flush=True)
            continue
        taken = " | ".join("-" if mib is None else f"{mib:,}" for mib in found["taken"])
        told = "with a warning" if found["said"] else "without a word"
        row = f"| {said} | {', '.join(found['seen'])} | {taken} | {found['soft']}, {told} |"
        print(row, flush=True)


def plans_table(options: argparse.Namespace) -> None:
    """A line for each model."""
    print(f"\n| model, {TOWERS} towers on one device | planned MiB | peak MiB | planned / peak |")
    print("| --- | --- | --- | --- |")
    for name in MODELS:
        found = child(["--model", name], options)
        if "error" in found:
            print(f"| {name} | {found['error']} | | |", flush=True)
            continue
        planned, peak = found["planned"] / 2**20, (found["peak"] or 0) / 2**20
        row = f"| {found['name']} | {planned:,.1f} | "
        row += f"{peak:,.1f} | {planned / peak:.3f} |" if peak else "- | - |"
        print(row, flush=True)


if __name__ == "__main__":
    main()

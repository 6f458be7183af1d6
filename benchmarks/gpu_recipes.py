"""Same bits of recipes on a GPU: over runs, processes and devices, in three precisions.

Each line is `multitower verify`, started twice: every process trains the recipe twice on one GPU,
and once on all of them where there are several. Many processes share the GPU at a time, so that
times mean nothing here.

    python benchmarks/gpu_recipes.py [--only digits,gpt] [--towers 1,8] [--small]

`--small` runs a tiny recipe on simulated devices, to test the program.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import multitower as mt

RECIPES = {
    "digits": ["digits"],
    "ResNet-20": ["cifar10-resnet20", "--synthetic"],
    "gpt": ["gpt"],
}
# Options of verify, and JAX's precision of float32 products and convolutions.
PRECISIONS: dict[str, tuple[list[str], str]] = {
    "float32": ([], "highest"),
    "TF32": ([], "tensorfloat32"),
    "bfloat16": (["--compute-dtype", "bfloat16"], "highest"),
}
LIMIT_S, SHARE_OF_MEMORY = 240, 0.85


class Case(NamedTuple):
    """One line of the table."""

    recipe: str
    precision: str
    towers: int


def verified(case: Case, words: list[str], share: float) -> dict[str, Any]:
    """What one process of `verify` prints, or why it prints nothing."""
    more, precision = PRECISIONS[case.precision]
    command = [sys.executable, "-m", "multitower", "verify", *words, *more]
    command += ["--towers", str(case.towers), "--json"]
    given = {
        "JAX_DEFAULT_MATMUL_PRECISION": precision,
        "XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}",
    }
    try:
        done = subprocess.run(
            command,
            env=os.environ | given,
            capture_output=True,
            text=True,
            check=False,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"no answer within {LIMIT_S} s"}
    if not done.stdout.startswith("{"):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return {"error": f"exit code {done.returncode}: {last[:160]}"}
    return json.loads(done.stdout)


def line(case: Case, found: Sequence[dict[str, Any]]) -> str:
    """A line of the table, of what each process has found."""
    title = f"| {case.recipe} | {case.precision} | {case.towers} |"
    errors = [one["error"] for one in found if "error" in one]
    if errors:
        return f"{title} {errors[0]} | | |"
    runs = "same" if all(one["same_bits"] for one in found) else "differs"
    last = [one["fingerprints"][0][-1][:12] for one in found]
    equal = all(one["fingerprints"] == found[0]["fingerprints"] for one in found)
    processes = "same" if equal else "differs"
    return f"{title} {runs} | {processes} | {last[0]} |"


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default=",".join(RECIPES), help="recipes, separated by commas")
    parser.add_argument("--precisions", default=",".join(PRECISIONS))
    parser.add_argument("--towers", default="1,2,4,8", help="numbers of them")
    parser.add_argument("--steps", default="3")
    parser.add_argument("--jobs", type=int, default=max(2, (os.cpu_count() or 2) - 2))
    parser.add_argument("--small", action="store_true", help="a tiny recipe on a CPU")
    options = parser.parse_args()
    towers, precisions = options.towers.split(","), options.precisions.split(",")
    mt.configure(preallocate=False)  # the memory is for the others
    count = len(mt.devices())
    where = ["--devices", f"1,1,{count}" if count > 1 else "1,1"]
    recipes = {name: RECIPES[name] for name in options.only.split(",")}
    if options.small:
        where, recipes = ["--simulate", "1,1"], {"own": ["examples/own_recipe/recipe.py"]}
        towers, precisions = ["2"], ["float32"]
    cases = [
        Case(name, precision, int(number))
        for name, precision, number in itertools.product(recipes, precisions, towers)
    ]
    print("| recipe | precision | towers | two runs | two processes | fingerprint |")
    print("| --- | --- | --- | --- | --- | --- |", flush=True)
    started, share = time.perf_counter(), SHARE_OF_MEMORY / options.jobs
    failed = 0
    with ThreadPoolExecutor(options.jobs) as pool:
        asked = [
            [
                pool.submit(
                    verified, case, [*recipes[case.recipe], *where, "--steps", options.steps], share
                )
                for _ in range(2)
            ]
            for case in cases
        ]
        for case, both in zip(cases, asked, strict=True):
            said = line(case, [one.result() for one in both])
            failed += "| same | same |" not in said
            print(said, flush=True)
    print(f"{len(cases) - failed} of {len(cases)} the same, {time.perf_counter() - started:.0f} s")
    sys.exit(min(failed, 1))


if __name__ == "__main__":
    main()

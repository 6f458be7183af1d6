"""How long the first step takes, which compiles; without a compilation cache, and with a full one.

Each first step runs in a process of its own, from `mt.train_step(...)` to the loss. The columns
take turns; the table has medians over rounds.

    python benchmarks/first_step.py [--devices 1 2 8] [--rounds 3] [--real]
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time

from step_overhead import deep, devices_of_all, hand_written, lenet, with_multitower

import multitower as mt

WORKS = {"LeNet-5": lenet, "32 layers": deep}
CONTENDERS = ("hand-written", "fast", "same bits")
TOWERS = 8


def first_step_s(name, contender, num_devices):
    """Seconds of a first step in this process."""
    work = WORKS[name](TOWERS)
    devices = devices_of_all(num_devices)
    began = time.perf_counter()
    if contender == "hand-written":
        run = hand_written(work, devices)
    else:
        run = with_multitower(work, num_devices, TOWERS if contender == "same bits" else None)
    run(1)
    return time.perf_counter() - began


def in_own_process(case, real, cache):
    """Seconds of a first step in a new process, with a compilation cache or none."""
    environment = {k: v for k, v in os.environ.items() if "CACHE" not in k}
    if cache is not None:
        environment["JAX_COMPILATION_CACHE_DIR"] = cache
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    words = [sys.executable, __file__, *["--real"] * real, "--case", *map(str, case)]
    return float(subprocess.check_output(words, env=environment, text=True).split()[-1])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 8])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--real", action="store_true", help="accelerators, not simulated devices")
    parser.add_argument("--case", nargs=3, help="for its own use")
    given = parser.parse_args()
    if given.case:
        name, contender, devices = given.case
        mt.configure(simulated_devices=None if given.real else int(devices))
        print(first_step_s(name, contender, int(devices)))
        return
    print("| work | devices | step | no cache | full cache |\n| --- | --- | --- | --- | --- |")
    for name in WORKS:
        for devices in given.devices:
            for contender in CONTENDERS:
                case = (name, contender, devices)
                with tempfile.TemporaryDirectory() as cache:
                    in_own_process(case, given.real, cache)  # fills it
                    pairs = [
                        [in_own_process(case, given.real, where) for where in (None, cache)]
                        for _ in range(given.rounds)
                    ]
                cold, warm = (statistics.median(pair[n] for pair in pairs) for n in range(2))
                print(f"| {name} | {devices} | {contender} | {cold:.2f} s | {warm:.2f} s |")


if __name__ == "__main__":
    main()

"""What every worker speaks: a line of JSON in, a line of JSON out.

A worker is `python SCRIPT --contender NAME --work NAME --data FILE.npz`. It makes its first step,
says {"losses": [first], "versions": {...}}, and then answers, until its input ends:

    {"do": "losses", "steps": 4}   -> {"losses": [...]}      one loss a step
    {"do": "time", "steps": 10}    -> {"seconds": s}         all of them, to the last result
    {"do": "host", "steps": 10}    -> {"seconds": s | null}  the median until one call returns

This module needs NumPy only, so that it imports in every environment.
"""

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from works import NUM_BATCHES, WORKS, Arrays, Work


@dataclass(frozen=True)
class Task:
    """What the worker was asked to be."""

    contender: str
    work: Work
    weights: Arrays
    batches: list[Arrays]
    data: str


@dataclass(frozen=True)
class Program:
    """A contender, ready to train.

    Attributes:
        call: makes the next step and returns its loss, without waiting where that is possible.
        wait: waits for the step whose loss this is, and returns the loss as a number.
        run: makes so many steps and waits; None for a plain loop over `call`.
        has_host_cost: whether `call` is a step as users write it, so that its return can be timed.
    """

    call: Callable[[], Any]
    wait: Callable[[Any], float]
    run: Callable[[int], None] | None = None
    has_host_cost: bool = True


def read_task() -> Task:
    """The arguments of this process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--contender", required=True)
    parser.add_argument("--work", required=True, choices=WORKS)
    parser.add_argument("--data", required=True)
    options, _ = parser.parse_known_args()
    weights: Arrays = {}
    batches: list[Arrays] = [{} for _ in range(NUM_BATCHES)]
    with np.load(options.data) as arrays:
        for path, array in arrays.items():
            kind, _, name = path.partition("/")
            if kind == "weights":
                weights[name] = array
            else:
                number, _, name = name.partition("/")
                batches[int(number)][name] = array
    return Task(options.contender, WORKS[options.work], weights, batches, options.data)


def answer(program: Program, command: dict[str, Any]) -> dict[str, Any]:
    """Carries one command out."""
    num_steps = command["steps"]
    if command["do"] == "losses":
        return {"losses": [program.wait(program.call()) for _ in range(num_steps)]}
    if command["do"] == "host":
        return {"seconds": host_cost_s(program, num_steps) if program.has_host_cost else None}
    assert command["do"] == "time"
    run = program.run or plain_loop(program)
    run(1)  # this process was stopped: its caches are cold, and that is nobody's step
    start = time.perf_counter()
    run(num_steps)
    return {"seconds": time.perf_counter() - start}


def plain_loop(program: Program) -> Callable[[int], None]:
    def run(num_steps: int) -> None:
        loss = None
        for _ in range(num_steps):
            loss = program.call()
        program.wait(loss)

    return run


def host_cost_s(program: Program, num_steps: int) -> float:
    """The median time until a call returns; every step is over before the next one begins."""
    times: list[float] = []
    for _ in range(num_steps):
        start = time.perf_counter()
        loss = program.call()
        times.append(time.perf_counter() - start)
        program.wait(loss)
    return statistics.median(times)


def serve(
    make: Callable[[Task], Program],
    packages: tuple[str, ...],
    commands: Iterable[str] = sys.stdin,
) -> None:
    """Builds the contender and answers commands until they end."""
    # What libraries print must not mix with the answers.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(message: dict[str, Any]) -> None:
        print(json.dumps(message), file=answers, flush=True)

    program = make(read_task())
    first = program.wait(program.call())
    versions = {name: importlib.metadata.version(name) for name in packages}
    say({"losses": [first], "versions": versions})
    for line in commands:
        say(answer(program, json.loads(line)))

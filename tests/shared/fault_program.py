"""Lets faults happen at stages of a run, and resumes.

python fault_program.py DIR FAULTS

FAULTS is JSON: the stages for each fault, which is SIGINT, SIGTERM, SIGKILL, two-SIGINTs, exception
or full-disk; the last one mounts a small file system, so it needs to be root, if only in a
namespace (`unshare -rm`). Every run is forked from this process, which has imported everything and
started nothing. Prints JSON: for each stage of each fault the exit code and what the run wrote on
stderr, the code and the fingerprint of the resumed run, and whether it went on from the newest
checkpoint; under "whole" the fingerprint of a run that nothing happened to.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import jax
import matplotlib.figure  # noqa: F401 (imported before the forks)
import orbax.checkpoint  # noqa: F401
import tensorboardX  # noqa: F401

import multitower as mt
import multitower.cli.main
import multitower_command
import places
from multitower.runs import report, train
from multitower.runs.setup import RecipeJob
from multitower.steps.step import TrainStep

# Where each stage begins, and at which call of it the fault comes.
STAGES = {
    "set-up": (RecipeJob, "first_state", 1),
    "compile": (jax.stages.Lowered, "compile", 1),
    "first step": (TrainStep, "__call__", 1),
    "step": (TrainStep, "__call__", 4),
    "save": (mt.Checkpoints, "save", 2),
    "evaluation": (mt.Trainer, "evaluate", 1),
    "result": (train, "write_result", 1),
    "report": (report, "write_report", 1),
    "exit": (None, "", 1),
}
WORDS = [
    *("train", str(places.CIRCLE), "--simulate", "1", "--towers", "2", "--batch-size", "12"),
    *("--steps", "6", "--checkpoint-every", "2", "--resume", "auto", "--run-dir"),
]


def fill(disk):
    """Writes until nothing more fits."""
    with (disk / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))


def happen(fault, disk):
    if fault == "exception":
        raise RuntimeError("injected")
    if fault == "full-disk":
        fill(disk)
    elif fault == "two-SIGINTs":
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)
    else:
        os.kill(os.getpid(), signal.Signals[fault])


def prepare(stage, fault, disk):
    """Has the fault come when the stage begins."""
    owner, name, number = STAGES[stage]
    if owner is None:
        atexit.register(happen, fault, disk)
        return
    whole, calls = getattr(owner, name), []

    @functools.wraps(whole)
    def begin(*args, **kwargs):
        calls.append(None)
        if len(calls) == number:
            happen(fault, disk)
        return whole(*args, **kwargs)

    setattr(owner, name, begin)


def fork_run(run_dir, log, stage=None, fault=None, reported=True):
    """Forks a run, with its report or without; returns its exit code, negative for a signal."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks: it has started no thread here
        child = os.fork()
    if child == 0:
        with log.open("wb") as file:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(file.fileno(), 2)
        if not reported:
            report.write_report = lambda *args, **kwargs: None
        if stage is not None:
            prepare(stage, fault, run_dir.parent)
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where a shell ignores it
        sys.argv = ["multitower", *WORDS, str(run_dir)]
        multitower_command.main()  # and the end of the child as that of a program
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def newest_checkpoint(run_dir):
    """Its number; 0 if there is none."""
    found = (path.name for path in (run_dir / "checkpoints").glob("*"))
    return max((int(name) for name in found if name.isdecimal()), default=0)


def first_lines(run_dir, count):
    """What the first steps gave, and how fast they were: made again they have other lines."""
    path = run_dir / "metrics.jsonl"
    return path.read_text().splitlines()[:count] if path.exists() else []


def happened(fault, stage, directory):
    """What became of a run with a fault, and of the one that resumed it."""
    log = directory / "log"
    disk = directory / f"{fault} {stage}".replace(" ", "-")
    disk.mkdir()
    if fault == "full-disk":
        size = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(disk)]
        subprocess.run(size, check=True)
    code = fork_run(disk / "run", log, stage, fault)
    said = log.read_text()
    with contextlib.suppress(FileNotFoundError):
        (disk / "filler").unlink()
    saved = newest_checkpoint(disk / "run")
    before = first_lines(disk / "run", saved)
    again = fork_run(disk / "run", log, reported=stage == "report")
    result = json.loads((disk / "run" / "result.json").read_text()) if again == 0 else {}
    return {
        "code": code,
        "said": said.splitlines(),
        "resumed": again,
        "said again": log.read_text()[-2000:],
        "fingerprint": result.get("fingerprint"),
        "went on": len(before) == saved and first_lines(disk / "run", saved) == before,
    }


def main(directory, faults):
    whole, log = directory / "whole" / "run", directory / "log"
    whole.parent.mkdir()
    assert fork_run(whole, log, reported=False) == 0, log.read_text()
    found = {"whole": json.loads((whole / "result.json").read_text())["fingerprint"]}
    for fault, stages in faults.items():
        found[fault] = {stage: happened(fault, stage, directory) for stage in stages}
    print(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))

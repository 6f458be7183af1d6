"""Trains on a disk that goes bad, mends it, and resumes: `python bad_disk_program.py DIR HOW`.

HOW is `full` or `read-only`. It mounts a small file system of its own, so it needs to be root, if
only in a namespace (`unshare -rm`). Prints JSON: the error, the checkpoints that were left, the
first step of the resumed run, and whether it has the bits of one that was never disturbed.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax

import multitower as mt

STEPS = 12
MENDED = {"full": "remount,size=64m", "read-only": "remount,rw"}


def mount(directory, options, *, new=False):
    kind = ["-t", "tmpfs", "tmpfs"] if new else []
    command = ["mount", *kind, "-o", options, str(directory)]
    for _ in range(100):  # it is busy while a file is open for writing
        if subprocess.run(command, check=False, capture_output=True).returncode == 0:
            return
        time.sleep(0.02)
    subprocess.run(command, check=True)


def losses(params, batch):
    return (batch["x"] @ params["w"]).sum(-1) ** 2


def batches(first):
    while True:
        yield {"x": np.random.default_rng(first).normal(size=(4, 500)).astype(np.float32)}
        first += 1


def train(run_dir, hooks=(), *, resume=False):
    """1 MB of parameters that do not compress, a checkpoint every other step."""
    trainer = mt.Trainer(
        losses,
        optax.sgd(1e-6),
        run_dir=run_dir,
        towers=2,
        global_batch=4,
        checkpoint_every=2,
        keep_last=10,
        hooks=hooks,
    )
    params = {"w": jnp.asarray(np.random.default_rng(0).normal(size=(500, 500)), jnp.float32)}
    return mt.fingerprint(trainer.fit(params, batches, steps=STEPS, resume=resume))


def main(directory, how):
    mt.configure(simulated_devices=2)
    whole = train(directory / "whole")
    disk = directory / "disk"
    disk.mkdir()
    mount(disk, "size=4m" if how == "full" else "size=64m", new=True)

    def go_bad(progress):
        if progress.step == 5 and how == "read-only":
            mount(disk, "remount,ro")

    told = None
    try:
        train(disk / "run", [go_bad])
    except mt.MultitowerError as error:
        told = f"{type(error).__name__}: {error}"
    left = sorted(int(p.name) for p in (disk / "run" / "checkpoints").iterdir() if p.name.isdigit())
    again = None
    try:
        train(disk / "run", resume=True)
    except mt.MultitowerError as error:
        again = f"{type(error).__name__}: {error}"
    mount(disk, MENDED[how])
    steps = []
    resumed = train(disk / "run", [lambda progress: steps.append(progress.step)], resume=True)
    found = {"told": told, "left": left, "again": again, "same": resumed == whole}
    print(json.dumps(found | {"began_with": steps[0]}))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])

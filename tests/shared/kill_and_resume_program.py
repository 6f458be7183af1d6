"""Trains with SIGKILL at random moments.

python kill_and_resume_program.py DIR STEPS NUM_KILLS SEED [OPTIONS]

Every attempt is a fresh process on another number of simulated devices. The processes are forked
from this one, which has imported everything and started nothing: an attempt then takes one second
instead of four. OPTIONS are the trainer's, as JSON. Prints JSON: the fingerprint, that of a run on
one device that nobody disturbs, and the step that each attempt began at.
"""

import itertools
import json
import os
import random
import signal
import sys
import time
import warnings
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint  # noqa: F401 (imported before the forks)

import multitower as mt

PACE_S = 0.05  # of a step of a killed attempt
MOST_STEPS = 20  # of a killed attempt
SAVED_EVERY = 5
TOWERS = 4
DEVICES = (1, 2, 3, 4)


def losses(params, batch, *, rng):
    import jax

    kept = batch["x"] * jax.random.bernoulli(rng, 0.9, batch["x"].shape)
    for hidden in params["hidden"]:
        kept = mt.cut(jnp.tanh(kept @ hidden))
    return (kept @ params["w"] - batch["y"]) ** 2


def batches(first):
    for number in itertools.count(first):
        x = np.random.default_rng(number).normal(size=(16, 8)).astype(np.float32)
        yield {"x": x, "y": x.sum(1)}


def train(directory, num_steps, num_devices, pace_s, options, saved_every=SAVED_EVERY):
    """One attempt, on its own devices; writes where it is and, at the end, the result."""
    import jax

    mt.configure(simulated_devices=num_devices)

    def note(progress):
        with (directory / "steps").open("a") as file:
            file.write(f"{progress.step}\n")
        time.sleep(pace_s)

    trainer = mt.Trainer(
        losses,
        optax.adam(1e-3),
        run_dir=directory,
        towers=TOWERS,
        global_batch=16,
        ema_decay=0.9,
        checkpoint_every=saved_every,
        hooks=[note],
        **options,
    )
    hidden = [jnp.eye(8) for _ in range(options.get("stages", 1) - 1)]
    params = {"w": jnp.zeros(8), "hidden": hidden}
    state = trainer.fit(params, batches, steps=num_steps, rng=jax.random.key(0), resume=True)
    (directory / "fingerprint").write_text(mt.fingerprint(state))


def attempt(directory, num_steps, num_devices, pace_s, options, kill_after=None, **more):
    """Forks one attempt and kills it; returns the step it began at, or None if it got to none.

    It is killed after so many steps, a moment later, or so many seconds if these come first.
    """
    file = directory / "steps"
    file.write_text("")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # JAX warns of forks: it has started no thread here
        child = os.fork()
    if child == 0:
        train(directory, num_steps, num_devices, pace_s, options, **more)
        os._exit(0)
    if kill_after is not None:
        steps, moment_s, seconds = kill_after
        deadline = time.monotonic() + seconds
        while len(file.read_text().splitlines()) <= steps and time.monotonic() < deadline:
            time.sleep(0.005)
        time.sleep(moment_s)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
    assert killed or status == 0, f"an attempt ended with status {status}"
    made = file.read_text().splitlines()
    return int(made[0]) if made else None


def main(directory, num_steps, num_kills, seed, options="{}"):
    num_steps, num_kills, options = int(num_steps), int(num_kills), json.loads(options)
    draw = random.Random(int(seed))
    whole, directory = Path(directory) / "whole", Path(directory) / "killed"
    for path in (whole, directory):
        path.mkdir(parents=True)
    attempt(whole, num_steps, 1, 0, options, saved_every=num_steps)  # which saves at its end alone
    attempts = []
    for _ in range(num_kills):
        num_devices = draw.choice(DEVICES)
        # From before the first step is compiled to well after several checkpoints.
        seconds = draw.choice((draw.uniform(0.3, 1.5), 60, 60))
        kill_after = draw.randrange(MOST_STEPS), draw.uniform(0, PACE_S), seconds
        began = attempt(directory, num_steps, num_devices, PACE_S, options, kill_after)
        attempts.append([num_devices, began])
        assert not (directory / "fingerprint").exists(), "too few steps for so many kills"
    num_devices = draw.choice(DEVICES)
    began = attempt(directory, num_steps, num_devices, 0, options)
    attempts.append([num_devices, began])
    found, expected = ((path / "fingerprint").read_text() for path in (directory, whole))
    print(json.dumps({"fingerprint": found, "undisturbed": expected, "attempts": attempts}))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Two hosts, each with its own name, address and network interface, and a cable that can be cut.

The lies: a run that works only where all processes share a loopback interface; one that hangs when
a host is gone, or names nobody; a step that sends more than it must.
"""

import fcntl
import json
import math
import subprocess
import sys
import time
from pathlib import Path

import pytest

from network_hosts import two_hosts
from processes import clean_environment, run_fork
from waiting import wait_until

# Compiled in a moment.
CIRCLE = str(Path(__file__).parents[2] / "examples" / "own_recipe" / "recipe.py")
WORDS = ["train", CIRCLE, "--steps", "600", "--batch-size", "33", "--towers", "4"]
WORDS += ["--checkpoint-every", "50"]


@pytest.fixture
def hosts():
    with two_hosts() as both:
        yield both


class Together:
    """A command as one process on each host."""

    def __init__(self, hosts, directory, *words, devices="2"):
        self.run_dir = directory / "run"
        flags = ["--coordinator", f"{hosts[0].address}:4321", "--num-processes", "2"]
        flags += ["--simulate", devices, "--run-dir", self.run_dir, "--process-id"]
        self._files = [directory / f"{host.name}.out" for host in hosts]
        self.running = []
        for number, (host, file) in enumerate(zip(hosts, self._files, strict=True)):
            command = [sys.executable, "-m", "multitower", *words, *flags, number]
            with file.open("w") as out:
                fcntl.flock(out, fcntl.LOCK_EX)  # for as long as anybody can write to it
                self.running.append(
                    subprocess.Popen(
                        host.command(*command),
                        env=clean_environment(),
                        stdout=out,
                        stderr=subprocess.STDOUT,
                    )
                )

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.running:
            process.kill()
            process.wait()

    def said(self):
        return [file.read_text() for file in self._files]

    def lines(self):
        """What each step gave, and how fast it was: a step that is made again has another line."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_text().splitlines() if file.exists() else []

    def steps(self):
        return len(self.lines())

    def wait_for_step(self, step):
        def made():
            assert not any(self.codes()), self.explain()
            return self.steps() >= step

        wait_until(made, 180, self.explain)

    def wait_for_end(self, timeout_s):
        def ended():
            return None not in self.codes() and all(map(is_written, self._files))

        wait_until(ended, timeout_s, self.explain)

    def codes(self):
        return [process.poll() for process in self.running]

    def explain(self):
        return "\n".join(["", *self.said()])


def is_written(file):
    """Whether nobody writes to it any more: what relays a process's last lines ends after it."""
    with file.open() as out:
        try:
            fcntl.flock(out, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def result(run_dir):
    return json.loads((run_dir / "result.json").read_text())


@pytest.fixture(scope="module")
def fingerprint(tmp_path_factory):
    """Of the same run in one process on one device."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run_fork("-m", "multitower", *WORDS, "--simulate", "1", "--run-dir", str(run_dir))
    return result(run_dir)["fingerprint"]


def test_two_hosts_make_one_run(hosts, tmp_path, fingerprint):
    with Together(hosts, tmp_path, *WORDS) as run:
        run.wait_for_end(180)
        assert run.codes() == [0, 0], run.explain()
    assert "training circle on 2 processes (0 on mt-host0; 1 on mt-host1) with 2" in run.said()[0]
    assert result(run.run_dir)["fingerprint"] == fingerprint
    assert result(run.run_dir)["processes"] == 2


def test_a_host_that_is_cut_off_ends_both_and_costs_no_checkpoint(hosts, tmp_path, fingerprint):
    with Together(hosts, tmp_path, *WORDS) as run:
        run.wait_for_step(200)
        kept = run.lines()[:150]  # a checkpoint later than that may not be complete yet
        hosts[1].unplug()
        began = time.monotonic()
        run.wait_for_end(60)
        print(f"both ended {time.monotonic() - began:.1f} s after the cut: {run.codes()}")
        assert 0 not in run.codes()
    here, there = run.said()
    assert "missing: process 1 on mt-host1." in here, here
    assert "missing: process 0 on mt-host0." in there, there
    assert not (run.run_dir / "result.json").exists()
    run_fork("-m", "multitower", "resume", str(run.run_dir), "--simulate", "1")
    assert run.lines()[:150] == kept
    assert result(run.run_dir)["fingerprint"] == fingerprint


NUM_PARAMETERS = 2**20
WIDE = f"""
import jax.numpy as jnp, numpy as np, optax
from multitower.recipes import DataSets, Recipe

def load():
    x = np.random.default_rng(0).normal(size=(64, {NUM_PARAMETERS // 64})).astype(np.float32)
    return DataSets({{"x": x}}, {{"x": x}})

def loss(params, batch):
    return (batch["x"] @ params).sum(axis=1) / 1e6

recipe = Recipe(
    name="wide", data=load, init=lambda key: jnp.ones(({NUM_PARAMETERS // 64}, 64)), loss=loss,
    metrics=lambda params, batch: {{"loss": loss(params, batch)}},
    optimizer=lambda steps: optax.sgd(1e-3), steps=200, global_batch=8,
)
"""


def test_a_step_sends_each_parameter_once_from_host_to_host(hosts, tmp_path):
    """2 P (D - 1) / D with two devices, however many towers: on the wire, not in the program."""
    recipe = tmp_path / "wide.py"
    recipe.write_text(WIDE)
    words = ["train", recipe, "--towers", "4", "--checkpoint-every", "1000"]
    with Together(hosts, tmp_path, *words, devices="1") as run:
        run.wait_for_step(20)
        first, before = run.steps(), [host.sent_bytes() for host in hosts]
        run.wait_for_step(first + 100)
        last, after = run.steps(), [host.sent_bytes() for host in hosts]
        run.wait_for_end(120)
        assert run.codes() == [0, 0], run.explain()
    sent = [(b - a) / (last - first) for a, b in zip(before, after, strict=True)]
    formula = 2 * 4 * NUM_PARAMETERS * (2 - 1) / 2
    print(f"{sent[0]:.0f} and {sent[1]:.0f} bytes a step; the formula says {formula:.0f}")
    # A step or two may lie between reading the two numbers; and frames have headers.
    assert all(math.isclose(one, formula, rel_tol=0.05) for one in sent), (sent, formula)

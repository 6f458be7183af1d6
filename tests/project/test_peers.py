"""The comparison with other libraries: it runs, and it compares nothing but identical work."""

import json
import runpy
import subprocess
import sys

import pytest

from places import ROOT
from processes import run_fork

PEERS = ROOT / "benchmarks" / "peers"
ON_JAX = ["shard-map", "named-sharding", "multitower", "multitower-same-bits"]

# A contender that trains with half the learning rate, and a driver that knows it.
CHEATING_WORKER = """
import dataclasses, runpy, sys
sys.path.insert(0, {peers!r})
import protocol

read_task = protocol.read_task

def read_easier_task():
    task = read_task()
    rate = task.work.learning_rate / 2
    easier = dataclasses.replace(task.work, learning_rate=rate)
    return dataclasses.replace(task, work=easier, contender="shard-map")

protocol.read_task = read_easier_task
runpy.run_path({peers!r} + "/jax_worker.py", run_name="__main__")
"""
CHEATING_DRIVER = """
import dataclasses, sys
from pathlib import Path
sys.path.insert(0, {peers!r})
import compare, contenders

honest = contenders.CONTENDERS["shard-map"]
cheat = dataclasses.replace(honest, key="cheat", title="A cheat", script=Path({worker!r}))
known = {{"shard-map": honest, "cheat": cheat}}
compare.main(lambda: compare.compare(sys.argv[1:], known))
"""


def run(program, *arguments):
    command = [
        sys.executable,
        str(program),
        "--work",
        "Polynomial",
        "--rounds",
        "2",
        "--steps",
        "2",
    ]
    return subprocess.run(
        [*command, *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.mark.slow
def test_all_contenders_on_jax_do_the_same_work(tmp_path):
    # The lie: a ratio between steps that train different things.
    found = run(
        *(PEERS / "compare.py", "--contenders", ",".join(ON_JAX)),
        *("--json", str(tmp_path / "peers.json")),
    )
    assert found.returncode == 0, found.stderr
    rows = json.loads((tmp_path / "peers.json").read_text())["Polynomial"]
    assert list(rows) == ON_JAX
    for row in rows.values():
        assert row["losses"] == pytest.approx(rows["shard-map"]["losses"], rel=1e-5)
        assert row["losses"][0] > row["losses"][-1]
        assert f"| {row['title']} | {row['median_ms']:.3f} |" in found.stdout


@pytest.mark.slow
def test_other_work_is_refused(tmp_path):
    # The lie: a contender that wins because it does less.
    worker, driver = tmp_path / "cheating_worker.py", tmp_path / "cheating_driver.py"
    worker.write_text(CHEATING_WORKER.format(peers=str(PEERS)))
    driver.write_text(CHEATING_DRIVER.format(peers=str(PEERS), worker=str(worker)))
    found = run(driver)
    assert found.returncode == 1
    assert "A cheat did other work at Polynomial" in found.stderr
    assert "ms/step" not in found.stdout


def test_unknown_names_and_missing_environments_are_said(tmp_path, monkeypatch):
    # The lie: a table that lacks a contender, and does not say so.
    assert "no 'nobody' here" in run(PEERS / "compare.py", "--contenders", "nobody").stderr
    monkeypatch.syspath_prepend(PEERS)
    contenders = runpy.run_path(str(PEERS / "contenders.py"))
    why_not = contenders["Contender"].why_not
    monkeypatch.setitem(why_not.__globals__, "ENVIRONMENTS", tmp_path)
    monkeypatch.setitem(contenders["Contender"].interpreter.__globals__, "ENVIRONMENTS", tmp_path)
    reason = contenders["CONTENDERS"]["ddp"].why_not()
    assert reason == "run benchmarks/peers/setup.sh torch"
    assert (PEERS / "setup.sh").exists()


def test_changed_lines(monkeypatch):
    # The lie: "two lines" that are three.
    contenders = runpy.run_path(str(PEERS / "contenders.py"))
    code_of = contenders["code_of"]
    before = code_of(PEERS / "lines" / "plain_jax.py")
    after = code_of(PEERS / "lines" / "multitower_value_and_grad.py")
    assert len([line for line in after if line not in before]) == 2
    for contender in contenders["CONTENDERS"].values():
        assert contender.changed_lines() > 0


@pytest.mark.slow
def test_programs_whose_lines_are_counted_train_alike():
    # The lie: few changed lines, in a program that does not run.
    simulated = {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "NPROC": "32",
        "KERAS_BACKEND": "jax",
    }
    programs = [
        path
        for path in sorted((PEERS / "lines").glob("*.py"))
        if not path.name.startswith(("plain_torch", "torch_", "plain_tensorflow", "tensorflow_"))
    ]
    assert len(programs) == 8
    for program in programs:
        weights = run_fork(program, **simulated)
        found = [float(number) for number in weights.strip("[] \n").split()]
        assert found == pytest.approx([2.918754, -0.271153, 2.918053], rel=1e-4), program.name

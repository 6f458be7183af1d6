"""benchmarks/gpu.sh: runs through in its small mode, so that it does on the day there is a GPU."""

import importlib.util
import json
import os
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from places import ROOT

BENCHMARKS = ROOT / "benchmarks"


@pytest.fixture
def program(monkeypatch):
    """Imports a program of benchmarks/ by its name."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


def lines_of(*part, fails=False):
    """What a part of the script prints."""
    done = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--small", *part],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == int(fails), done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_first_parts_run_through():
    shown = lines_of()
    sizes = [
        line for line in shown if line.startswith(("| scatter-add", "| max pooling", "| sort"))
    ]
    assert len(sizes) == 3 * 2 * 2  # kernels, sizes, ways to compile
    assert all(row.endswith("| same |") for row in sizes), sizes
    assert "same bits: one device and all of them agree" in shown
    assert "params       same bits" in shown


@pytest.mark.slow
def test_models_run_through():
    shown = lines_of("models", "attention")
    rows = [line for line in shown if line.endswith("% |")]
    # Three models and one of them in two ways, each by hand, deterministic, fast and same bits.
    assert len(rows) == 20, shown
    assert not any("rror" in row for row in rows), rows


@pytest.mark.slow
def test_the_brief_part_runs_through():
    shown = lines_of("brief")
    assert "params       same bits" in shown
    assert any(line.startswith("| product") and line.endswith("| same |") for line in shown)
    assert any(line.startswith("Polynomial ") for line in shown)
    assert any(line.startswith("| LeNet-5 | same bits |") for line in shown)


@pytest.mark.slow
def test_keras_runs_through():
    rows = [line for line in lines_of("keras") if "| Keras on JAX |" in line]
    assert len(rows) == 3
    assert not any("rror" in row or "exit code" in row for row in rows), rows


@pytest.mark.slow
def test_two_processes_run_through():
    assert "step  2 x 1" in lines_of("processes")


@pytest.mark.slow
def test_kernels_and_device_control():
    shown = lines_of("bits", "devices")
    bits = [line for line in shown if line.startswith(("| product", "| sort"))]
    assert len(bits) == 2 * 3  # precisions
    assert all(row.endswith("| same | same | same | same |") for row in bits), bits
    assert sum(line.endswith("| cpu:0, with a warning |") for line in shown) == 6
    planned = [line.split("|")[2:4] for line in shown if line.startswith(("| LeNet", "| ResNet"))]
    assert all(float(mib) > 0 and peak == " - " for mib, peak in planned), planned


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="PyTorch is installed")
def test_a_command_that_fails_does_not_end_the_script():
    """Lie: one failure throws away what the parts behind it would have shown."""
    shown = lines_of("torch", "verify")
    assert sum("No module named 'torch'" in line for line in shown) == 3
    assert any(line.startswith("| own | float32 | 2 | same | same |") for line in shown)


def test_failures_are_told_at_the_end(tmp_path):
    """Lie: one failure throws away the rest; exit code 0 after a failure."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\ncase "$*" in *scatter*) exit 3 ;; esac\n')
    python.chmod(0o755)
    done = subprocess.run(
        [BENCHMARKS / "gpu.sh", "--small", "scatter", "bits"],
        env={**os.environ, "PYTHON": str(python)},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 1
    assert "benchmarks/gpu_bits.py --small --only product,sort --towers 1,2" in done.stdout
    last = done.stdout.splitlines()[-1]
    assert last == "failed: benchmarks/gpu_scatter.py --small: exit code 3"


def test_a_recipe_that_differs_or_fails_is_seen(program):
    """Lie: a table of "same" whatever the processes say."""
    recipes = program("gpu_recipes")
    case = recipes.Case("gpt", "TF32", 8)
    found = {"same_bits": True, "fingerprints": [["a" * 64, "b" * 64], ["a" * 64, "b" * 64]]}
    other = found | {"fingerprints": [["a" * 64, "c" * 64], ["a" * 64, "c" * 64]]}
    title = "| gpt | TF32 | 8 |"
    assert recipes.line(case, [found, found]) == f"{title} same | same | {'b' * 12} |"
    assert recipes.line(case, [found, other]) == f"{title} same | differs | {'b' * 12} |"
    differs = found | {"same_bits": False}
    assert recipes.line(case, [found, differs]) == f"{title} differs | same | {'b' * 12} |"
    assert recipes.line(case, [{"error": "exit code 2"}, found]) == f"{title} exit code 2 | | |"


def test_operations_are_those_of_all_layers(program):
    """Lie: a loop over layers is counted as one layer, and a GPU looks idle."""
    models, steps = program("gpu_models"), program("gpu_steps")
    model = models.transformer(small=True)
    tokens = model.rows * model.unit[1]
    products = [*model.params["layers"].values(), model.params["words"]]
    per_token = sum(2 * leaf.size for leaf in products if leaf.ndim == 3 or leaf is products[-1])
    assert 3 * per_token * tokens < steps.operations(model) < 4 * per_token * tokens


@pytest.mark.slow
def test_operations_that_cannot_be_counted(program, monkeypatch):
    """Lie: the table ends where a platform has no cost analysis."""
    steps = program("gpu_steps")

    def refuse(self):
        raise NotImplementedError("not for this platform")

    monkeypatch.setattr(jax.stages.Lowered, "cost_analysis", refuse)
    model = steps.lenet(small=True)
    assert steps.operations(model) is None
    (row,) = steps.rows_of({"fast": {"ms": [1.0, 1.0]}}, model, 1e12, None, None)
    assert row == "| LeNet-5 | fast | 1.000 |  |  | 8,000 images/s | unknown |"


@pytest.mark.slow
def test_a_slow_contender_is_left_out(program):
    """Lie: a step that takes minutes eats the time of all others."""
    steps, models = program("gpu_steps"), program("gpu_models")
    model = models.Model("any", None, None, lambda *_: None, lambda _: None, 128, ("rows", 1))
    asked = []

    def make(model):
        asked.append(model.rows)
        return lambda _: time.sleep(0.05)  # 3.2 s with 64 times as many rows

    found = steps.measure({"same bits": make, "fast": make}, model, rounds=1, steps=1)
    assert asked == [2, 128]  # the deterministic one never had all rows
    assert found["same bits"]["error"].startswith("left out: a step takes 3.")
    assert len(found["fast"]["ms"]) == 1


def test_a_child_that_takes_too_long(program):
    steps = program("gpu_steps")
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert steps.answer(command, 0.2) == {"error": "no answer within 0.2 s"}
    command = [sys.executable, "-c", "raise SystemExit('broken')"]
    assert steps.answer(command) == {"error": "exit code 1: broken"}


def test_a_worker_that_dies(program, tmp_path, capsys):
    """Lie: the table ends with the first of two processes."""
    bits = program("gpu_bits")
    row = {"kernel": "sort", "precision": "TF32", "bits": {"1": [["a", "a"]]}, "plain": ["p", "p"]}
    code = f"""
import pathlib, sys
print({json.dumps(row)!r}, flush=True)
try:
    pathlib.Path({str(tmp_path / "first")!r}).touch(exist_ok=False)
except FileExistsError:
    sys.exit(7)
print({json.dumps(row)!r})
"""
    assert bits.table([sys.executable, "-c", code]) == 7
    *_, whole, half = capsys.readouterr().out.splitlines()
    assert whole == "| sort | TF32 | same | same | - | same |"
    assert half == "| sort | TF32 | a process has ended with exit code 7 | | | |"


def test_plain_steps_are_compared_over_processes(program):
    """Lie: each process repeats itself, so the kernels are said to be the same in all."""
    row = {"kernel": "sort", "precision": "TF32", "bits": {}, "plain": ["p", "p"]}
    found = program("gpu_bits").line([row, {**row, "plain": ["q", "q"]}])
    assert found.endswith("| differs |")


@pytest.mark.slow
def test_an_option_that_jax_does_not_know(program, monkeypatch, capsys):
    """Lie: the table ends where a JAX has no such option."""
    scatter = program("gpu_scatter")
    monkeypatch.setattr(scatter, "WAYS", {"new": {"xla_gpu_no_such_option": True}, "plain": {}})
    monkeypatch.setattr(scatter, "SIZES", (1000,))
    monkeypatch.setattr(sys, "argv", ["gpu_scatter.py"])
    scatter.main()
    rows = capsys.readouterr().out.splitlines()[-4:]
    assert "xla_gpu_no_such_option" in rows[0]
    assert rows[1].endswith("| same |")


@pytest.mark.parametrize("kernel", ["max_pooling", "sort"])
def test_a_gradient_that_scatters_is_that_of_numpy(program, kernel):
    fn, arguments, wanted = getattr(program("gpu_scatter"), kernel)(1000)
    np.testing.assert_allclose(fn(*map(jnp.asarray, arguments)), wanted, atol=1e-6)

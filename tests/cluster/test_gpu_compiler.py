"""XLA's compiler for GPUs, which needs no GPU: what it makes of programs with the same bits.

It stands with the engines because it needs packages that everyday set-up leaves out.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from multitower.engines.reduction import plan
from multitower.towers.placement import contiguous
from places import ROOT


def rows_of(*arguments):
    """The cells of a table of benchmarks/gpu_compiled.py, as on the day there is a GPU."""
    compiler = Path(sys.prefix) / "cuda"
    assert compiler.is_dir(), "`make test-cluster` puts JAX's compiler for GPUs there"
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "gpu_compiled.py", *arguments],
        env={
            **os.environ,
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{compiler}",
            "JAX_DISABLE_MOST_OPTIMIZATIONS": "0",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines[2:]]


@pytest.mark.parametrize("kernel", ["embedding", "max pooling", "sort"])
def test_law_l3_no_thread_decides_over_bits(kernel):
    """Lie: kernels add with atomic instructions, in whatever order threads come."""
    for name, order_by_default, _, order, loops, _, gpus in rows_of("kernels", "--only", kernel):
        assert "atom" in order_by_default, name  # so this would be seen
        assert order == "-", name
        assert loops == "-", name  # one trip for each index takes a thousand times as long
        assert gpus == "same", name


def test_law_l3_a_reduction_only_adds():
    """Lie: a product next to an addition, which round once; or a sum that NCCL makes."""
    for gpus, parts, _, sent, floats in rows_of("reductions"):
        how = plan(contiguous(range(int(gpus)), 8))
        assert int(parts) == how.num_parts
        assert floats == f"{sum(map(len, how.parts)) - 1} add"
        assert {one.split()[1] for one in sent.split(", ")} <= {"all-gather", "all-to-all"}


def test_it_makes_all_tables_if_none_is_named():
    """Lie: the command of the results file is refused."""
    headings = {row[0] for row in rows_of("--only", "none")}
    assert headings >= {"operation", "GPUs", "model"}

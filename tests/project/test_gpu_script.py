"""benchmarks/gpu.sh: runs through in its small mode, so that it does on the day there is a GPU."""

import os
import subprocess
import sys

import pytest

from places import ROOT


def lines_of(*part):
    """What a part of the script prints."""
    done = subprocess.run(
        [ROOT / "benchmarks" / "gpu.sh", "--small", *part],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_the_small_mode_runs_through():
    shown = lines_of()
    rows = [line for line in shown if line.startswith("| ")][2:]
    # Three models, each by hand, deterministic, fast and same bits; PyTorch where it is installed.
    assert len(rows) in (12, 15)
    assert not any("rror" in row for row in rows), rows
    assert "same bits: one device and all of them agree" in shown
    assert "params       same bits" in shown


@pytest.mark.slow
def test_kernels_and_device_control():
    shown = lines_of("bits", "devices")
    bits = [line for line in shown if line.startswith(("| product", "| sort"))]
    assert len(bits) == 2 * 3  # precisions
    assert all(row.endswith("| same | same | same | same |") for row in bits), bits
    assert sum(line.endswith("| cpu:0, with a warning |") for line in shown) == 6
    planned = [line.split("|")[2:4] for line in shown if line.startswith(("| LeNet", "| ResNet"))]
    assert all(float(mib) > 0 and peak == " - " for mib, peak in planned), planned

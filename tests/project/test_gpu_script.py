"""benchmarks/gpu.sh: runs through in its small mode, so that it does on the day there is a GPU."""

import os
import subprocess
import sys

import pytest

from places import ROOT


@pytest.mark.slow
def test_the_small_mode_runs_through():
    script = ROOT / "benchmarks" / "gpu.sh"
    done = subprocess.run(
        [script, "--small"],
        env={**os.environ, "PYTHON": sys.executable},
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [line for line in done.stdout.splitlines() if line.startswith("| ")][2:]
    # Three models, each by hand, deterministic, fast and same bits; PyTorch where it is installed.
    assert len(rows) in (12, 15)
    assert not any("rror" in row for row in rows), rows
    assert "same bits: one device and all of them agree" in done.stdout
    assert "params       same bits" in done.stdout

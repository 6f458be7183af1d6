"""GPUs of several processes. The lie: N processes that all work on GPU 0, and look like N GPUs."""

import subprocess
import sys
import tempfile
from types import SimpleNamespace

import pytest

import multitower as mt
from multitower.processes import gpu_claims

HOLD = """
import sys
from multitower.processes import gpu_claims
print(gpu_claims._lock(sys.argv[1]), flush=True)
sys.stdin.read()
"""


def gpu(number, process_index=0):
    return SimpleNamespace(platform="gpu", process_index=process_index, local_hardware_id=number)


@pytest.fixture
def other_process(tmp_path, monkeypatch):
    """A process that has claimed GPU 3."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(gpu_claims, "_claimed", {})
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLD, "3"], text=True, **pipes) as process:
        assert process.stdout.readline() == "True\n"
        yield process
        process.kill()


def test_a_gpu_of_another_process_is_an_error(other_process, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2, 3")
    gpu_claims.claim_gpus([gpu(0), gpu(1, process_index=1)])  # the other one's is its own affair
    with pytest.raises(
        mt.DeviceError, match=r"GPU 3, which another process .*=2, 3\)\. Give every"
    ):
        gpu_claims.claim_gpus([gpu(1)])


def test_a_gpu_is_free_again_when_its_process_is_killed(other_process):
    other_process.kill()
    other_process.wait()
    gpu_claims.claim_gpus([gpu(3)])
    gpu_claims.claim_gpus([gpu(3)])  # one's own


def test_where_files_cannot_be_made_nothing_is_claimed(tmp_path, monkeypatch):
    """Lie: a container without /tmp that cannot train."""
    monkeypatch.setattr(gpu_claims, "_claimed", {})
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    gpu_claims.claim_gpus([gpu(0)])

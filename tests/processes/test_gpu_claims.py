"""GPUs of several processes. The lie: N processes that all work on GPU 0, and look like N GPUs."""

import ctypes
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
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setattr(gpu_claims, "uuid_of", lambda number: str(number + 2))
    gpu_claims.claim_gpus([gpu(0), gpu(1, process_index=1)])  # the other one's is its own affair
    with pytest.raises(mt.DeviceError, match=r"GPU 3, which another process .*=2,3\)\. Give every"):
        gpu_claims.claim_gpus([gpu(1)])


@pytest.mark.slow
def test_a_gpu_is_free_again_when_its_process_is_killed(other_process, monkeypatch):
    monkeypatch.setattr(gpu_claims, "uuid_of", str)
    other_process.kill()
    other_process.wait()
    gpu_claims.claim_gpus([gpu(3)])
    gpu_claims.claim_gpus([gpu(3)])  # one's own


def test_where_files_cannot_be_made_nothing_is_claimed(tmp_path, monkeypatch):
    """Lie: a container without /tmp that cannot train."""
    monkeypatch.setattr(gpu_claims, "_claimed", {})
    monkeypatch.setattr(gpu_claims, "uuid_of", str)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "not there"))
    gpu_claims.claim_gpus([gpu(0)])


class Cuda:
    """libcuda.so.1, as it fills in what it is given."""

    def __init__(self, failing=()):
        self._failing = failing

    def cuInit(self, flags):  # noqa: N802
        return int("cuInit" in self._failing)

    def cuDeviceGet(self, device, number):  # noqa: N802
        device._obj.value = number + 40
        return int(number > 7)

    def cuDeviceGetUuid_v2(self, uuid, device):  # noqa: N802
        uuid.raw = bytes([device.value] * 16)
        return 0


def test_a_gpu_is_known_by_its_uuid(monkeypatch):
    """Lie: every task of SLURM has a GPU 0, so that the second one is refused."""
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda())
    assert [gpu_claims.uuid_of(number) for number in (0, 1, 8)] == ["28" * 16, "29" * 16, None]
    monkeypatch.setattr(ctypes, "CDLL", lambda name: Cuda(failing=["cuInit"]))
    assert gpu_claims.uuid_of(0) is None
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())  # an older one
    assert gpu_claims.uuid_of(0) is None
    monkeypatch.undo()
    assert gpu_claims.uuid_of(0) is None or len(gpu_claims.uuid_of(0)) == 32  # no GPU here
    gpu_claims.claim_gpus([gpu(0), gpu(1)])  # nor is one claimed whose UUID is not known

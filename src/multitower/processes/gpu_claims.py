"""GPU claims: two processes of one machine cannot use the same GPU.

A launcher and CUDA_VISIBLE_DEVICES can contradict each other; then every process of a machine uses
its first GPU, or all of them (jax#16788, jax#23452). CUDA allows that, and the processes run out of
memory, or one GPU does the work of all.
"""

import ctypes
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import jax

from multitower.errors import DeviceError
from multitower.processes.run_lock import close_in_children, try_lock

# Files that stay open while the process lives; the system releases their locks when it ends.
_claimed: dict[str, int] = {}


def claim_gpus(devices: Sequence[jax.Device]) -> None:
    """Claims this process's GPUs among the processes of this user on this machine.

    Raises:
        DeviceError: another process has claimed one of them.
    """
    for one in devices:
        if one.platform != "gpu" or one.process_index != jax.process_index():
            continue
        name = uuid_of(one.local_hardware_id or 0)
        if name is not None and name not in _claimed and not _lock(name):
            raise DeviceError(
                f"process {jax.process_index()} of {jax.process_count()} would use GPU {name}, "
                "which another process of this machine already uses (CUDA_VISIBLE_DEVICES="
                f"{os.environ.get('CUDA_VISIBLE_DEVICES', 'not set')}). Give every process its "
                "own GPU: let the cluster assign it (srun --gpus-per-task=1), set "
                "CUDA_VISIBLE_DEVICES or visible_devices= for each process, or start one process "
                "per machine."
            )


def uuid_of(number: int) -> str | None:
    """The UUID of this process's GPU `number`, in hexadecimal; None if CUDA does not tell.

    Numbers say nothing: where a cluster or a container gives each process GPUs of its own, each
    has a GPU 0.
    """
    device, uuid = ctypes.c_int(), ctypes.create_string_buffer(16)
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
        failed = (
            cuda.cuInit(0)
            or cuda.cuDeviceGet(ctypes.byref(device), number)
            or cuda.cuDeviceGetUuid_v2(uuid, device)
        )
    except (OSError, AttributeError):  # another maker's GPU, or CUDA before 11.4
        return None
    return None if failed else uuid.raw.hex()


def _lock(name: str) -> bool:
    try:
        path = Path(tempfile.gettempdir()) / f"multitower-gpu-{os.getuid()}-{name}"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    except OSError:  # no place for such files, as in some containers
        return True
    if not try_lock(descriptor):
        os.close(descriptor)
        return False
    close_in_children(descriptor)
    _claimed[name] = descriptor
    return True

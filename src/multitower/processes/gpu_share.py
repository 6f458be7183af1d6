"""GPU share: which of the visible GPUs belong to this process of a cluster job.

JAX gives every process of a detected cluster one GPU, by the process's number on its machine. That
is right if there is one process per GPU and every process sees all GPUs. With one process per
machine it leaves GPUs idle. Where the cluster has assigned the GPUs already, as with
`srun --gpus-per-task`, it names a GPU that does not exist (jax#16788, jax#23452).
"""

import re
from collections.abc import Mapping

from multitower.errors import ConfigurationError

_RUN = re.compile(r"(\d+)(?:\(x(\d+)\))?")


def gpus_of_process(environ: Mapping[str, str]) -> str | None:
    """Chooses this process's GPUs by the environment variables of SLURM or Open MPI.

    Args:
        environ: the environment of this process.

    Returns:
        For `jax_cuda_visible_devices`: `"all"`, or numbers such as `"0,1"`, which count what
        CUDA_VISIBLE_DEVICES lists; None to leave it as JAX has set it.

    Raises:
        ConfigurationError: the GPUs cannot be shared equally.
    """
    place = _place_on_machine(environ)
    if place is None or "JAX_LOCAL_DEVICE_IDS" in environ:
        return None
    rank, count = place
    visible = [name for name in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    on_machine = environ.get("SLURM_GPUS_ON_NODE", "")
    by_task = on_machine.isdecimal() and len(visible) < int(on_machine)
    if count == 1 or len(visible) == 1 or (visible and by_task):
        return "all"
    if not visible:
        return None  # the number of GPUs is unknown: one each, as JAX does
    each, rest = divmod(len(visible), count)
    if rest or not each:
        raise ConfigurationError(
            f"{count} processes on this machine share its GPUs {', '.join(visible)} "
            "(CUDA_VISIBLE_DEVICES), which do not divide equally. Start one process per machine or "
            "one per GPU, or let the cluster assign the GPUs (srun --gpus-per-task=N)."
        )
    return ",".join(str(gpu) for gpu in range(rank * each, (rank + 1) * each))


def _place_on_machine(environ: Mapping[str, str]) -> tuple[int, int] | None:
    """This process's number on this machine, and the number of processes there."""
    try:
        # First, as JAX does: mpirun inside of a SLURM job hands its own SLURM variables on.
        if "OMPI_COMM_WORLD_LOCAL_RANK" in environ:
            return (
                int(environ["OMPI_COMM_WORLD_LOCAL_RANK"]),
                int(environ["OMPI_COMM_WORLD_LOCAL_SIZE"]),
            )
        if "SLURM_LOCALID" in environ:
            node = int(environ.get("SLURM_NODEID", "0"))
            tasks = environ.get("SLURM_STEP_TASKS_PER_NODE", "")
            # "2(x3),1": two on each of three nodes, one on the fourth
            counts = [int(n) for n, times in _RUN.findall(tasks) for _ in range(int(times or 1))]
            return int(environ["SLURM_LOCALID"]), counts[node]
    except (KeyError, ValueError, IndexError):
        return None  # variables of another version: as JAX does
    return None

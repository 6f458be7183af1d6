"""Which GPUs a process of a cluster's job uses. No GPU is needed: the clusters' variables decide.

The lies: eight GPUs of which one works, four processes on GPU 0, GPU 3 of one.
"""

import pytest

import multitower as mt
from multitower.processes.gpu_share import gpus_of_process


def slurm(rank, tasks, node=0, **more):
    names = {"SLURM_LOCALID": rank, "SLURM_STEP_TASKS_PER_NODE": tasks, "SLURM_NODEID": node}
    return {**{name: str(value) for name, value in names.items()}, **more}


def mpi(rank, size, **more):
    return {
        "OMPI_COMM_WORLD_LOCAL_RANK": str(rank),
        "OMPI_COMM_WORLD_LOCAL_SIZE": str(size),
        **more,
    }


FOUR = {"CUDA_VISIBLE_DEVICES": "0,1,2,3"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        # one process a machine drives all of its GPUs
        (slurm(0, "1(x2)", **FOUR), "all"),
        (slurm(0, "1(x2)"), "all"),
        (mpi(0, 1, **FOUR), "all"),
        # the cluster has handed them out
        (slurm(3, "4", CUDA_VISIBLE_DEVICES="3"), "all"),
        (slurm(1, "2", CUDA_VISIBLE_DEVICES="2,3", SLURM_GPUS_ON_NODE="4"), "all"),
        # all processes see the same ones
        (slurm(3, "4", **FOUR), "3"),
        (slurm(1, "2", **FOUR, SLURM_GPUS_ON_NODE="4"), "2,3"),
        (slurm(1, "4(x2),2", node=2, **FOUR), "2,3"),
        (mpi(1, 2, **FOUR), "2,3"),
        # mpirun in a job of SLURM hands the variables of its own process on
        (mpi(1, 2, **FOUR) | slurm(0, "1(x2)"), "2,3"),
        (mpi(1, 2, CUDA_VISIBLE_DEVICES="GPU-5ebe,GPU-77aa"), "1"),
        # as JAX does, or as the user said
        (slurm(2, "4"), None),
        (slurm(1, "2", JAX_LOCAL_DEVICE_IDS="0", **FOUR), None),
        (slurm(1, "?", **FOUR), None),
        (FOUR, None),
    ],
)
def test_trap_every_gpu_has_one_process(environ, expected):
    assert gpus_of_process(environ) == expected


@pytest.mark.parametrize("processes", [3, 8])
def test_what_cannot_be_shared_is_an_error(processes):
    with pytest.raises(mt.ConfigurationError, match="one process per machine or one per GPU"):
        gpus_of_process(mpi(0, processes, **FOUR))


def test_configure_asks_for_it(monkeypatch):
    """And what the user says comes after what JAX and the cluster say."""
    set_to = []
    monkeypatch.setattr("multitower.hardware.configuration._started", lambda: False)
    monkeypatch.setattr("multitower.hardware.configuration._applied", {})
    monkeypatch.setattr("multitower.processes.joining.leave_on_errors", lambda: None)
    monkeypatch.setattr("multitower.processes.joining.start_verdict", lambda _: None)
    monkeypatch.setattr("jax.distributed.initialize", lambda *_, **__: set_to.append("joined"))
    monkeypatch.setattr("jax.config.update", lambda name, value: set_to.append((name, value)))
    for name, value in slurm(0, "1", **FOUR).items():
        monkeypatch.setenv(name, value)
    mt.configure(distributed=True)
    assert set_to[set_to.index("joined") + 1 :] == [
        (f"jax_{x}_visible_devices", "all") for x in ("cuda", "rocm")
    ]
    set_to.clear()
    monkeypatch.setattr("multitower.hardware.configuration._applied", {})
    mt.configure(distributed=True, visible_devices="1,2")
    assert set_to[-2:] == [(f"jax_{x}_visible_devices", "1,2") for x in ("cuda", "rocm")]

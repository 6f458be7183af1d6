"""Joining: connects several processes, usually one per machine, through JAX's distributed runtime.

JAX finds the other processes through the cluster's environment variables (SLURM, Open MPI,
Kubernetes, TPU pods), or you give the address of process 0. Nothing here starts processes.
"""

import os
import socket
import time
from typing import Any

import jax

from multitower.errors import ConfigurationError
from multitower.processes.gpu_share import gpus_of_process
from multitower.processes.leaving import HEARTBEAT_S, leave_on_errors
from multitower.processes.verdict import start_verdict

# How long to wait for processes that start late.
JOIN_S = 300
# How long a process that has finished waits for the others. JAX ends all of them if that takes
# longer (marin#8295). A process that dies is noticed by its heartbeat; one that calls sys.exit
# while others train looks like one that has finished.
SHUTDOWN_S = 600
FREE_S = 10  # how long the port of a killed run may stay taken by its process 0
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def join_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Connects this process with the others of its run, and waits until all are connected.

    Args:
        coordinator: `"HOST:PORT"` of process 0, the same in every process. None for all three
            arguments lets JAX detect the cluster.
        num_processes: number of processes.
        process_id: number of this process, from 0.

    Raises:
        ConfigurationError: only some of the three arguments are given; one is invalid; JAX detects
            no cluster; process 0 does not answer; its port belongs to another run; or this process
            is already connected.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ConfigurationError(
            f"coordinator={coordinator!r}, num_processes={num_processes!r} and "
            f"process_id={process_id!r}: give all three, or none in a cluster that JAX detects. "
            "(--coordinator HOST:PORT --num-processes N --process-id I)"
        )
    if jax.distributed.is_initialized():
        raise ConfigurationError(
            "distributed=True, but this process is already connected to its run: call "
            "mt.configure(distributed=True) or jax.distributed.initialize once."
        )
    bind: str | None = None
    if coordinator is not None and num_processes is not None and process_id is not None:
        host, port = _checked(coordinator, num_processes, process_id)
        if host in _LOOPBACK:
            bind = coordinator  # by default JAX would listen on every address of the machine
        if process_id > 0:
            _wait_for(host.strip("[]"), port, coordinator)
        else:
            _check_free(port, coordinator)
    start_verdict(process_id)
    # JAX's preemption service would catch SIGTERM. Trainer.fit handles it; elsewhere it must end
    # the process.
    jax.config.update("jax_enable_preemption_service", False)
    # Collectives of CPU devices between processes; JAX's default, made explicit.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    _initialize(coordinator, num_processes, process_id, bind)
    if (gpus := gpus_of_process(os.environ)) is not None:
        jax.config.update("jax_cuda_visible_devices", gpus)
        jax.config.update("jax_rocm_visible_devices", gpus)
    leave_on_errors()


def _initialize(
    coordinator: str | None, num_processes: int | None, process_id: int | None, bind: str | None
) -> None:
    """Connects through JAX; `bind` is the only address on which process 0 listens, None for all."""
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=bind,
            # Otherwise JAX would query the cluster as well, and fail where it does not answer.
            cluster_detection_method="deactivate" if coordinator is not None else None,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"distributed=True, but JAX detects no cluster ({error}). Start the program with the "
            "cluster's launcher (srun, mpirun, ...), or give "
            "coordinator='HOST:PORT', num_processes=N, process_id=I, on the command line "
            "--coordinator HOST:PORT --num-processes N --process-id I."
        ) from error
    except RuntimeError as error:
        raise ConfigurationError(f"this process cannot connect to its run: {error}") from error


def _checked(coordinator: Any, num_processes: Any, process_id: Any) -> tuple[str, int]:
    host, colon, port = str(coordinator).rpartition(":")
    if not (colon and host and port.isdecimal() and 0 < int(port) < 2**16):
        raise ConfigurationError(
            f"coordinator={coordinator!r} must be HOST:PORT of process 0, such as "
            "'10.0.0.1:1234', the same in every process."
        )
    numbers = [x for x in (num_processes, process_id) if type(x) is int]
    if len(numbers) < 2 or not 0 <= process_id < num_processes:
        raise ConfigurationError(
            f"process_id={process_id!r} of num_processes={num_processes!r}: with N processes, "
            "process_id is 0 to N-1, and each number is used once."
        )
    return host, int(port)


def _check_free(port: int, coordinator: str) -> None:
    """Refuses a port in use: JAX would share it with another run and mix up their processes."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return socket.create_server(("", port)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"coordinator={coordinator!r}: process 0 cannot listen there ({error}). "
                    "Another run uses that port, or two processes have process_id 0. Give each run "
                    "its own port and each process its own number."
                ) from error
            time.sleep(0.2)


def _wait_for(host: str, port: int, coordinator: str) -> None:
    """Waits until process 0 listens; JAX would end this process without an exception."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"coordinator={coordinator!r} has not answered for {JOIN_S} s ({error}). "
                    "Check that process 0 runs there, and that this machine can connect to that "
                    "port."
                ) from error
            time.sleep(0.2)
        else:
            return

"""Joining: several processes, usually one a machine, become one run under JAX's own runtime.

JAX finds the others through the cluster's own variables (SLURM, Open MPI, Kubernetes, TPU pods), or
is told where process 0 is. Nothing here starts processes, and nothing talks to them but JAX.
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

# For processes that start late; and for those that are still at work when others have ended: JAX
# ends all of them if that takes longer (marin#8295). One that has died is missed by its heartbeat;
# one that left with sys.exit, while others train, looks like one that has ended.
JOIN_S = 300
SHUTDOWN_S = 600
FREE_S = 10  # for the port of a run that was killed, whose process 0 is not quite gone
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


def join_processes(
    coordinator: str | None, num_processes: int | None, process_id: int | None
) -> None:
    """Joins this process to the others of its run; waits until all have come.

    Args:
        coordinator: `"HOST:PORT"` of process 0, the same in every process. None, with the other
            two, for what JAX can detect.
        num_processes: how many there are.
        process_id: which one this is, from 0.

    Raises:
        ConfigurationError: only some of the three are given, one makes no sense, nothing was
            detected, process 0 does not answer, its port is another run's, or this process has
            joined already.
    """
    given = (coordinator, num_processes, process_id)
    if None in given and given != (None, None, None):
        raise ConfigurationError(
            f"coordinator={coordinator!r}, num_processes={num_processes!r} and "
            f"process_id={process_id!r}: all three are needed, or none, for JAX to find them in a "
            "cluster. (--coordinator HOST:PORT --num-processes N --process-id I)"
        )
    if jax.distributed.is_initialized():
        raise ConfigurationError(
            "distributed=True, and this process has joined its run already: call "
            "mt.configure(distributed=True) or jax.distributed.initialize, once."
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
    # JAX would take SIGTERM and only note it; Trainer.fit takes it, and elsewhere it is to end.
    jax.config.update("jax_enable_preemption_service", False)
    # Collectives of CPU devices between processes; JAX's default, said aloud.
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            coordinator,
            num_processes,
            process_id,
            initialization_timeout=JOIN_S,
            heartbeat_timeout_seconds=HEARTBEAT_S,
            shutdown_timeout_seconds=SHUTDOWN_S,
            coordinator_bind_address=bind,
            # JAX would ask the cluster all the same, and fail where that does not answer.
            cluster_detection_method="deactivate" if coordinator is not None else None,
        )
    except ValueError as error:
        raise ConfigurationError(
            f"distributed=True, and JAX detects no cluster here ({error}). Start the program with "
            "the cluster's own command (srun, mpirun, ...), or say where the processes are: "
            "coordinator='HOST:PORT', num_processes=N, process_id=I, on the command line "
            "--coordinator HOST:PORT --num-processes N --process-id I."
        ) from error
    except RuntimeError as error:
        raise ConfigurationError(f"this process cannot join its run: {error}") from error
    if (gpus := gpus_of_process(os.environ)) is not None:
        jax.config.update("jax_cuda_visible_devices", gpus)
        jax.config.update("jax_rocm_visible_devices", gpus)
    leave_on_errors()


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
            "they are numbered 0 to N-1, each number once."
        )
    return host, int(port)


def _check_free(port: int, coordinator: str) -> None:
    """JAX would listen beside another run on the same port, and the system mix their processes."""
    deadline = time.monotonic() + FREE_S
    while True:
        try:
            return socket.create_server(("", port)).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"coordinator={coordinator!r}: process 0 cannot listen there ({error}). "
                    "Another run has that port, or two processes have number 0: give each run a "
                    "port of its own, and each process its own number."
                ) from error
            time.sleep(0.2)


def _wait_for(host: str, port: int, coordinator: str) -> None:
    """Waits until process 0 listens: JAX itself would end this process without an exception."""
    deadline = time.monotonic() + JOIN_S
    while True:
        try:
            socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > deadline:
                raise ConfigurationError(
                    f"coordinator={coordinator!r} has not answered for {JOIN_S} s ({error}): is "
                    "process 0 running there, and may this machine connect to that port?"
                ) from error
            time.sleep(0.2)
        else:
            return

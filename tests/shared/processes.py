"""Fresh Python processes, which have not started JAX yet."""

import os
import socket
import subprocess
import sys

from forks import Fork

# What this process has set for itself, or a user's shell may have set.
_SETTINGS = ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")


def clean_environment(**settings):
    """The environment of a fresh shell, plus `settings`."""
    env = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    return {**env, **settings}


def run_python(*arguments, timeout_s=400, **settings):
    """Standard output of `python ARGUMENTS`, in a clean environment plus `settings`.

    A process that hangs or fails is an AssertionError that shows what it wrote.
    """
    process = subprocess.run(
        [sys.executable, *arguments],
        env=clean_environment(**settings),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr[-4000:]}"
    return process.stdout


def ended(process, timeout_s=400):
    """It and what it wrote, once it is over: a `subprocess.CompletedProcess`."""
    try:
        out, errors = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return subprocess.CompletedProcess([], process.returncode, out, errors)


def run_fork(*arguments, timeout_s=400, **settings):
    """As `run_python`, without the time that imports take: for all that is not about the start."""
    process = ended(Fork(*arguments, env=clean_environment(**settings)), timeout_s)
    assert process.returncode == 0, f"{process.stdout}\n{process.stderr[-4000:]}"
    return process.stdout


def free_port():
    """A port of the loopback interface that nobody listens on just now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def run_processes(program, num_processes, *arguments, timeout_s=400, **settings):
    """Standard output of process 0 of `python PROGRAM PORT PROCESSES PROCESS ARGUMENTS`.

    What JAX's collectives say there when they connect is left out. One process that fails, or all
    that hang, are an AssertionError that shows what they wrote.
    """
    port = str(free_port())
    running = [
        Fork(program, port, num_processes, process, *arguments, env=clean_environment(**settings))
        for process in range(num_processes)
    ]
    try:
        outputs = [process.communicate(timeout=timeout_s) for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
    for process, (out, errors) in zip(running, outputs, strict=True):
        assert process.returncode == 0, f"{out}\n{errors[-4000:]}"
    lines = outputs[0][0].splitlines(keepends=True)
    # Its threads write in pieces: a line may begin in the middle.
    is_gloo = lambda line: line.startswith("[Gloo]") or "connected peer ranks" in line
    return "".join(line for line in lines if not is_gloo(line))

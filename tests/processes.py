"""Fresh Python processes, which have not started JAX yet."""

import os
import subprocess
import sys

# What this process has set for itself, or a user's shell may have set.
_SETTINGS = ("NPROC", "XLA_FLAGS", "JAX_NUM_CPU_DEVICES", "JAX_PLATFORMS")


def clean_environment(**settings):
    """The environment of a fresh shell, plus `settings`."""
    env = {name: value for name, value in os.environ.items() if name not in _SETTINGS}
    return {**env, **settings}


def run_python(*arguments, timeout_s=120, **settings):
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

"""Starts JAX for a command, on accelerators or simulated devices."""

import os
from typing import Any

import jax

import multitower as mt
from multitower.cli.console import be_quiet
from multitower.cli.starting.together import Together, hosts_in_words, keep_stdout_clean
from multitower.hardware.configuration import CPU_THREADS
from multitower.hardware.devices import device_name
from multitower.processes.together import is_first

_SIMULATED_BY_DEFAULT = 2


def start_devices(
    devices: int | None,
    simulate: int | None,
    towers: int | None,
    *,
    by_default: int = _SIMULATED_BY_DEFAULT,
    together: Together | None = None,
) -> str:
    """Starts JAX.

    Args:
        devices: use this many of the existing devices, the first ones; None for all.
        simulate: use this many simulated CPU devices instead; None for none.
        towers: the towers of the run, or None: more simulated devices would stay idle.
        by_default: simulate this many devices if neither is given and there are no accelerators.
        together: other processes to join first; the numbers above are then of each process.

    Returns:
        Which devices the command runs on, in words.

    Raises:
        ConfigurationError: `simulate` is not a number of devices, or JAX has started with another.
        DeviceError: there are fewer devices than requested, or JAX cannot start.
    """
    settings = together.settings() if together else {}
    if not settings:
        return _start(devices, simulate, towers, by_default)
    if simulate is None:
        _simulate_if_only_cpus(by_default, towers)
    mt.configure(simulated_devices=simulate, **settings)
    keep_stdout_clean()
    where = _start(devices, simulate, towers, by_default)
    if not is_first():
        be_quiet()
    return f"{hosts_in_words()} with {where} each"


def _start(devices: int | None, simulate: int | None, towers: int | None, by_default: int) -> str:
    if simulate is not None:
        mt.configure(simulated_devices=simulate)
        return _counted(simulate, "simulated CPU device")
    _pin_threads()
    default = _simulate_if_only_cpus(by_default, towers) if devices is None else None
    there = mt.devices()
    if devices is not None and not 1 <= devices <= len(there):
        names = ", ".join(map(device_name, there))
        raise mt.DeviceError(
            f"--devices {devices}: this machine has {names}. Use --devices 1"
            f"{f' to {len(there)}' if len(there) > 1 else ''}, or simulate more on the CPU: "
            f"--simulate {max(devices, 1)}."
        )
    used = there[:devices]
    if used[0].platform != "cpu":
        return f"{_counted(len(used), used[0].platform.upper())} ({used[0].device_kind})"
    if default is not None:
        return (
            f"{_counted(len(used), 'simulated CPU device')}, as there is no accelerator "
            "(--simulate N for another number)"
        )
    return _counted(len(used), "CPU device")


def _simulate_if_only_cpus(count: int, towers: int | None) -> int | None:
    """Makes JAX simulate CPU devices; returns how many, or None if the number is fixed already.

    Whether there are accelerators is known only after JAX has started, and then the number of CPU
    devices is fixed. So it is set in any case: if JAX finds accelerators, it uses these.
    """
    flagged = "xla_force_host_platform_device_count" in os.environ.get("XLA_FLAGS", "")
    config: Any = jax.config  # its options are not in its type
    if flagged or config.jax_num_cpu_devices > 0:
        return None  # the user has set the number
    count = min(count, towers or count)
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:
        return None  # JAX has started already: another program calls this
    return count


def _pin_threads() -> None:
    # As mt.configure does: bits of CPU kernels depend on the size of XLA's thread pool, so that
    # --devices 1 must have the pool of --simulate 1; and collectives can dead-lock in a small one.
    os.environ["NPROC"] = str(CPU_THREADS)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"

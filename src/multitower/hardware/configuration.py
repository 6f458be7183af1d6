"""Configuration: what must be set before JAX starts, and threads that fit the devices.

`configure` sets the size of XLA's CPU thread pool for two reasons. XLA's CPU collectives dead-lock
when there are more CPU devices than threads (seen on two cores). And XLA's CPU kernels choose their
blocking by the size of the pool, so that their last bits depend on it.
"""

import os
import re
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from multitower.errors import ConfigurationError, warn, whole_number
from multitower.processes.joining import join_processes

# One size for every run: bits of CPU kernels depend on it (see ARCHITECTURE.md, "Same bits").
CPU_THREADS = 32
_THREADS_PER_DEVICE = 2
_ONEDNN_FLAGS = "--xla_cpu_use_onednn=true --xla_cpu_experimental_onednn_custom_call=true"
_ONEDNN_SINCE = (0, 12)  # JAX 0.10 accepts the flags, without effect
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S+\s*")


def configure(
    *,
    simulated_devices: int | None = None,
    visible_devices: str | int | Sequence[int] | None = None,
    memory_fraction: float | None = None,
    preallocate: bool | None = None,
    onednn: bool = False,
    distributed: bool = False,
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
) -> None:
    """Sets devices, memory and processes, before JAX starts.

    Call it first, right after the imports: JAX starts at the first array, `jax.devices()` or
    `jax.jit` call. Settings that you do not pass stay as they are. Repeating the same settings
    later is allowed and does nothing, so you can run a notebook cell twice.

    Args:
        simulated_devices: this many CPU devices in this process (1 or more), whatever GPUs the
            machine has. They show what a program computes on several devices; they do not make
            it faster. Also sets `NPROC`, the size of XLA's CPU thread pool, to 32 (or two per
            device, if that is more): too few threads dead-lock XLA's CPU collectives, and another
            size can change the last bits.
        visible_devices: the GPUs that JAX may see, as `"0,1"`, `0` or `[0, 1]`.
        memory_fraction: the share of each GPU's memory that JAX may take, in (0, 1].
        preallocate: take that share at the start (JAX's default), or grow as needed.
        onednn: let XLA call oneDNN's kernels on CPUs, as TensorFlow and PyTorch do, which is faster
            where convolutions are most of the work. The last bits differ from those without it,
            and are as stable over runs, devices and processes. It needs JAX 0.12 or newer on x86;
            elsewhere it changes nothing.
        distributed: this process is one of several, usually one per machine, that make one run:
            join them with `jax.distributed.initialize` and wait until all have started.
            `simulated_devices` and the other settings are those of each process. Towers then run
            on the devices of all processes. `devices=2` and `devices="gpu:0"` mean these devices of
            every process; a list of `jax.Device` means exactly these. Every process must make the
            same calls, with the same values.
        coordinator: `"HOST:PORT"` of process 0, where JAX cannot detect a cluster; the same in
            every process, as is `num_processes`. All three are needed, or none.
        num_processes: the number of processes of the run.
        process_id: the number of this process, from 0.

    Raises:
        ConfigurationError: JAX has already started, a value is wrong, or there is no cluster to
            join.

    Example:
        >>> import multitower as mt
        >>> mt.configure(simulated_devices=8)
        >>> len(mt.devices())
        8
    """
    if simulated_devices is not None:
        given = ("simulated_devices", simulated_devices, 1, ConfigurationError)
        simulated_devices = whole_number(*given)
    _check_settings(memory_fraction, preallocate)
    settings = dict(
        simulated_devices=simulated_devices,
        visible_devices=_visible_list(visible_devices),
        memory_fraction=memory_fraction,
        preallocate=preallocate,
        onednn=onednn or None,
        distributed=distributed or None,
        coordinator=coordinator,
        num_processes=num_processes,
        process_id=process_id,
    )
    if not distributed and (coordinator, num_processes, process_id) != (None, None, None):
        raise ConfigurationError(
            f"coordinator={coordinator!r}, num_processes={num_processes!r} and "
            f"process_id={process_id!r} are for distributed=True: add it, or leave them out."
        )
    wanted = {name: value for name, value in settings.items() if value is not None}
    has_joined, started = _applied.get("distributed"), _started()
    if started or has_joined:
        fixed = wanted if started else wanted.keys() & _OF_CLUSTERS
        changed = [name for name in wanted if name in fixed and _applied.get(name) != wanted[name]]
        if changed:
            late = "came too late: JAX has already started its devices, and they"
            if not started:
                late = "came too late: this process has joined others already, and that"
            raise ConfigurationError(
                f"configure({', '.join(f'{n}={wanted[n]!r}' for n in changed)}) {late} cannot be "
                "changed in this process. Call mt.configure right after the imports, before the "
                "first array, jax.devices() or jax.jit call (in a notebook: restart the kernel "
                "first)."
            )
    if started:
        return
    if simulated_devices is not None:
        _simulate(simulated_devices)
    if onednn:
        _use_onednn()
    if distributed and not has_joined:
        join_processes(coordinator, num_processes, process_id)
    if visible_devices is not None:  # after joining: JAX then sets them too
        jax.config.update("jax_cuda_visible_devices", settings["visible_devices"])
        jax.config.update("jax_rocm_visible_devices", settings["visible_devices"])
    if memory_fraction is not None:
        # jaxlib refuses both names at once, and this one is the newer.
        os.environ.pop("XLA_PYTHON_CLIENT_MEM_FRACTION", None)
        os.environ["XLA_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    if preallocate is not None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if preallocate else "false"
    _applied.update(wanted)


def warn_if_bits_depend_on_threads(found: Sequence[jax.Device]) -> None:
    """Warns, once, if the bits of a run on CPUs depend on the value of `NPROC` in this process."""
    if found[0].platform != "cpu" or os.environ.get("NPROC") == str(CPU_THREADS):
        return
    threads = _threads_for(len(found))
    if threads == CPU_THREADS:
        advice = (
            f"mt.configure(simulated_devices={len(found)}), before JAX starts, makes it {threads} "
            f"in all of them; so does starting Python with NPROC={threads}."
        )
    else:
        advice = (
            f"{len(found)} devices need {threads}. To compare bits with a run on fewer devices, "
            f"start that one with NPROC={threads} XLA_FLAGS=--xla_force_host_platform_device_count="
            "8, for 8 devices, and without simulated_devices=."
        )
    _warn_once(
        "bits",
        "the last bits of XLA's CPU kernels depend on the size of its thread pool, and NPROC is "
        f"{os.environ.get('NPROC', 'not set')}: the same bits come only from processes with the "
        f"same one. {advice}",
    )


def warn_if_threads_are_few(found: Sequence[jax.Device]) -> None:
    """Warns, once, if CPU devices have so few threads that XLA's collectives could dead-lock."""
    num_cpu = sum(one.platform == "cpu" for one in found)
    said = os.environ.get("NPROC", "")
    threads = int(said) if said.isdecimal() else os.cpu_count() or 1
    if num_cpu < 2 or threads >= _THREADS_PER_DEVICE * num_cpu:
        return
    _warn_once(
        "threads",
        f"{num_cpu} CPU devices share a pool of {threads} threads: XLA's collectives can dead-lock "
        "('may be stuck', then an abort). Set them up with "
        f"mt.configure(simulated_devices={num_cpu}), or start Python with "
        f"NPROC={_threads_for(num_cpu)}.",
    )


def _threads_for(num_devices: int) -> int:
    """The value of `NPROC` for so many CPU devices: one for all, as long as threads suffice."""
    return max(CPU_THREADS, _THREADS_PER_DEVICE * num_devices)


def uses_onednn() -> bool:
    """Whether CPU programs of this process call oneDNN; their bits depend on it."""
    is_effective = jax.__version_info__ >= _ONEDNN_SINCE
    return is_effective and _has_onednn_flags()


def _warn_once(subject: str, text: str) -> None:
    if subject not in _applied:
        _applied[subject] = True
        warn(text)


# What `configure` has set in this process: JAX cannot be asked for all of it afterwards.
_applied: dict[str, Any] = {}
_OF_CLUSTERS = {"distributed", "coordinator", "num_processes", "process_id"}


def _check_settings(memory_fraction: float | None, preallocate: bool | None) -> None:
    is_number = isinstance(memory_fraction, int | float) and not isinstance(memory_fraction, bool)
    if memory_fraction is not None and not (is_number and 0 < memory_fraction <= 1):
        raise ConfigurationError(
            f"memory_fraction={memory_fraction!r} must be above 0 and at most 1: it is a share of "
            "each GPU's memory, 0.9 for nine tenths."
        )
    if not (preallocate is None or isinstance(preallocate, bool)):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigurationError(f"preallocate={preallocate!r} must be True or False.")


def _visible_list(visible: str | int | Sequence[int] | None) -> str | None:
    if visible is None:
        return None
    if isinstance(visible, str | int | np.integer):
        text = str(visible)
    else:
        text = ",".join(str(i) for i in visible)
    if not re.fullmatch(r"\d+(,\d+)*", text):
        raise ConfigurationError(
            f"visible_devices={visible!r} must list GPU numbers, such as '0,1', 0 or [0, 1]."
        )
    return text


def _started() -> bool:
    # JAX refuses this update once its backends run: the one public sign that they do.
    config: Any = jax.config  # its options have no types in JAX 0.10
    current = config.jax_num_cpu_devices
    probe = 1 if current != 1 else 2
    try:
        jax.config.update("jax_num_cpu_devices", probe)
    except RuntimeError:
        return True
    jax.config.update("jax_num_cpu_devices", current)
    return False


def _simulate(count: int) -> None:
    # An XLA flag and an option of JAX set this number. The option counts: the flag is removed.
    flags = _DEVICE_COUNT_FLAG.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    if "XLA_FLAGS" in os.environ:
        os.environ["XLA_FLAGS"] = flags
    os.environ["NPROC"] = str(_threads_for(count))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _use_onednn() -> None:
    if jax.__version_info__ < _ONEDNN_SINCE:
        _warn_once("onednn", f"JAX {jax.__version__} compiles for CPUs as without onednn=True.")
    if not _has_onednn_flags():
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_ONEDNN_FLAGS}".strip()


def _has_onednn_flags() -> bool:
    """Whether XLA_FLAGS has all flags of oneDNN, from `configure` or the shell, in any order."""
    return set(_ONEDNN_FLAGS.split()) <= set(os.environ.get("XLA_FLAGS", "").split())

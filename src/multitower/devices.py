"""Devices: what this process may use, and what must be set before JAX starts.

Source for the thread-pool rule: on two cores XLA's CPU collectives dead-lock when there are more
CPU devices than threads, and XLA's CPU kernels choose their blocking by the size of the thread
pool, so that their last bits depend on it. `configure` pins it.
"""

import contextlib
import os
import re
import warnings
from collections.abc import Generator, Sequence
from typing import Any

import jax

from multitower.errors import ConfigurationError, DeviceError, MultitowerWarning

DeviceSpec = int | str | jax.Device | Sequence[str | jax.Device]

# One size for every run: bits of CPU kernels depend on it (see ARCHITECTURE.md, "Same bits").
CPU_THREADS = 32
_THREADS_PER_DEVICE = 2
_DEVICE_COUNT_FLAG = re.compile(r"--xla_force_host_platform_device_count=\S+\s*")


def configure(
    *,
    simulated_devices: int | None = None,
    visible_devices: str | int | Sequence[int] | None = None,
    memory_fraction: float | None = None,
    preallocate: bool | None = None,
) -> None:
    """Sets what must be set before JAX starts its backends.

    Call it first, right after the imports: JAX starts at the first array, `jax.devices()` or
    `jax.jit` call. Settings that are not named stay as they are; repeating the settings of a
    process that has already started is allowed and does nothing (a notebook cell run twice).

    Args:
        simulated_devices: this many CPU devices in this process (1 or more), whatever GPUs the
            machine has. They prove what a program means; they make nothing faster. Also sets
            `NPROC`, the size of XLA's CPU thread pool, to 32 (or two per device, if that is
            more): too few threads dead-lock XLA's CPU collectives, and another number can change
            the last bits.
        visible_devices: the GPUs that JAX may see, as `"0,1"`, `0` or `[0, 1]`.
        memory_fraction: the share of each GPU's memory that JAX may take, in (0, 1].
        preallocate: take that share at the start (JAX's default), or grow as needed.

    Raises:
        ConfigurationError: JAX has already started, or a value makes no sense.

    Example:
        >>> import multitower as mt
        >>> mt.configure(simulated_devices=8)
        >>> len(mt.devices())
        8
    """
    _check_settings(simulated_devices, memory_fraction)
    settings = dict(
        simulated_devices=simulated_devices,
        visible_devices=_visible_list(visible_devices),
        memory_fraction=memory_fraction,
        preallocate=preallocate,
    )
    wanted = {name: value for name, value in settings.items() if value is not None}
    if _started():
        changed = [name for name, value in wanted.items() if _applied.get(name) != value]
        if changed:
            raise ConfigurationError(
                f"configure({', '.join(f'{n}={wanted[n]!r}' for n in changed)}) came too late: JAX "
                "has already started its devices, and they cannot be changed in this process. Call "
                "mt.configure right after the imports, before the first array, jax.devices() or "
                "jax.jit call (in a notebook: restart the kernel first)."
            )
        return
    if simulated_devices is not None:
        _simulate(simulated_devices)
    if visible_devices is not None:
        jax.config.update("jax_cuda_visible_devices", settings["visible_devices"])
        jax.config.update("jax_rocm_visible_devices", settings["visible_devices"])
    if memory_fraction is not None:
        os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = str(memory_fraction)
    if preallocate is not None:
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "true" if preallocate else "false"
    _applied.update(wanted)


def devices(spec: DeviceSpec | None = None, *, soft: bool = False) -> list[jax.Device]:
    """Lists devices of this process.

    Args:
        spec: nothing for all local accelerators, or all CPU devices where there are none; a
            number for the first so many of those; `"gpu"`, `"cpu"`, `"gpu:1"`, `"cpu:0"` for a
            platform or one device of it; a list of names or devices.
        soft: soft placement: what is missing is replaced by what there is, with a warning.

    Returns:
        A list of `jax.Device`, at least one, none of them twice.

    Raises:
        DeviceError: what was asked for is not there (and not `soft`), or makes no sense.

    Example:
        >>> import multitower as mt
        >>> [device.platform for device in mt.devices(2)]
        ['cpu', 'cpu']
    """
    found = _find(spec, soft)
    _warn_if_threads_are_few(found)
    return found


@contextlib.contextmanager
def device(spec: str | jax.Device, *, soft: bool = False) -> Generator[jax.Device]:
    """Makes one device the home of the arrays that are made inside.

    Args:
        spec: a name as for `devices`, such as `"gpu:0"`, or a `jax.Device`.
        soft: fall back to a device that is there, with a warning.

    Yields:
        The `jax.Device`.

    Raises:
        DeviceError: the device is not there and `soft` is false.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> with mt.device("cpu:1"):
        ...     x = jnp.zeros(3)
        >>> x.devices()
        {CpuDevice(id=1)}
    """
    chosen = devices(spec, soft=soft)[0]
    with jax.default_device(chosen):
        yield chosen


# What `configure` has set in this process: JAX cannot be asked for all of it afterwards.
_applied: dict[str, Any] = {}


def _check_settings(simulated_devices: int | None, memory_fraction: float | None) -> None:
    if simulated_devices is not None and (
        isinstance(simulated_devices, bool)
        or not isinstance(simulated_devices, int)  # pyright: ignore[reportUnnecessaryIsInstance]
        or simulated_devices < 1
    ):
        raise ConfigurationError(
            f"simulated_devices={simulated_devices!r} must be a whole number, 1 or more."
        )
    if memory_fraction is not None and not 0 < memory_fraction <= 1:
        raise ConfigurationError(
            f"memory_fraction={memory_fraction!r} must be above 0 and at most 1: it is a share of "
            "each GPU's memory, 0.9 for nine tenths."
        )


def _visible_list(visible: str | int | Sequence[int] | None) -> str | None:
    if visible is None:
        return None
    text = visible if isinstance(visible, str) else None
    if text is None:
        text = str(visible) if isinstance(visible, int) else ",".join(str(i) for i in visible)
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
    # The flag and the option contradict each other in JAX: the later word, ours, counts.
    flags = _DEVICE_COUNT_FLAG.sub("", os.environ.get("XLA_FLAGS", "")).strip()
    if "XLA_FLAGS" in os.environ:
        os.environ["XLA_FLAGS"] = flags
    os.environ["NPROC"] = str(max(CPU_THREADS, _THREADS_PER_DEVICE * count))
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def _find(spec: DeviceSpec | None, soft: bool) -> list[jax.Device]:
    if spec is None:
        return list(jax.local_devices())
    if isinstance(spec, bool):
        raise DeviceError(f"devices={spec!r} is neither a number of devices nor a name.")
    if isinstance(spec, int):
        return _first(spec, soft)
    if isinstance(spec, str):
        return _named(spec, soft)
    if isinstance(spec, jax.Device):
        return [spec]
    found = [one for item in spec for one in _find(item, soft)]
    if not found:
        raise DeviceError("devices=[] is an empty list: name at least one device.")
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found) and not soft:
        twice = next(one for one in found if found.count(one) > 1)
        raise DeviceError(
            f"devices={spec!r} names {_name(twice)} twice. A device can be listed once; to run "
            "several towers on it, raise towers= instead."
        )
    return unique


def _first(count: int, soft: bool) -> list[jax.Device]:
    everything = list(jax.local_devices())
    if count < 1:
        raise DeviceError(f"devices={count}: at least one device is needed.")
    if count <= len(everything):
        return everything[:count]
    missing = (
        f"devices={count} were asked for, and this process has {len(everything)}: "
        f"{', '.join(_name(d) for d in everything)}."
    )
    if soft:
        _fall_back(missing, everything)
        return everything
    raise DeviceError(
        f"{missing} Ask for at most {len(everything)}, or pass soft=True to mt.devices to take "
        f"what there is, or simulate them on the CPU: mt.configure(simulated_devices={count}) "
        "before JAX starts."
    )


def _named(name: str, soft: bool) -> list[jax.Device]:
    match = re.fullmatch(r"([a-zA-Z]+)(?::(\d+))?", name)
    if not match:
        raise DeviceError(f"devices={name!r} is not a device name: say 'gpu', 'gpu:0' or 'cpu:1'.")
    platform, index = match.group(1).lower(), match.group(2)
    try:
        local = jax.local_devices(backend=platform)
    except RuntimeError:
        local = []
    if index is None and local:
        return list(local)
    if index is not None and int(index) < len(local):
        return [local[int(index)]]
    there = list(jax.local_devices())
    cpus = [d for d in there if d.platform == "cpu"]
    names = ", ".join(_name(d) for d in there)
    missing = f"there is no device {name!r} in this process; it has {names}."
    if soft:
        chosen = local[:1] or there[:1] if index is not None else (cpus or there)
        _fall_back(missing, chosen)
        return chosen
    raise DeviceError(f"{missing} Name one of these, or pass soft=True to fall back to one.")


def _fall_back(missing: str, chosen: Sequence[jax.Device]) -> None:
    names = ", ".join(_name(d) for d in chosen)
    warnings.warn(f"{missing} Using {names} instead.", MultitowerWarning, stacklevel=5)


def _name(one: jax.Device) -> str:
    return f"{one.platform}:{one.id}"


def _warn_if_threads_are_few(found: Sequence[jax.Device]) -> None:
    num_cpu = sum(one.platform == "cpu" for one in found)
    threads = int(os.environ.get("NPROC") or os.cpu_count() or 1)
    if num_cpu < 2 or threads >= _THREADS_PER_DEVICE * num_cpu or "threads" in _applied:
        return
    _applied["threads"] = threads  # once
    warnings.warn(
        f"{num_cpu} CPU devices share a pool of {threads} threads: XLA's collectives can dead-lock "
        "('may be stuck', then an abort). Set them up with "
        f"mt.configure(simulated_devices={num_cpu}), or start Python with NPROC={CPU_THREADS}.",
        MultitowerWarning,
        stacklevel=3,
    )

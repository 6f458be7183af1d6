"""Devices: which ones this process has, by number or by name."""

import contextlib
import re
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import jax
import numpy as np

from multitower.errors import DeviceError, warn
from multitower.hardware.configuration import warn_if_threads_are_few

DeviceSpec = int | str | jax.Device | Sequence[str | jax.Device]


def devices(spec: DeviceSpec | None = None, *, soft: bool = False) -> list[jax.Device]:
    """Lists devices of this process, by number or by name.

    Args:
        spec: None for all local accelerators, or all CPU devices if there are none; a number N
            for the first N of those; `"gpu"`, `"cpu"`, `"gpu:1"`, `"cpu:0"` for a platform or one
            device of it; a list of names or devices.
        soft: soft placement: use other devices in place of missing ones, with a warning.

    Returns:
        A list of `jax.Device`, at least one, without repetition.

    Raises:
        DeviceError: a device does not exist (and not `soft`), `spec` is of the wrong kind, or JAX
            cannot start its devices.

    Example:
        >>> import multitower as mt
        >>> [device.platform for device in mt.devices(2)]
        ['cpu', 'cpu']
    """
    found = _find(spec, soft)
    warn_if_threads_are_few(found)
    return found


@contextlib.contextmanager
def device(spec: str | jax.Device, *, soft: bool = False) -> Generator[jax.Device]:
    """Makes new arrays on one device, inside a `with` block.

    Args:
        spec: a name as for `devices`, such as `"gpu:0"`, or a `jax.Device`.
        soft: use another device if this one is missing, with a warning.

    Yields:
        The `jax.Device`.

    Raises:
        DeviceError: the device does not exist and `soft` is false, or `spec` is a number or a list.

    Example:
        >>> import jax.numpy as jnp
        >>> import multitower as mt
        >>> with mt.device("cpu:1"):
        ...     x = jnp.zeros(3)
        >>> x.devices()
        {CpuDevice(id=1)}
    """
    if not isinstance(spec, str | jax.Device):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise DeviceError(
            f"mt.device({spec!r}) is not the name of one device: say mt.device('cpu:1'), or for "
            "several devices mt.devices."
        )
    chosen = devices(spec, soft=soft)[0]
    with jax.default_device(chosen):
        yield chosen


def hashable_spec(spec: DeviceSpec | None) -> DeviceSpec | None:
    """The same devices; a tuple of them for a list, a `mesh.devices` or an iterator.

    Example:
        >>> from multitower.hardware.devices import hashable_spec
        >>> hashable_spec(["cpu:0", "cpu:1"]), hashable_spec(2)
        (('cpu:0', 'cpu:1'), 2)
    """
    if isinstance(spec, np.ndarray):
        return tuple(spec.flat)
    if isinstance(spec, Iterable) and not isinstance(spec, str | jax.Device):
        return tuple(spec)
    return spec


def host_device() -> jax.Device:
    """A CPU device of this process, for arrays that stay in the host's memory.

    Raises:
        DeviceError: JAX has none, because `JAX_PLATFORMS` leaves CPUs out.
    """
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as error:
        config: Any = jax.config  # its options are not in its type
        named = config.jax_platforms
        raise DeviceError(
            f"JAX_PLATFORMS={named} leaves out the CPU, in whose memory stages= and the like keep "
            f"arrays that no device needs yet. Say JAX_PLATFORMS={named},cpu."
        ) from error


def devices_in_words(count: int) -> str:
    """A number of devices, in words.

    Example:
        >>> from multitower.hardware.devices import devices_in_words
        >>> devices_in_words(1), devices_in_words(8)
        ('1 device', '8 devices')
    """
    return f"{count} device{'' if count == 1 else 's'}"


def _find(spec: DeviceSpec | None, soft: bool) -> list[jax.Device]:
    if spec is None:
        return _all()
    if isinstance(spec, bool):
        raise _not_devices(spec)
    if isinstance(spec, int | np.integer):
        return _first(int(spec), soft)
    if isinstance(spec, str):
        return _named(spec, soft)
    if isinstance(spec, jax.Device):
        return [spec]
    if not isinstance(spec, Iterable):  # pyright: ignore[reportUnnecessaryIsInstance]
        raise _not_devices(spec)
    items, kind = list(spec), _all()[0].platform
    for item in items:
        if isinstance(item, int | np.integer):
            raise DeviceError(
                f"devices={items!r}: in a list a number could be a count or a place. Say "
                f"devices={max(1, len(items))} for the first {len(items)}, or name them: "
                f"{[one if isinstance(one, str) else f'{kind}:{one}' for one in items]!r}."
            )
    found = [one for item in items for one in _find(item, soft)]
    if not found:
        raise DeviceError("devices=[] is an empty list: name at least one device.")
    unique = list(dict.fromkeys(found))
    if len(unique) < len(found) and not soft:
        twice = next(one for one in found if found.count(one) > 1)
        raise DeviceError(
            f"devices={spec!r} names {device_name(twice)} twice. A device can be listed once; to "
            "run several towers on it, raise towers= instead."
        )
    return unique


def _not_devices(spec: object) -> DeviceError:
    return DeviceError(
        f"devices={spec!r} is neither a number of devices, a name, nor a list of them: say 2, "
        "'gpu' or ['gpu:0', 'gpu:1']."
    )


def _first(count: int, soft: bool) -> list[jax.Device]:
    everything = _all()
    if count < 1:
        raise DeviceError(f"devices={count}: at least one device is needed.")
    if count <= len(everything):
        return everything[:count]
    missing = f"devices={count}, but this process has {len(everything)}: {_names(everything)}."
    if soft:
        _fall_back(missing, everything)
        return everything
    raise DeviceError(
        f"{missing} Ask for at most {len(everything)}, or pass soft=True to mt.devices to take "
        f"what there is, or simulate them on the CPU: mt.configure(simulated_devices={count}) "
        "before JAX starts."
    )


def _all() -> list[jax.Device]:
    try:
        return list(jax.local_devices())
    except (AssertionError, RuntimeError) as error:
        config: Any = jax.config  # its options are not in its type
        why = str(error) or (  # JAX asserts that it has found one
            f"JAX_PLATFORMS={config.jax_platforms} names what it does not find: their driver, or "
            "the package of JAX for them, such as jax[cuda12], is missing. Install it, or unset "
            "JAX_PLATFORMS to use what there is."
        )
        raise DeviceError(f"JAX cannot start its devices: {why}") from error


def _named(name: str, soft: bool) -> list[jax.Device]:
    match = re.fullmatch(r"([a-zA-Z]+)(?::(\d+))?", name)
    if not match:
        raise DeviceError(f"devices={name!r} is not a device name: say 'gpu', 'gpu:0' or 'cpu:1'.")
    platform, index = match.group(1).lower(), match.group(2)
    try:
        local = jax.local_devices(backend=platform)
    except (AssertionError, RuntimeError):
        local = []
    if index is None and local:
        return list(local)
    if index is not None and int(index) < len(local):
        return [local[int(index)]]
    there = _all()
    cpus = [d for d in there if d.platform == "cpu"]
    missing = f"there is no device {name!r} in this process; it has {_names(there)}."
    if soft:
        chosen = local[:1] or there[:1] if index is not None else (cpus or there)
        _fall_back(missing, chosen)
        return chosen
    raise DeviceError(f"{missing} Name one of these, or pass soft=True to fall back to one.")


def _names(own: Sequence[jax.Device]) -> str:
    """The names of all devices of this process; `jax.Device.id` counts those of other processes."""
    kinds = [one.platform for one in own]
    return ", ".join(f"{kind}:{kinds[:place].count(kind)}" for place, kind in enumerate(kinds))


def _fall_back(missing: str, chosen: Sequence[jax.Device]) -> None:
    names = ", ".join(device_name(d) for d in chosen)
    warn(f"{missing} Using {names} instead.")


def device_name(device: jax.Device) -> str:
    """A device's name in messages and reports, such as `gpu:0`."""
    return f"{device.platform}:{device.id}"

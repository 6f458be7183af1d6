"""Provenance: which software and which machine a result comes from."""

import importlib.metadata
import os
import platform
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "numpy", "optax", "multitower")


def versions() -> dict[str, str]:
    """The versions of Python and of the packages that a result depends on.

    Returns:
        Name to version. A package that runs from a source tree, without having been installed,
        has the version "not installed".

    Example:
        >>> from multitower.hardware.provenance import versions
        >>> sorted(versions())
        ['jax', 'jaxlib', 'multitower', 'numpy', 'optax', 'python']
    """
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def host(device: jax.Device) -> dict[str, Any]:
    """The machine, as far as speed and bits depend on it.

    Args:
        device: one of the devices in use.

    Returns:
        `system`, `cpu_cores`, `NPROC` (the size of XLA's CPU thread pool, None for one thread per
        core), `platform` ("cpu", "gpu", "tpu") and `device_kind`.

    Example:
        >>> import multitower as mt
        >>> from multitower.hardware.provenance import host
        >>> host(mt.devices()[0])["platform"]
        'cpu'
    """
    return {
        "system": platform.platform(),
        "cpu_cores": os.cpu_count(),
        "NPROC": os.environ.get("NPROC"),
        "platform": device.platform,
        "device_kind": device.device_kind,
    }

"""doctor: reports devices, memory and settings, and checks that devices give the same bits."""

import json
import os
import socket
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from multitower.hardware import provenance
from multitower.hardware.devices import device_name
from multitower.hardware.devices import devices as find_devices
from multitower.processes.together import are_several, texts_of_all
from multitower.runs.exchanges import time_exchanges
from multitower.stages.marks import cut
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.train import train_step
from multitower.towers.placement import place

_ENVIRONMENT = (
    "CUDA_VISIBLE_DEVICES",
    "JAX_PLATFORMS",
    "NPROC",
    "XLA_FLAGS",
    "XLA_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_MEM_FRACTION",
    "XLA_PYTHON_CLIENT_PREALLOCATE",
)


def examine() -> dict[str, Any]:
    """Reports on the devices, and trains a small model on them to compare their results.

    Returns:
        `devices`: for each its `name`, `kind` and, if the platform reports them, `bytes_in_use` and
        `bytes_limit` of its memory. `environment`: the environment variables that affect devices,
        None if not set. `host` and `versions`. `same_bits`: whether one device and all devices,
        with the same number of towers, ended with the same bits. `same_bits_in_stages`: the same
        with the model cut in two; None if a process has fewer than two devices, or processes have
        different numbers of them. With several processes, all of which must call this, also
        `processes`: for each its `host` and `devices`; and `exchanges`, as from
        `multitower.runs.exchanges.time_exchanges`.

    Raises:
        DeviceError: JAX has no device.

    Example:
        >>> from multitower.runs.doctor import examine
        >>> findings = examine()  # doctest: +SKIP
        >>> findings["same_bits"], findings["devices"][0]["name"]  # doctest: +SKIP
        (True, 'cpu:0')
    """
    found = find_devices()
    own = {"host": socket.gethostname(), "devices": [device_name(one) for one in found]}
    of_all = [json.loads(one) for one in texts_of_all(json.dumps(own))]
    several = {"processes": of_all, "exchanges": time_exchanges()} if are_several() else {}
    towers = len(place(None, None).devices)
    return {
        **several,
        "devices": [_device(one) for one in found],
        "environment": {name: os.environ.get(name) for name in _ENVIRONMENT},
        "host": provenance.host(found[0]),
        "versions": provenance.versions(),
        "same_bits": _trained_on(found[:1], towers) == _trained_on(None, towers),
        "same_bits_in_stages": _same_in_stages(found, [len(one["devices"]) for one in of_all]),
    }


def _device(one: jax.Device) -> dict[str, Any]:
    memory = one.memory_stats() or {}
    return {
        "name": device_name(one),
        "kind": one.device_kind,
        "bytes_in_use": memory.get("bytes_in_use"),
        "bytes_limit": memory.get("bytes_limit"),
    }


def _same_in_stages(found: list[jax.Device], num_of_all: list[int]) -> bool | None:
    """Whether a model in two stages has the same bits on one device as on pairs of them."""
    if min(num_of_all) < 2 or len({*num_of_all}) > 1:
        return None
    towers, pairs = sum(num_of_all), (sum(num // 2 for num in num_of_all), 2)
    alone = _trained_on(found[:1], towers, stages=2)
    return alone == _trained_on(None, towers, stages=2, layout=pairs)


def _trained_on(found: list[jax.Device] | None, towers: int, **options: Any) -> str:
    """The fingerprint after a few steps of a small perceptron whose loss draws random numbers."""
    import optax  # noqa: PLC0415 (as everywhere: only where it is used)

    def losses(params: Any, batch: Any, *, rng: jax.Array) -> jax.Array:
        hidden = cut(jnp.tanh(batch["x"] @ params["in"]))
        kept = hidden * jax.random.bernoulli(rng, 0.8, hidden.shape)
        return (kept @ params["out"] - batch["y"]) ** 2

    draw = np.random.default_rng(0)
    params = {
        "in": draw.normal(size=(16, 64)).astype(np.float32),
        "out": draw.normal(size=64).astype(np.float32),
    }
    rows = 4 * towers
    batch = {
        "x": draw.normal(size=(rows, 16)).astype(np.float32),
        "y": draw.normal(size=rows).astype(np.float32),
    }
    step = train_step(losses, optax.adam(1e-2), devices=found, towers=towers, **options)
    state = step.init(params, rng=jax.random.key(0))
    for _ in range(3):
        state, _ = step(state, batch)
    return fingerprint(state)

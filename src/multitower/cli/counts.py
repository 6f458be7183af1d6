"""Several numbers of devices on a command line: `--devices 1,2,4` and `--simulate 1,2,4`."""

from typing import Annotated

import multitower as mt
from multitower.cli.flags import WHERE, flag
from multitower.cli.start import start_devices
from multitower.errors import RunError

_SIMULATED_BY_DEFAULT = 8

DeviceCounts = Annotated[
    str | None,
    WHERE,
    flag("N,N", "Run on the first N accelerators, for each of these numbers.", "see below"),
]
SimulatedCounts = Annotated[
    str | None,
    WHERE,
    flag(
        "N,N",
        "Run on N simulated CPU devices, for each of these numbers.",
        "1, 2, 3, 4, 8, up to all accelerators, or else simulated ones",
    ),
]


def start_counts(devices: str | None, simulate: str | None) -> tuple[list[int], str]:
    """Starts JAX with as many devices as the largest of some numbers.

    Args:
        devices: what `--devices` says.
        simulate: what `--simulate` says.

    Returns:
        The numbers; and which devices there are, in words.

    Raises:
        RunError: something that is no list of numbers.
        DeviceError: fewer devices are there than asked for.
        ConfigurationError: JAX has started with another number of simulated devices.
    """
    if devices is not None:
        counts = _read(devices, "--devices")
        return counts, start_devices(max(counts), None, None)
    if simulate is not None:
        counts = _read(simulate, "--simulate")
        return counts, start_devices(None, max(counts), None)
    where = start_devices(None, None, None, by_default=_SIMULATED_BY_DEFAULT)
    there = len(mt.devices())
    counts = [n for n in (1, 2, 3, 4, 8, 16, 32) if n < there]
    return [*counts, there] if there > 1 else [1, 1], where  # a single one is compared with itself


def _read(text: str, flag_name: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise RunError(f"{flag_name} {text}: give numbers of devices, such as {flag_name} 1,2,4.")
    return [int(word) for word in words]

"""Several numbers of devices on a command line: `--devices 1,2,4` and `--simulate 1,2,4`."""

from typing import Annotated

import multitower as mt
from multitower.cli.flags.shared import WHERE, flag
from multitower.cli.starting.devices import start_devices
from multitower.cli.starting.together import ALONE, Together
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


def start_counts(
    devices: str | None, simulate: str | None, together: Together = ALONE
) -> tuple[list[int], str]:
    """Starts JAX with as many devices as the largest of some numbers.

    Args:
        devices: the value of `--devices`.
        simulate: the value of `--simulate`.
        together: other processes of the run; then a single number is allowed, of each process.

    Returns:
        The numbers; and the devices in words.

    Raises:
        RunError: not a list of numbers; or several numbers, where several processes make one run.
        DeviceError: there are fewer devices than requested.
        ConfigurationError: JAX has started with another number of simulated devices.
    """
    if together.settings():
        return _start_together(devices, simulate, together)
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


def _start_together(
    devices: str | None, simulate: str | None, together: Together
) -> tuple[list[int], str]:
    given = {"--devices": devices, "--simulate": simulate}
    each = {name: None if text is None else _read(text, name) for name, text in given.items()}
    for name, counts in each.items():
        if counts is not None and len(counts) > 1:
            raise RunError(
                f"{name} {given[name]}: several processes make one run in one layout. Give one "
                f"number, the devices of each process, such as {name} {counts[0]}, and start the "
                "command once for each layout."
            )
    own, simulated = (counts[0] if counts else None for counts in each.values())
    where = start_devices(own, simulated, None, together=together)
    return [own or simulated or len(mt.devices())], where


def _read(text: str, flag_name: str) -> list[int]:
    words = text.replace(",", " ").split()
    if not words or not all(word.isdecimal() and int(word) for word in words):
        raise RunError(f"{flag_name} {text}: give numbers of devices, such as {flag_name} 1,2,4.")
    return [int(word) for word in words]

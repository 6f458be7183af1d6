"""verification: do the same steps give the same bits on every set of devices; and if not, where?

Every run is recorded (`multitower.proof.record`) and compared with the first one. If they differ,
both runs are repeated up to the difference, to get the two values.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import numpy as np

from multitower.hardware.devices import devices_in_words
from multitower.processes.together import are_several
from multitower.proof.record import (
    OF_TOWERS,
    Found,
    Run,
    Spot,
    StepRecord,
    advance,
    digest,
    first_difference,
    original,
    record,
)
from multitower.steps.state.leaves import on_host

# Makes a run on a number of devices.
MakeRun = Callable[[Any], Run]

_OF_STAGE = "['stage "


@dataclass(frozen=True)
class Difference:
    """The first difference between two runs.

    Attributes:
        step: the first step after which they differ, counted from 1.
        runs: the names of both runs, such as "2 devices".
        spot: the first leaf that differs, in the first stage that differs.
        process: the process of the second run that has it; None if it has one process.
        element: index of the first element that differs; None if the runs were not repeated.
        values: the values of that element in both runs.
        repeats: whether both runs gave the same bits again when they were repeated.
    """

    step: int
    runs: tuple[str, str]
    spot: Spot
    process: int | None = None
    element: tuple[int, ...] | None = None
    values: tuple[Any, Any] | None = None
    repeats: bool = True

    def __str__(self) -> str:
        first, second = self.runs
        stage, _, leaf = self.spot
        text = f"step {self.step}: {first} and {second} part in the {stage} ({self._holder()})"
        text += f": {leaf}"
        if self.values is not None:
            a, b = self.values
            index = "".join(f"[{i}]" for i in self.element or ())
            text += f"{index} is {_shown(a)} and {_shown(b)}"
        if not self.repeats:
            text += (
                ". A second look gave other bits again: these devices do not even repeat "
                "themselves (a kernel that adds in any order?)"
            )
        return text

    def _holder(self) -> str:
        stage, place, leaf = self.spot
        process = "" if self.process is None else f"process {self.process}"
        if stage in OF_TOWERS:
            return f"tower {place}{process and f' in {process}'}"
        if leaf.startswith(_OF_STAGE):
            return f"the copy of replica {place}{process and f' in {process}'}"
        return f"the copy on device {place}{process and f' of {process}'}"


@dataclass(frozen=True)
class Verification:
    """The result of a comparison of runs.

    Attributes:
        runs: the name of each run, such as "2 devices".
        records: for each run the records of its steps.
        differences: the first difference of every run that differs from the first run.
    """

    runs: tuple[str, ...]
    records: tuple[Sequence[StepRecord], ...]
    differences: tuple[Difference, ...]

    @property
    def fingerprints(self) -> list[list[str]]:
        """For each run and step, `multitower.fingerprint` of the state after it."""
        return [[step.fingerprint for step in steps] for steps in self.records]

    @property
    def parts(self) -> list[list[Mapping[str, str]]]:
        """For each run and step, the fingerprint of each part of the state, and of the metrics."""
        return [[step.parts for step in steps] for steps in self.records]


def compare(devices: Sequence[int], make_run: MakeRun) -> Verification:
    """Makes the same run on several numbers of devices, and compares all bits.

    Args:
        devices: the numbers of devices of each process; the same number twice checks that a run is
            reproducible.
        make_run: makes one run, with the same number of towers on any number of devices.

    Returns:
        The records of all runs, and the first difference of each from the first run.
    """
    records = [record(make_run(count)) for count in devices]
    found = compare_records([_name(count) for count in devices], records)
    if are_several():
        return found  # the two values may be in different processes
    return with_values(found, lambda i, place: look(make_run(devices[i]), place))


def with_values(found: Verification, look_at: Callable[[int, Found], Any]) -> Verification:
    """Adds the two values of every difference.

    Args:
        found: from `compare_records`.
        look_at: repeats a run, given its number, and returns the value that it has at a place; None
            if there is none.

    Returns:
        The same comparison, with the values.
    """
    differences: list[Difference] = []
    for difference, i in zip(found.differences, _which_differ(found.records), strict=True):
        records = (found.records[0], found.records[i])
        differences.append(_look_again(difference, (0, i), look_at, records))
    return replace(found, differences=tuple(differences))


def compare_records(runs: Sequence[str], records: Sequence[Sequence[StepRecord]]) -> Verification:
    """Compares all bits of recorded runs with the first one, of as many steps.

    Args:
        runs: the names of the runs.
        records: the records of the steps of each run.

    Returns:
        The records, and the first difference of each run from the first one, without values.
    """
    differences: list[Difference] = []
    for i, found in _which_differ(records).items():
        several = len(records[i][0].digests) > 1
        process = found.process if several else None
        differences.append(Difference(found.step, (runs[0], runs[i]), found.spot, process))
    return Verification(tuple(runs), tuple(records), tuple(differences))


def _which_differ(records: Sequence[Sequence[StepRecord]]) -> dict[int, Found]:
    """By number of the run, its first difference from run 0, whose devices may differ, too."""
    found = {i: first_difference(records[0], steps) for i, steps in enumerate(records)}
    return {i: one for i, one in found.items() if one is not None}


def _look_again(
    found: Difference,
    runs: tuple[int, int],
    look_at: Callable[[int, Found], Any],
    before: tuple[Sequence[StepRecord], Sequence[StepRecord]],
) -> Difference:
    """Repeats two runs up to the step at which they differ, to get the values."""
    number, spot = found.step, found.spot
    there = original(before[0][number - 1], spot)
    if there is None:
        return found
    wanted = (Found(number, *there), Found(number, found.process or 0, spot))
    seen = [look_at(run, place) for run, place in zip(runs, wanted, strict=True)]
    if any(value is None for value in seen):
        return replace(found, repeats=False)
    repeats = all(
        digest(value) == steps[number - 1].digests[place.process][place.spot]
        for value, steps, place in zip(seen, before, wanted, strict=True)
    )
    found = replace(found, repeats=repeats)
    a, b = (on_host(value) for value in seen)
    if a.shape != b.shape or a.dtype != b.dtype:
        return replace(found, values=(a.shape, b.shape))
    apart = np.flatnonzero(_bits(a) != _bits(b))
    if not apart.size:
        return found
    element = tuple(int(i) for i in np.unravel_index(apart[0], a.shape))
    return replace(found, element=element, values=(a[element], b[element]))


def look(run: Run, place: Found) -> Any:
    """The value of a run at one place, in this process, on the host; None if there is none."""
    for _ in range(place.step - 1):
        next(run)
    held: list[Any] = []
    advance(run, lambda spot, leaf: held.append(on_host(leaf)) if spot == place.spot else None)
    return held[0] if held else None


def _name(count: int) -> str:
    if are_several():
        return f"{jax.process_count()} x {count}"
    return devices_in_words(count)


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each element as bytes: -0.0 is not 0.0, and NaN is NaN."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype((np.void, flat.itemsize)))


def _shown(value: Any) -> str:
    """A number with its bits, since two different numbers may look the same in decimal."""
    if not isinstance(value, np.generic):
        return str(value)
    return f"{value!s} (0x{value.tobytes()[::-1].hex()})"

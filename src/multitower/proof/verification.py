"""verification: do the same steps give the same bits on every set of devices; and if not, where?

Every run leaves a digest of each leaf after each stage of each step: what every tower hands on,
the totals on every device, the state and the metrics after the update. Runs are compared with the
first one, in this order, so that the first difference is where they part: all that went before was
equal. Only then are both runs made once more, to see the two values.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.packing import unpack
from multitower.engines.same_bits import tapped
from multitower.engines.totals import TowerSums
from multitower.stages.programs import StageSums
from multitower.steps.staged.state import Parts as StagedParts
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.state.train_state import TrainState

# Makes a run on so many devices; yields the state and the metrics after each step.
MakeRun = Callable[[Any], Iterator[tuple[TrainState, dict[str, jax.Array]]]]

EXCHANGE = "exchange"
TOWER = "tower program"
FORWARD = "forward program"  # these two of a model in stages
BACKWARD = "backward program"
REDUCTION = "reduction"
UPDATE = "update"
_STAGES = (EXCHANGE, TOWER, FORWARD, BACKWARD, REDUCTION, UPDATE)
# What is a tower's own.
_OF_TOWERS = (EXCHANGE, TOWER, FORWARD, BACKWARD)

_OF_STAGE = "['stage "
_PARTS = ("step", "params", "opt_state", "ema_params", "model_state", "rng", "local", "metrics")


class Spot(NamedTuple):
    """One leaf at one moment.

    Attributes:
        stage: which stage of the step made it.
        place: the tower, of a tower program or of what it sends in an exchange; or the device,
            counted from 0, that holds it, of a model in stages the replica.
        leaf: its path, which begins with the stage of the model if it is cut.
    """

    stage: str
    place: int
    leaf: str


@dataclass(frozen=True)
class Difference:
    """Where two runs part.

    Attributes:
        step: the first step after which they differ, counted from 1.
        devices: of both runs.
        spot: the first leaf that differs, in the first stage that differs.
        element: index of the first element that differs, None if there was no second look.
        values: that element in both runs.
        repeats: whether both runs gave the same bits again when they were made once more.
    """

    step: int
    devices: tuple[int, int]
    spot: Spot
    element: tuple[int, ...] | None
    values: tuple[Any, Any] | None
    repeats: bool

    def __str__(self) -> str:
        first, second = (f"{n} device{'' if n == 1 else 's'}" for n in self.devices)
        stage, place, leaf = self.spot
        holder = f"tower {place}" if stage in _OF_TOWERS else f"the copy on device {place}"
        if stage not in _OF_TOWERS and leaf.startswith(_OF_STAGE):
            holder = f"the copy of replica {place}"
        text = f"step {self.step}: {first} and {second} part in the {stage} ({holder}): {leaf}"
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


@dataclass(frozen=True)
class Verification:
    """What came out.

    Attributes:
        devices: how many each run had.
        fingerprints: for each run and step, of the state after it, as `multitower.fingerprint`.
        parts: for each run and step, the fingerprint of each part of the state, and of the metrics.
        differences: the first one of every run that differs from the first run.
    """

    devices: tuple[int, ...]
    fingerprints: tuple[tuple[str, ...], ...]
    parts: tuple[tuple[Mapping[str, str], ...], ...]
    differences: tuple[Difference, ...]


def compare(devices: Sequence[int], make_run: MakeRun) -> Verification:
    """Makes the same run on several numbers of devices, and compares all bits.

    Args:
        devices: how many; a number that comes twice checks that a run repeats itself.
        make_run: makes one run, with as many towers on any number of devices.

    Returns:
        The fingerprints of all runs, and where those that differ part from the first one.
    """
    runs = [_watch(make_run(count)) for count in devices]
    first = runs[0]
    differences: list[Difference] = []
    for i, run in enumerate(runs):
        found = _first_difference(first, run)
        if found is not None:
            pair = (devices[0], devices[i])
            differences.append(_look_again(found, pair, make_run, (first, run)))
    return Verification(
        tuple(devices),
        tuple(tuple(step.fingerprint for step in run) for run in runs),
        tuple(tuple(step.parts for step in run) for run in runs),
        tuple(differences),
    )


class _Blocks(NamedTuple):
    gradients: Any


class _Step(NamedTuple):
    """What one step has left: a digest for each spot, in the order of the stages."""

    digests: dict[Spot, str]
    fingerprint: str
    parts: dict[str, str]


def _watch(run: Iterator[tuple[TrainState, dict[str, jax.Array]]]) -> list[_Step]:
    steps: list[_Step] = []
    while True:
        digests: dict[Spot, str] = {}
        end = _advance(run, lambda spot, leaf, digests=digests: digests.update({spot: _hash(leaf)}))
        if end is None:
            return steps
        state, metrics = end
        parts = {name: getattr(state, name) for name in _PARTS[:-1]} | {"metrics": metrics}
        prints = {name: fingerprint(part) for name, part in parts.items() if part is not None}
        steps.append(_Step(digests, fingerprint(state), prints))


def _advance(
    run: Iterator[tuple[TrainState, dict[str, jax.Array]]], see: Callable[[Spot, Any], None]
) -> tuple[TrainState, dict[str, jax.Array]] | None:
    """Makes one step and shows every leaf of every stage; None at the end of the run."""

    def tap(stage: str, place: int, sums: Any) -> None:
        if not isinstance(sums, TowerSums):
            _show(stage, place, (jax.tree.map(_unpacked, sums, is_leaf=_is_packed),), see)
            return
        _show(stage, place, unpack(sums.packed), see)
        # A block's total is on the device of its tower alone: no device has a copy of it.
        _show(stage, place if stage in _OF_TOWERS else 0, (_Blocks(sums.blocks),), see)

    with tapped(tap):
        end = next(run, None)
    if end is None:
        return None
    state, metrics = end
    # Copies per device where the state is made of them: each one is checked.
    for place, fields in enumerate(_copies(state)):
        _show(UPDATE, place, fields, see)
    _show(UPDATE, 0, {"metrics": metrics}, see)
    return end


def _is_packed(found: Any) -> bool:
    return isinstance(found, StageSums)


def _unpacked(found: Any) -> Any:
    return found.unpacked() if _is_packed(found) else found


def _copies(state: TrainState) -> list[Any]:
    """The state as each device has it, or each replica of a model in stages."""
    parts = state.parts()
    if isinstance(parts, StagedParts):
        return parts.copies()
    return parts if isinstance(parts, list) else [state.fields()]


def _show(stage: str, place: int, tree: Any, see: Callable[[Spot, Any], None]) -> None:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in flat:
        # What a tower hands on is a pair of trees, whose fields have names enough.
        names = path if stage == UPDATE else path[1:]
        see(Spot(stage, place, jax.tree_util.keystr(names).lstrip(".")), leaf)


def _first_difference(first: list[_Step], other: list[_Step]) -> tuple[int, Spot] | None:
    """The first step, counted from 1, and spot of `other` that is not as in `first`."""
    for number, (a, b) in enumerate(zip(first, other, strict=True), start=1):
        for stage in _STAGES:
            for spot, digest in b.digests.items():
                if spot.stage == stage and a.digests.get(_original(spot)) != digest:
                    return number, spot
    return None


def _original(spot: Spot) -> Spot:
    """Where the first run has what should be here: all devices hold the same after a reduction."""
    return spot if spot.stage in _OF_TOWERS else spot._replace(place=0)


def _look_again(
    found: tuple[int, Spot],
    devices: tuple[int, int],
    make_run: MakeRun,
    before: tuple[list[_Step], list[_Step]],
) -> Difference:
    """Repeats two runs up to the step at which they part, to see the values."""
    number, spot = found
    wanted = (_original(spot), spot)
    seen = [_values(make_run(n), number, s) for n, s in zip(devices, wanted, strict=True)]
    if any(value is None for value in seen):
        return Difference(number, devices, spot, None, None, repeats=False)
    repeats = all(
        _hash(value) == steps[number - 1].digests[place]
        for value, steps, place in zip(seen, before, wanted, strict=True)
    )
    a, b = (_on_host(value) for value in seen)
    if a.shape != b.shape or a.dtype != b.dtype:
        return Difference(number, devices, spot, None, (a.shape, b.shape), repeats)
    apart = np.flatnonzero(_bits(a) != _bits(b))
    if not apart.size:
        return Difference(number, devices, spot, None, None, repeats)
    element = tuple(int(i) for i in np.unravel_index(apart[0], a.shape))
    return Difference(number, devices, spot, element, (a[element], b[element]), repeats)


def _values(run: Iterator[Any], number: int, wanted: Spot) -> Any:
    """What a run has at one spot of one step."""
    for _ in range(number - 1):
        next(run)
    held: list[Any] = []
    _advance(run, lambda spot, leaf: held.append(_on_host(leaf)) if spot == wanted else None)
    return held[0] if held else None


def _hash(leaf: Any) -> str:
    value = _on_host(leaf)
    return hashlib.sha256(f"{value.dtype.name}{value.shape}".encode() + value.tobytes()).hexdigest()


def _on_host(leaf: Any) -> np.ndarray[Any, Any]:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return np.array(leaf, copy=True)  # host-device sync; the device's memory is used again


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Each element as bytes: -0.0 is not 0.0, and NaN is NaN."""
    flat = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.dtype((np.void, flat.itemsize)))


def _shown(value: Any) -> str:
    """A number with its bits: two may look the same in decimal."""
    if not isinstance(value, np.generic):
        return str(value)
    return f"{value!s} (0x{value.tobytes()[::-1].hex()})"

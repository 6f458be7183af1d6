"""record: digests of every array that the steps of a run make, in all of its processes.

After each stage of each step there is a digest of each leaf: what every tower sends or returns, the
totals on every device, the state and the metrics after the update.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from multitower.engines.packing import unpack
from multitower.engines.same_bits import tapped
from multitower.engines.totals import TowerSums
from multitower.processes.together import texts_of_all
from multitower.stages.programs import StageSums
from multitower.steps.staged.state import StagedParts
from multitower.steps.state.bundles import shown
from multitower.steps.state.fingerprint import fingerprint
from multitower.steps.state.leaves import on_host
from multitower.steps.state.train_state import TrainState

# A run: the state and the metrics after each step.
Run = Iterator[tuple[TrainState, dict[str, jax.Array]]]

EXCHANGE = "exchange"
TOWER = "tower program"
FORWARD = "forward program"  # these two are for a model in stages
BACKWARD = "backward program"
REDUCTION = "reduction"
UPDATE = "update"
_STAGES = (EXCHANGE, TOWER, FORWARD, BACKWARD, REDUCTION, UPDATE)
# Stages whose values belong to one tower.
OF_TOWERS = (EXCHANGE, TOWER, FORWARD, BACKWARD)

_PARTS = ("step", "params", "opt_state", "ema_params", "model_state", "rng", "local", "loss_scale")


class Spot(NamedTuple):
    """One leaf at one moment.

    Attributes:
        stage: the stage of the step that made it.
        place: the number of the tower, for the result of a tower program or what it sends in an
            exchange. Otherwise the device of its process that holds it, counted from 0; for a model
            in stages the replica.
        leaf: its path, which begins with the stage of the model if the model is cut.
    """

    stage: str
    place: int
    leaf: str


Digests = dict[Spot, str]


class StepRecord(NamedTuple):
    """The record of one step.

    Attributes:
        digests: for each process the digest of each spot.
        fingerprint: `multitower.fingerprint` of the state after the step.
        parts: the fingerprint of each part of the state, and of the metrics.
    """

    digests: list[Digests]
    fingerprint: str
    parts: dict[str, str]


class Found(NamedTuple):
    """Where a run first differs from another one.

    Attributes:
        step: the number of the step, counted from 1.
        process: the number of the process of the run.
        spot: the first leaf that differs, in the first stage that differs.
    """

    step: int
    process: int
    spot: Spot


def record(run: Run) -> list[StepRecord]:
    """Makes a run, and records its steps; call it on every process of the run."""
    steps: list[StepRecord] = []
    while True:
        digests: Digests = {}
        end = advance(run, lambda spot, leaf, digests=digests: digests.update({spot: digest(leaf)}))
        if end is None:
            return _of_all_processes(steps)
        state, metrics = end
        parts = {name: getattr(state, name) for name in _PARTS} | {"metrics": metrics}
        prints = {name: fingerprint(part) for name, part in parts.items() if part is not None}
        steps.append(StepRecord([digests], fingerprint(state), prints))


def advance(
    run: Run, see: Callable[[Spot, Any], None]
) -> tuple[TrainState, dict[str, jax.Array]] | None:
    """Makes one step and shows every leaf of every stage; None at the end of the run."""

    def tap(stage: str, place: int, sums: Any) -> None:
        if not isinstance(sums, TowerSums):
            _show(stage, place, (jax.tree.map(_unpacked, sums, is_leaf=_is_packed),), see)
            return
        _show(stage, place, unpack(sums.packed), see)
        # The total of a block is on the device of its tower only: there are no copies to compare.
        _show(stage, place if stage in OF_TOWERS else 0, (_Blocks(sums.blocks),), see)

    with tapped(tap):
        end = next(run, None)
    if end is None:
        return None
    state, metrics = end
    # If the state is kept as one copy per device, each copy is checked.
    for place, fields in enumerate(_copies(state)):
        _show(UPDATE, place, fields, see)
    _show(UPDATE, 0, {"metrics": metrics}, see)
    return end


def first_difference(first: Sequence[StepRecord], other: Sequence[StepRecord]) -> Found | None:
    """The first step and spot at which `other` differs from `first`; None if all is equal.

    Stages are compared in their order, so that the first difference is where the runs part:
    everything before it was equal.
    """
    for number, (a, b) in enumerate(zip(first, other, strict=True), start=1):
        expected = _by_origin(a)
        for stage in _STAGES:
            for process, digests in enumerate(b.digests):
                for spot, found in digests.items():
                    if spot.stage == stage and expected.get(_origin(spot)) != found:
                        return Found(number, process, spot)
    return None


def original(step: StepRecord, spot: Spot) -> tuple[int, Spot] | None:
    """The process and the spot in this record that correspond to `spot` of another; or None."""
    for process, digests in enumerate(step.digests):
        for there in digests:
            if _origin(there) == _origin(spot):
                return process, there
    return None


def _by_origin(step: StepRecord) -> dict[tuple[str, int | None, str], str]:
    found: dict[tuple[str, int | None, str], str] = {}
    for digests in step.digests:
        for spot, there in digests.items():
            found.setdefault(_origin(spot), there)
    return found


def _origin(spot: Spot) -> tuple[str, int | None, str]:
    """The key of values that should be equal: after a reduction, those of all devices."""
    return spot.stage, spot.place if spot.stage in OF_TOWERS else None, spot.leaf


class _Blocks(NamedTuple):
    gradients: Any


def _is_packed(found: Any) -> bool:
    return isinstance(found, StageSums)


def _unpacked(found: Any) -> Any:
    return found.unpacked() if _is_packed(found) else found


def _copies(state: TrainState) -> list[Any]:
    """The state as each device has it, or each replica of a model in stages."""
    parts = state.kept.parts()
    if isinstance(parts, StagedParts):
        return parts.copies()
    return [shown(copy) for copy in parts] if isinstance(parts, list) else [state.kept.fields()]


def _show(stage: str, place: int, tree: Any, see: Callable[[Spot, Any], None]) -> None:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    for path, leaf in flat:
        # What a tower returns is a pair of trees; the names of their fields are enough.
        names = path if stage == UPDATE else path[1:]
        see(Spot(stage, place, jax.tree_util.keystr(names).lstrip(".")), leaf)


def digest(leaf: Any) -> str:
    """A digest that is equal for arrays of the same dtype, shape and bits."""
    value = on_host(leaf)  # host-device sync
    text = f"{value.dtype.name}{value.shape}".encode()
    return hashlib.sha256(text + value.tobytes()).hexdigest()[:32]


# ---------------------------------------------------------------- as text, for other processes


def _of_all_processes(steps: Sequence[StepRecord]) -> list[StepRecord]:
    """The record with the digests of all processes; the rest comes from process 0."""
    each = [json.loads(text) for text in texts_of_all(json.dumps(as_facts(steps)))]
    first = from_facts(each[0])
    for other in each[1:]:
        for step, more in zip(first, from_facts(other), strict=True):
            step.digests.extend(more.digests)
    return first


def as_facts(steps: Sequence[StepRecord]) -> list[dict[str, Any]]:
    """A record as JSON values: digests by stage, place and leaf."""
    return [
        {
            "fingerprint": step.fingerprint,
            "parts": step.parts,
            "digests": [_nested(digests) for digests in step.digests],
        }
        for step in steps
    ]


def from_facts(facts: Sequence[Any]) -> list[StepRecord]:
    """A record from the JSON values of `as_facts`."""
    return [
        StepRecord(
            [
                {
                    Spot(stage, int(place), leaf): found
                    for stage, places in digests.items()
                    for place, leaves in places.items()
                    for leaf, found in leaves.items()
                }
                for digests in step["digests"]
            ],
            step["fingerprint"],
            dict(step["parts"]),
        )
        for step in facts
    ]


def _nested(digests: Digests) -> dict[str, dict[str, dict[str, str]]]:
    found: dict[str, dict[str, dict[str, str]]] = {}
    for (stage, place, leaf), one in digests.items():
        found.setdefault(stage, {}).setdefault(str(place), {})[leaf] = one
    return found

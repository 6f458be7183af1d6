"""The time of the parts of a step: input, host, tower programs, reduction, update.

To measure the parts, the host must wait for the devices between them, which makes a step longer. So
they are measured separately from the step time, and add up to more than it.
"""

import statistics
import time
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

import jax

from multitower.engines.same_bits import tapped
from multitower.engines.totals import TowerSums
from multitower.proof.record import EXCHANGE, TOWER
from multitower.steps.state.train_state import TrainState
from multitower.steps.step import TrainStep
from multitower.towers.feeding import shard
from multitower.towers.split import TowerRows

PARTS = ("input_s", "host_s", "step_s", "tower_programs_s", "reduction_s", "update_s")


def measure_split(
    step: TrainStep,
    state: TrainState,
    batches: Iterator[Any],
    *,
    where: Mapping[str, Any],
    num_steps: int,
) -> tuple[TrainState, dict[str, float | None]]:
    """Measures the parts of a step, one step at a time.

    Args:
        step: the training step.
        state: the training state; it is overwritten.
        batches: host batches, at least `2 * num_steps + 2` of them.
        where: `devices`, `towers` and `global_batch`, as for `multitower.shard`.
        num_steps: the number of steps of which medians are taken; one more is made before them.

    Returns:
        The state after these steps; and medians in seconds. `input_s`: a batch is made on the host
        and copied to the devices. `host_s`: until `step()` returns (on CPUs a small program may run
        inside it). `step_s`: until all devices are done. Of that, with a fixed number of towers:
        `tower_programs_s` until the last one of all devices is done, `reduction_s` until all
        devices have the sums, `update_s` for the rest (with `shard_update` the new parameters are
        gathered in it); None in the fast mode, which is one program, and with stages, where they
        overlap.
    """
    taken: list[dict[str, float]] = []
    for batch, input_s in islice(_fed(batches, where), num_steps + 1):
        began = time.perf_counter()
        state, metrics = step(state, batch)
        returned = time.perf_counter()
        _wait(state, metrics)
        step_s = time.perf_counter() - began
        taken.append({"input_s": input_s, "host_s": returned - began, "step_s": step_s})
    staged: list[dict[str, float]] = []
    if where["towers"] is not None and step.layout is None:
        for batch, _ in islice(_fed(batches, where), num_steps + 1):
            on = step.placement
            stages = _Stages(sum(len(on.towers_on[device]) for device in on.local))
            began = time.perf_counter()
            with tapped(stages.tap):
                state, metrics = step(state, batch)
            _wait(state, metrics)
            staged.append(stages.split(began, time.perf_counter()))
    return state, {name: _median(name, taken if name in taken[0] else staged) for name in PARTS}


def _fed(batches: Iterator[Any], where: Mapping[str, Any]) -> Iterator[tuple[Any, float]]:
    """Batches on the devices, and the seconds that it took to make and copy each."""
    while True:
        began = time.perf_counter()
        batch = shard(next(batches), **where)
        for leaf in jax.tree.leaves(batch):
            # host-device sync
            jax.block_until_ready(leaf.pieces if isinstance(leaf, TowerRows) else leaf)
        yield batch, time.perf_counter() - began


def _wait(state: TrainState, metrics: dict[str, jax.Array]) -> None:
    state.block_until_ready()  # host-device sync
    jax.block_until_ready(metrics)  # host-device sync


class _Stages:
    """The times at which the parts of one step end; `tap` is called after each.

    Args:
        num_towers: towers of this process.
    """

    def __init__(self, num_towers: int) -> None:
        self._num_towers = num_towers
        self._started: list[TowerSums] = []
        self._towers_end = self._reduction_end = 0.0

    def tap(self, stage: str, place: int, sums: TowerSums) -> None:
        """Waits for a part once all of it has been started."""
        if stage == EXCHANGE:
            return  # it belongs to the towers' programs
        if stage != TOWER:
            jax.block_until_ready(sums)  # host-device sync
            self._reduction_end = time.perf_counter()
            return
        self._started.append(sums)
        if len(self._started) == self._num_towers:
            # All towers have been started on all devices; waiting earlier would make the devices
            # wait for each other. Sums that an addition has overwritten belong to earlier towers
            # of a device; those of its last tower still exist.
            for one in self._started:
                kept = [leaf for leaf in jax.tree.leaves(one) if not leaf.is_deleted()]
                jax.block_until_ready(kept)  # host-device sync
            self._towers_end = time.perf_counter()

    def split(self, began: float, ended: float) -> dict[str, float]:
        """The seconds of each part."""
        return {
            "tower_programs_s": self._towers_end - began,
            "reduction_s": self._reduction_end - self._towers_end,
            "update_s": ended - self._reduction_end,
        }


def _median(name: str, taken: list[dict[str, float]]) -> float | None:
    """The median over all steps except the first; None if nothing was measured."""
    return statistics.median(one[name] for one in taken[1:]) if taken else None

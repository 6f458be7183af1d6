"""Asynchronous steps: one group of towers makes an update, with its version of the parameters.

1. each tower of the group: loss and gradients of its rows, on the version of its last update;
2. the group's sums are added along the tree (`sums`) and move to the home device;
3. *finish program*, on the home device alone: one update of the newest parameters;
4. the new parameters move to the devices of the group, and nowhere else.

The host starts these programs without waiting for them. The next group's towers do not depend on
them.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from multitower.engines.executable import Compiled, WholeNumbers, compile_for_each, signature
from multitower.engines.same_bits import finish_function, scale_of
from multitower.steps.job import make_job
from multitower.steps.parts import Batches, StepParts
from multitower.steps.rotation.options import RotationOptions
from multitower.steps.rotation.stale import for_stale_gradients
from multitower.steps.rotation.state import RotationParts
from multitower.steps.rotation.sums import GroupSums
from multitower.steps.rotation.turns import Turns
from multitower.steps.runner import Metrics, TowerFeeder
from multitower.steps.state.bundles import bundled_job
from multitower.steps.state.fields import Fields
from multitower.steps.state.kept import KeptState
from multitower.towers.rows import BatchParts, Split
from multitower.towers.split import copy_to


class RotationRunner:
    """Asynchronous steps with batches of one kind."""

    def __init__(
        self, step: StepParts, batches: Batches, turns: Turns, options: RotationOptions
    ) -> None:
        given = (step, batches.split, batches.tower_rows)
        self._sums = GroupSums(bundled_job(make_job(*given, turns.num_towers)), turns.groups)
        self._finish = make_finish(*given, turns.num_towers, options)
        self._numbers = WholeNumbers()
        self._finishes: dict[Any, Compiled] = {}
        self._feeders = {place: TowerFeeder(step, batches, place) for place in set(turns.groups)}
        self._turns = turns

    def run(self, state: KeptState, batch: BatchParts) -> tuple[KeptState, Metrics]:
        """Makes one update; the state is overwritten."""
        parts: RotationParts = state.parts()
        group = self._turns.group_at(parts.num_updates)
        place, version = self._turns.groups[group], parts.versions[group]
        # From the host: reading it from the home device would wait for the update before this one.
        counts = copy_to([np.int32(parts.num_updates)] * len(place.devices), place.devices)
        fields = [copy._replace(step=n) for copy, n in zip(version.copies, counts, strict=True)]
        shared, rows = self._feeders[place].feed(batch, fields)
        total = jax.device_put(self._sums.run(place, shared, rows), self._turns.home)
        staleness = self._numbers.on(self._turns.home, parts.num_updates - version.made)
        # Parameters are not donated: on the home device a version is the same array.
        used = (parts.home.opt_state, parts.home.ema_params)
        # The model state is the group's, including the leaves that this update does not change.
        model_state = jax.device_put(version.copies[0].model_state, self._turns.home)
        kept = parts.home._replace(opt_state=None, ema_params=None, model_state=model_state)
        scale = jax.device_put(scale_of(rows[0]), self._turns.home)
        given = (kept, used, total, scale, staleness)
        new, metrics = self._program(given)(*given)
        state.spend()
        return parts.after(group, new, self._turns).state(state.maker), metrics

    def _program(self, given: Any) -> Compiled:
        key = signature(given[:3])  # the scale and the staleness are numbers of one kind
        if key not in self._finishes:
            (made,) = compile_for_each(self._finish, given, [self._turns.home], donate=(1,))
            self._finishes[key] = made
        return self._finishes[key]


def make_finish(
    step: StepParts,
    split: Split,
    tower_rows: int,
    num_towers: int,
    options: RotationOptions,
) -> Callable[..., tuple[Fields, Metrics]]:
    """Makes the finish program of an update.

    It takes the fields that are kept, the pair (optimizer state, average), which is overwritten,
    the totals over the group, the factor that turns them into means, and the staleness.
    """

    def finish(
        kept: Fields, used: tuple[Any, Any], totals: Any, scale: Any, staleness: Any
    ) -> tuple[Fields, Metrics]:
        optimizer = for_stale_gradients(step.optimizer, options, staleness)
        job = make_job(replace(step, optimizer=optimizer), split, tower_rows, num_towers)
        fields = kept._replace(opt_state=used[0], ema_params=used[1])
        new, metrics = finish_function(bundled_job(job))(fields, totals, scale)
        return new, {**metrics, "staleness": staleness}

    return finish

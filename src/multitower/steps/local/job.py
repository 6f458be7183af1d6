"""What a tower does in one step of its own, and what happens when the towers meet.

The equivalent loop, with `own` and `anchor` the same at the beginning:

    for tower in towers:                                   # in every step
        own[tower] = inner_update(own[tower], gradient of the tower's mean loss)
    if step % sync_every == 0:                             # a meeting
        moved = mean over towers of (anchor - own[tower])  # weighted by rows
        anchor = own[every tower] = outer_update(anchor, moved)
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.engines.job import Shared, TowerResult
from multitower.engines.packing import Packed, pack, unpack
from multitower.engines.totals import TowerSums, with_one_nan
from multitower.functions.objective import share_of
from multitower.functions.outputs import wide
from multitower.models.state import Changed, join, sort_changes
from multitower.steps.job import Means, Sums, TowerStep, own_mean
from multitower.steps.local.options import LocalOptions
from multitower.steps.local.state import Own
from multitower.steps.loss import LossOutput
from multitower.steps.optimizing.update import update_if_good
from multitower.steps.parts import StepParts
from multitower.steps.state.bundles import laid_like, opened
from multitower.steps.state.fields import Fields
from multitower.towers.rows import Split, Tower


class Met(NamedTuple):
    """What a meeting reports, on every device.

    Attributes:
        good: whether an update was made, bool, shape ().
        finite: for each parameter whether all of it is finite, bool, shape (leaves,).
    """

    good: Any
    finite: Any


class LocalSums(NamedTuple):
    """What a tower returns of a step to be summed over towers: a few numbers.

    Attributes:
        counted: the sums that metrics are made of.
        skipped: 1.0 if the tower made no update because something was not finite, shape ().
        bad: for each parameter 1.0 if it is not finite after the update, shape (leaves,).
    """

    counted: Sums
    skipped: Any
    bad: Any


class LocalJob:
    """One step of every tower; like a `Job`, but the state is what a tower has of its own.

    Here and in `MeetingJob` an `Own`, and fields of the state, may be bundles.
    """

    def __init__(self, step: StepParts, split: Split, tower_rows: int, num_towers: int) -> None:
        self._inner = replace(step, ema_decay=None)
        self._one = _OwnStep(step, split, tower_rows, num_towers, sort=_own_changes)
        self._num_towers = num_towers

    def tower(self, shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        """One update of a tower: `rows` of the result are its new `Own` and the number of steps."""
        given, own = shared.state, opened(shared.state)
        count, rng, rest = shared.rest
        fields = Fields(count, own.params, own.opt_state, None, own.model_state, rng)
        shared = Shared(fields, rest)

        def objective(params: Any) -> tuple[Any, LossOutput]:
            return self._one.objective(params, shared, rows, here)

        (loss, output), gradients = jax.value_and_grad(objective, has_aux=True)(own.params)
        model_state = join(own.model_state, output.model_state)
        new, told = update_if_good(self._inner, fields, gradients, {"loss": loss}, model_state)
        has_rows = here.num_rows > 0
        choose = lambda n, o: n if n is o else jnp.where(has_rows, n, o)  # the key does not change
        new = jax.tree.map(choose, new, fields)
        means, counted = self._one.results(shared, rows, here, (loss, output))
        skipped = told.get("skipped", jnp.float32(0)) * has_rows.astype(jnp.float32)
        bad = (~told.get("finite_params", jnp.ones(0, bool)) & has_rows).astype(jnp.float32)
        num_rows = own.num_rows + here.num_rows
        own = Own(new.params, new.opt_state, new.model_state, num_rows)
        return TowerResult(
            means=means,
            sums=LocalSums(counted, skipped, bad),
            rows=(laid_like(given, own), count + 1),
        )

    def apart(self, params: Any) -> Met:
        """The report of a step in which towers do not meet: all good and finite, on the host."""
        count = len(jax.tree.leaves(params)) if self._inner.diagnostics else 0
        return Met(np.True_, np.ones(count, bool))

    def finish(self, met: Met, means: Means, sums: LocalSums) -> dict[str, Any]:
        """The metrics of a step."""
        metrics, _ = self._one.finish((), means, sums.counted)
        if self._inner.skip_nonfinite:
            metrics["skipped"] = jnp.where(met.good, sums.skipped, self._num_towers)
        if self._inner.diagnostics:
            metrics["finite_params"] = (sums.bad == 0) & met.finite
        return metrics


class _OwnStep(TowerStep):
    """A tower's step, with the mean over its own rows alone in place of its share of all rows."""

    def objective(
        self, params: Any, shared: Shared, rows: list[Any], here: Tower
    ) -> tuple[Any, LossOutput]:
        """This tower's own mean loss, to be differentiated, and everything the loss returns."""
        output = self._forward(params, shared, rows, here)
        if self._step.reduction == "mean":
            return own_mean(output.loss, here, self._tower_rows, "mean"), output
        # An estimate of the sum over the rows of all towers, from the rows of this one.
        share = share_of(output.loss, here, self._tower_rows, "sum", ())
        times = here.all_rows / jnp.maximum(here.num_rows, 1)
        return share * times.astype(share.dtype), output

    def results(
        self, shared: Shared, rows: list[Any], here: Tower, found: tuple[Any, LossOutput]
    ) -> tuple[Means, Sums]:
        """As in `TowerStep`, without the model state, which stays with the tower."""
        share, output = found
        if self._step.reduction == "sum":
            share = share_of(output.loss, here, self._tower_rows, "sum", ())
        stays = output._replace(model_state=Changed({}, {}))
        return super().results(shared, rows, here, (share, stays))


class Moved(NamedTuple):
    """What a tower brings to a meeting; floats are multiplied by its number of rows.

    Attributes:
        params: the parameters of the last meeting minus its own.
        model_state: leaves by number.
        opt_state: leaves by number; empty if each tower keeps its optimizer's state.
        num_rows: real rows that it was given since the last meeting, a float, shape ().
    """

    params: Any
    model_state: Changed
    opt_state: Changed
    num_rows: Any


class MeetingJob:
    """What a tower brings to a meeting, the update from the sums, and how a tower goes on."""

    def __init__(self, step: StepParts, options: LocalOptions) -> None:
        self._outer = replace(step, optimizer=options.outer_optimizer, clip_norm=None)
        self._options = options

    def moved(self, own: Own, params: Any, number: jax.Array) -> TowerSums:
        """What tower `number` brings."""
        own, params = opened(own), opened(params)
        weight = own.num_rows.astype(float)
        here = Tower(number, own.num_rows, own.num_rows)
        deltas = jax.tree.map(
            lambda before, after: _times(wide(before) - wide(after), weight), params, own.params
        )
        model_state = _weighed(own.model_state, here, self._outer.model_state_from)
        opt_state = own.opt_state if self._options.averages_state else ()
        # Its integers and keys stay the tower's own: how many updates it has made, and its noise.
        opt_state = _weighed(opt_state, here, "mean")._replace(first={})
        return TowerSums(pack(Moved(deltas, model_state, opt_state, weight)), [])

    def meet(self, fields: Fields, totals: Packed) -> tuple[Fields, Changed, Met]:
        """The outer update, which every device makes from the same totals.

        Returns:
            The state after it, the mean of the inner optimizers' states, and the report.
        """
        given, fields = fields, opened(fields)
        sums: Moved = jax.tree.map(with_one_nan, unpack(totals))
        share = 1 / sums.num_rows
        mean = lambda total: _times(total, share)
        as_before = lambda total, before: mean(total).astype(before.dtype)
        gradients = jax.tree.map(as_before, sums.params, fields.params)
        model_state = _joined(fields.model_state, sums.model_state, mean)
        # Functions of the number of updates, such as `ema_decay`, count meetings.
        before = fields._replace(step=fields.step // self._options.sync_every - 1)
        metrics = {"loss": jnp.float32(0)}
        new, told = update_if_good(self._outer, before, gradients, metrics, model_state)
        good = told.get("skipped", jnp.float32(0)) == 0
        met = Met(good, told.get("finite_params", jnp.ones(0, bool)))
        averaged = {n: mean(total) for n, total in sums.opt_state.averaged.items()}
        new = laid_like(given, new._replace(step=fields.step))
        return new, Changed(averaged, sums.opt_state.first), met

    def go_on(self, own: Own, params: Any, model_state: Any, averaged: Changed) -> Own:
        """What a tower has after a meeting, as copies of its own."""
        given, own = own, opened(own)
        opt_state = _joined(own.opt_state, averaged, lambda mean: mean)
        num_rows = jnp.zeros_like(own.num_rows)
        return laid_like(given, Own(opened(params), opt_state, opened(model_state), num_rows))


def _own_changes(given: Sequence[Any], new: Sequence[Any], *_: Any) -> Changed:
    """What the tower itself keeps of a new model state: all leaves that changed, not weighted."""
    pairs = enumerate(zip(given, new, strict=True))
    return Changed({}, {number: leaf for number, (old, leaf) in pairs if leaf is not old})


def _weighed(tree: Any, here: Tower, source: str) -> Changed:
    """Leaves by number: floats times the tower's rows, float32 or wider; others from tower 0."""
    leaves = [
        wide(leaf) if jnp.issubdtype(leaf.dtype, jnp.inexact) else leaf
        for leaf in jax.tree.leaves(tree)
    ]
    return sort_changes([None] * len(leaves), leaves, here, 1, source)


def _joined(old: Any, sums: Changed, mean: Any) -> Any:
    """The old tree with new leaves, made by `mean` from sums, in the dtypes of the old ones."""
    leaves = jax.tree.leaves(old)
    averaged = {n: mean(total).astype(leaves[n].dtype) for n, total in sums.averaged.items()}
    first = {
        n: total.astype(leaves[n].dtype) if isinstance(total, jax.Array) else total
        for n, total in sums.first.items()
    }
    return join(old, Changed(averaged, first))


def _times(leaf: jax.Array, factor: jax.Array) -> jax.Array:
    return leaf * factor.astype(leaf.dtype)

"""The job of one training step: loss and gradients in every tower, one update of everything."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from multitower.engines.job import Job, Shared, TowerResult
from multitower.errors import OutputError
from multitower.functions.objective import (
    Reduction,
    num_weights,
    share_of,
    weights_of,
)
from multitower.functions.outputs import is_per_example, row_sum, wide
from multitower.functions.ratio import (
    is_ratio,
    join_ratio,
    keeping_ratios,
    sums_of,
)
from multitower.models.state import Changed, enter, join, sort_changes
from multitower.steps.loss import LossOutput
from multitower.steps.metrics import MetricSums, join_metrics, sort_metrics
from multitower.steps.optimizing.extra_metrics import refuse_taken_names
from multitower.steps.optimizing.update import update_if_good
from multitower.steps.parts import StepParts
from multitower.steps.precision import scaled, unscaled
from multitower.steps.state.bundles import opened
from multitower.steps.state.fields import Fields
from multitower.towers.rows import Split, Tower, key_of_tower
from multitower.towers.surroundings import inside_a_tower


class Means(NamedTuple):
    """What a tower returns to be averaged over towers, weighted by rows."""

    metrics: Any
    model_state: Any


class Sums(NamedTuple):
    """What a tower returns to be summed over towers."""

    gradients: Any
    metrics: MetricSums
    num_rows: jax.Array
    model_state: Any
    tower_losses: Any


def make_job(
    step: StepParts,
    split: Split,
    tower_rows: int,
    num_towers: int,
    *,
    cut: Callable[[Any], list[jax.Array]] | None = None,
) -> Job:
    """Makes the job of one step.

    In its `Shared`, `state` is the Fields and `rest` the leaves of the batch that are not rows.
    `finish` returns the new Fields and the metrics. With `cut` each tower gets its block of the
    summed gradients, and `finish` does not change the parameters.
    """
    one = TowerStep(step, split, tower_rows, num_towers)

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        fields: Fields = shared.state

        def objective(params: Any) -> tuple[Any, LossOutput]:
            return one.objective(params, shared, rows, here)

        (share, output), gradients = jax.value_and_grad(objective, has_aux=True)(fields.params)
        means, sums = one.results(shared, rows, here, (share, output))
        return TowerResult(
            means=means,
            sums=sums._replace(gradients=() if cut else gradients),
            blocks=cut(gradients) if cut else (),
        )

    def finish(fields: Fields, means: Means, sums: Sums) -> tuple[Fields, Any]:
        metrics, model_state = one.finish(fields.model_state, means, sums)
        if cut:
            return fields._replace(step=fields.step + 1, model_state=model_state), metrics
        return update_if_good(step, fields, sums.gradients, metrics, model_state)

    return Job(tower, finish)


class TowerStep:
    """What a tower does in one step, except for the differentiation."""

    def __init__(
        self,
        step: StepParts,
        split: Split,
        tower_rows: int,
        num_towers: int,
        *,
        sort: Callable[..., Changed] = sort_changes,
    ) -> None:
        """`sort` chooses what the tower returns of the model state that it was given."""
        self._step = step
        self._tower_rows = tower_rows
        self._num_towers = num_towers
        self._forward = loss_in_tower(step, split, tower_rows, sort)

    def objective(
        self, params: Any, shared: Shared, rows: list[Any], here: Tower
    ) -> tuple[Any, LossOutput]:
        """This tower's share of the loss, to be differentiated, and everything the loss returns."""
        output = self._forward(params, shared, rows, here)
        weights = shared.rest[len(shared.rest) - num_weights(output.loss) :]
        share = share_of(output.loss, here, self._tower_rows, self._step.reduction, weights)
        return scaled(share, shared.state.loss_scale), output

    def results(
        self, shared: Shared, rows: list[Any], here: Tower, found: tuple[Any, LossOutput]
    ) -> tuple[Means, Sums]:
        """Sorts what `objective` returned into what is averaged and what is summed over towers."""
        share, output = found
        counted, averaged = sort_metrics(
            output,
            lambda rows: self._forward(shared.state.params, shared, rows, here),
            rows,
            here,
            reduction=self._step.reduction,
            share=unscaled(share, shared.state.loss_scale),
        )
        changed: Changed = output.model_state
        losses = ()
        if self._step.diagnostics:
            mean = own_mean(output.loss, here, self._tower_rows, self._step.reduction)
            losses = _own_place(mean, here, self._num_towers)
        # As a float, to be packed together with the other sums; exact up to 2**24 rows.
        num_rows = here.num_rows.astype(float)
        sums = Sums((), counted, num_rows, changed.first, losses)
        return Means(averaged, changed.averaged), sums

    def finish(self, model_state: Any, means: Means, sums: Sums) -> tuple[dict[str, Any], Any]:
        """The metrics and the new model state, from all towers."""
        metrics = join_metrics(sums.metrics, means.metrics, sums.num_rows)
        refuse_taken_names(self._step, metrics)
        if self._step.diagnostics:
            metrics["tower_losses"] = sums.tower_losses
        return metrics, join(model_state, Changed(means.model_state, sums.model_state))


def make_weights_job(step: StepParts, split: Split, tower_rows: int) -> Job:
    """The job that sums the weights of a loss that is a ratio, which its gradients need.

    In its `Shared`, `state` is empty, since a job's state is overwritten; `rest` is the pair of the
    Fields and the leaves of the batch that are not rows.
    """
    forward = loss_in_tower(step, split, tower_rows)

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        fields, rest = opened(shared.rest[0]), shared.rest[1]
        output = forward(fields.params, Shared(fields, rest), rows, here)
        return TowerResult(sums=weights_of(output.loss, here, tower_rows))

    return Job(tower, finish=lambda state, means, sums: sums)


def loss_in_tower(
    step: StepParts, split: Split, tower_rows: int, sort: Callable[..., Changed] = sort_changes
) -> Callable[..., LossOutput]:
    """The loss of one tower, as a function of (params, shared, rows, here).

    The model state in its output is what this tower has `Changed`.
    """

    def forward(params: Any, shared: Shared, rows: list[Any], here: Tower) -> LossOutput:
        fields: Fields = shared.state
        rng = None
        if step.loss.takes_rng:
            rng = key_of_tower(jax.random.fold_in(fields.rng, fields.step), here)
        batch = split.rebuild(shared.rest, rows, here)
        given, treedef = jax.tree.flatten(fields.model_state)
        given = [enter(leaf, here) for leaf in given]
        loss = step.loss.in_tower(here)
        with inside_a_tower(tower_rows), keeping_ratios():
            output = loss(params, batch, rng, jax.tree.unflatten(treedef, given))
        new = _leaves_like(treedef, output.model_state)
        changed = sort(given, new, here, tower_rows, step.model_state_from)
        return output._replace(model_state=changed)

    return forward


def own_mean(loss: Any, here: Tower, tower_rows: int, reduction: Reduction) -> jax.Array:
    """The mean loss of this tower's real rows, shape (); 0 if it has none."""
    if is_ratio(loss):
        # What is added to a ratio, such as a penalty, counts whole in the mean of every tower.
        alone = here._replace(all_rows=jnp.maximum(here.num_rows, 1))
        sums = sums_of(loss, alone, tower_rows)
        known = [jnp.where(weight == 0, 1, weight) for weight in sums.weights]
        return join_ratio(sums, known)
    if is_per_example(loss, tower_rows):
        return row_sum(wide(loss), here) / jnp.maximum(here.num_rows, 1).astype(wide(loss).dtype)
    return wide(loss) if reduction == "mean" else wide(loss) / tower_rows


def _own_place(mean: jax.Array, here: Tower, num_towers: int) -> jax.Array:
    """This tower's mean loss at its number, else zeros, shape (towers,): the sum has them all."""
    numbers = jnp.arange(num_towers, dtype=here.number.dtype)
    return jnp.where(numbers == here.number, mean, 0)


def _leaves_like(treedef: Any, new: Any) -> list[Any]:
    leaves, found = jax.tree.flatten(new)
    if any(map(is_ratio, jax.tree.leaves(new, is_leaf=is_ratio))):
        raise OutputError(
            "the loss returned an mt.ratio in its model_state: a ratio is for losses and metrics. "
            'For a state divide the sums over all towers: jax.lax.psum(total.sum(), "towers") / '
            'jax.lax.psum(weight.sum(), "towers").'
        )
    if found != treedef:
        raise OutputError(
            "the loss returned a model_state of another structure than it was given: return the "
            f"same tree with new values.\ngiven: {treedef}\nreturned: {found}"
        )
    return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]

"""The job of one training step: loss and gradients in every tower, one update of everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from multitower.checks.first_look import look
from multitower.engines.job import Job, Shared, TowerResult
from multitower.errors import OutputError
from multitower.functions.calls import Leaves
from multitower.functions.outputs import (
    find_row_leaves,
    is_per_example,
    row_sum,
    share_of_mean,
    wide,
)
from multitower.models.state import Changed, enter, join, sort_changes
from multitower.steps.clipping import clipped, leaf_squares
from multitower.steps.fields import Fields
from multitower.steps.loss import LossFunction, LossOutput
from multitower.towers.rows import Parts, Split, Tower, device_dtype
from multitower.towers.surroundings import inside_a_tower

if TYPE_CHECKING:
    import optax

EmaDecay = float | Callable[[jax.Array], Any]


@dataclass(frozen=True)
class StepParts:
    """What a training step is made of, apart from where it runs."""

    loss: LossFunction
    optimizer: "optax.GradientTransformation"
    ema_decay: EmaDecay | None
    model_state_from: Literal["mean", "first"]
    diagnostics: bool
    skip_nonfinite: bool
    clip_norm: float | None


class Means(NamedTuple):
    """What a tower hands on to be averaged."""

    metrics: Any
    model_state: Any


class Sums(NamedTuple):
    """What a tower hands on to be added up."""

    gradients: Any
    metrics: Leaves
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
    """One step's work; the state is Fields, the rest are the batch's shared leaves.

    `finish` returns the new Fields and the metrics. With `cut` the sums of the gradients end as
    blocks, and `finish` leaves the parameters as they are.
    """
    forward = _forward(step, split, tower_rows)

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        fields: Fields = shared.state

        def objective(params: Any) -> tuple[Any, LossOutput]:
            output = forward(params, shared, rows, here)
            share = share_of_mean(output.loss, here, tower_rows)
            return share, output._replace(loss=wide(output.loss))

        (_, output), gradients = jax.value_and_grad(objective, has_aux=True)(fields.params)

        def metrics_of(rows: list[Any]) -> Any:
            output = forward(fields.params, shared, rows, here)
            return {"loss": output.loss, **output.metrics}

        metrics = jax.tree.map(wide, {"loss": output.loss, **output.metrics})
        counted, averaged = _sort_metrics(metrics, metrics_of, rows, here)
        changed: Changed = output.model_state
        return TowerResult(
            means=Means(averaged, changed.averaged),
            sums=Sums(
                () if cut else gradients,
                counted,
                # A float, for the company of the sums; exact up to 2**24 rows.
                here.num_rows.astype(float),
                changed.first,
                _own_place(output.loss, here, num_towers) if step.diagnostics else (),
            ),
            blocks=cut(gradients) if cut else (),
        )

    def finish(fields: Fields, means: Means, sums: Sums) -> tuple[Fields, Any]:
        counted = sums.metrics
        # Sum over weight, rounded once: 5 of 10 is 0.5 however the rows were cut.
        exact = {number: total / sums.num_rows for number, total in counted.by_number.items()}
        leaves = {**means.metrics, **exact}
        metrics = jax.tree.unflatten(counted.treedef, [leaves[n] for n in range(len(leaves))])
        model_state = join(fields.model_state, Changed(means.model_state, sums.model_state))
        if cut:
            if step.diagnostics:
                metrics["tower_losses"] = sums.tower_losses
            return fields._replace(step=fields.step + 1, model_state=model_state), metrics
        new = update(step, fields, sums.gradients, metrics["loss"], model_state)
        if not (step.diagnostics or step.skip_nonfinite):
            return new, metrics
        finite = finite_leaves(new.params)
        good = finite.all() & jnp.isfinite(metrics["loss"])
        if step.skip_nonfinite:
            metrics["skipped"] = 1 - good.astype(jnp.float32)
            kept = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, fields)
            new = kept._replace(step=new.step)  # the batch is used up; the update is not made
        if step.diagnostics:
            metrics.update(tower_losses=sums.tower_losses, finite_params=finite)
        return new, metrics

    return Job(tower, finish)


def averaged_output(step: StepParts, parts: Parts, fields: Fields, tower_rows: int) -> str | None:
    """Names what a loss averages over its rows itself, or None if all it returns is per example.

    Raises:
        OutputError: the loss returned something that it must not.
    """
    forward = _forward(step, parts.split, tower_rows)
    rows = [jax.ShapeDtypeStruct((tower_rows, *x.shape[1:]), device_dtype(x)) for x in parts.rows]
    shared = Shared(fields, parts.shared)
    here = Tower(jnp.int32(0), jnp.int32(tower_rows), jnp.int32(tower_rows))

    def run(rows: list[Any]) -> LossOutput:
        return forward(fields.params, shared, rows, here)

    output = jax.eval_shape(run, rows)
    by_row = is_per_example(output.loss, tower_rows)
    is_row = find_row_leaves(lambda rows: run(rows).metrics, rows, output.metrics, "metrics")
    look(
        lambda rows, here: _by_name(_forward(step, parts.split, len(rows[0])), shared, rows, here),
        rows,
        (fields, parts.shared),
        averages=True,
        names=lambda number: f"batch{parts.split.row_paths()[number]}",
    )
    if not by_row:
        return "a scalar loss"
    flat, _ = jax.tree_util.tree_flatten_with_path(output.metrics)
    for (path, _), by_row in zip(flat, is_row, strict=True):
        if not by_row:
            return f"metrics{jax.tree_util.keystr(path)} is not per example"
    return None


def _by_name(forward: Callable[..., LossOutput], shared: Shared, rows: Any, here: Tower) -> Any:
    output = forward(shared.state.params, shared, rows, here)
    averaged = output.model_state.averaged
    return {"loss": output.loss, "metrics": output.metrics, "model_state": averaged}


def _forward(step: StepParts, split: Split, tower_rows: int) -> Callable[..., LossOutput]:
    """The loss of one tower, as a function of (params, shared, rows, here).

    Its model state is what this tower has `Changed`.
    """

    def forward(params: Any, shared: Shared, rows: list[Any], here: Tower) -> LossOutput:
        fields: Fields = shared.state
        rng = None
        if step.loss.takes_rng:
            rng = jax.random.fold_in(jax.random.fold_in(fields.rng, fields.step), here.number)
        batch = split.rebuild(shared.rest, rows, here)
        given, treedef = jax.tree.flatten(fields.model_state)
        given = [enter(leaf, here) for leaf in given]
        with inside_a_tower(tower_rows):
            output = step.loss(params, batch, rng, jax.tree.unflatten(treedef, given))
        new = _leaves_like(treedef, output.model_state)
        changed = sort_changes(given, new, here, tower_rows, step.model_state_from)
        return output._replace(model_state=changed)

    return forward


def _sort_metrics(
    metrics: Any, metrics_of: Callable[[list[Any]], Any], rows: list[Any], here: Tower
) -> tuple[Leaves, dict[int, jax.Array]]:
    """Sums over rows of the metrics that have any, and the others, which are averaged."""
    leaves, treedef = jax.tree.flatten(metrics)
    is_row = find_row_leaves(metrics_of, rows, metrics, "metrics")
    counted = {i: row_sum(leaf, here) for i, leaf in enumerate(leaves) if is_row[i]}
    averaged = {i: leaf for i, leaf in enumerate(leaves) if not is_row[i]}
    return Leaves(counted, treedef), averaged


def _own_place(loss: jax.Array, here: Tower, num_towers: int) -> jax.Array:
    """This tower's mean loss in its own place among zeros: the sum lays them side by side."""
    mean = loss
    if loss.ndim:
        mean = row_sum(loss, here) / jnp.maximum(here.num_rows, 1).astype(loss.dtype)
    return jnp.where(jnp.arange(num_towers) == here.number, mean, 0)


def finite_leaves(params: Any) -> jax.Array:
    """For each leaf whether all of it is finite, bool, shape (leaves,)."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)])


def update(
    step: StepParts,
    fields: Fields,
    gradients: Any,
    loss: jax.Array,
    model_state: Any,
    *,
    squares: jax.Array | None = None,
) -> Fields:
    """Makes one update of the parameters and their moving average.

    Args:
        step: what to do.
        fields: the state before.
        gradients: means over all rows.
        loss: likewise, for optimizers that look at it.
        model_state: what the state gets.
        squares: of the gradients, by leaf, where `gradients` are a block of them.
    """
    import optax  # noqa: PLC0415 (half of the time of `import multitower`, needed here first)

    if step.clip_norm is not None:
        squares = leaf_squares(gradients) if squares is None else squares
        gradients = clipped(gradients, squares, step.clip_norm)
    optimizer = optax.with_extra_args_support(step.optimizer)
    updates, opt_state = optimizer.update(
        gradients, fields.opt_state, fields.params, value=loss, grad=gradients
    )
    params = optax.apply_updates(fields.params, updates)
    count = fields.step + 1
    ema_params = None
    if step.ema_decay is not None:
        decay = step.ema_decay(count) if callable(step.ema_decay) else step.ema_decay
        ema_params = jax.tree.map(lambda e, p: _ema(e, p, decay), fields.ema_params, params)
    new = Fields(count, params, opt_state, ema_params, model_state, fields.rng)
    return _check_same_types(fields, new)


def _ema(average: jax.Array, value: jax.Array, decay: Any) -> jax.Array:
    new = average - (1 - decay) * (average - value.astype(average.dtype))
    return new.astype(average.dtype)


def _leaves_like(treedef: Any, new: Any) -> list[Any]:
    leaves, found = jax.tree.flatten(new)
    if found != treedef:
        raise OutputError(
            "the loss returned a model_state of another structure than it was given: return the "
            f"same tree with new values.\ngiven: {treedef}\nreturned: {found}"
        )
    return [leaf if isinstance(leaf, jax.Array) else jnp.asarray(leaf) for leaf in leaves]


def _check_same_types(old: Fields, new: Fields) -> Fields:
    """An update that changes a dtype would compile again at the next step, or lose bits."""
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise OutputError(
            "the update changes the structure of the training state: the optimizer's update, or "
            "the loss's model_state, returns another tree than it was given.\n"
            f"before: {jax.tree.structure(old)}\nafter: {jax.tree.structure(new)}"
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(old)
    for (path, before), after in zip(flat, jax.tree.leaves(new), strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            raise OutputError(
                f"state{jax.tree_util.keystr(path)} is {before.dtype}{list(before.shape)} and "
                f"would become {after.dtype}{list(after.shape)} in the update. Keep both: "
                "cast in the loss (model state) or give the optimizer the matching dtype."
            )
    return new

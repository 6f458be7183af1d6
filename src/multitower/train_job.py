"""The job of one training step: loss and gradients in every tower, one update of everything."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp

from multitower.errors import OutputError
from multitower.job import Job, Shared, TowerResult
from multitower.loss_function import LossFunction, LossOutput
from multitower.outputs import find_row_leaves, is_per_example, row_sum
from multitower.rows import Parts, Split, Tower
from multitower.tower_function import Leaves
from multitower.train_state import Fields

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


def make_job(step: StepParts, split: Split, tower_rows: int, num_towers: int) -> Job:
    """One step's work; the state is Fields, the rest are the batch's shared leaves.

    `finish` returns the new Fields and the metrics.
    """
    forward = _forward(step, split)

    def tower(shared: Shared, rows: list[Any], here: Tower) -> TowerResult:
        fields: Fields = shared.state

        def objective(params: Any) -> tuple[Any, LossOutput]:
            output = forward(params, shared, rows, here)
            loss = _wide(output.loss)
            by_row = is_per_example(output.loss, tower_rows)
            mean = row_sum(loss, here) / tower_rows if by_row else loss
            return mean, output._replace(loss=loss)

        (_, output), gradients = jax.value_and_grad(objective, has_aux=True)(fields.params)

        def metrics_of(rows: list[Any]) -> Any:
            output = forward(fields.params, shared, rows, here)
            return {"loss": output.loss, **output.metrics}

        metrics = jax.tree.map(_wide, {"loss": output.loss, **output.metrics})
        counted, averaged = _sort_metrics(metrics, metrics_of, rows, here)
        mean_state, first_state = _sort_state(output.model_state, step.model_state_from)
        weight = here.num_rows.astype(float) / tower_rows
        return TowerResult(
            means=(gradients, averaged, jax.tree.map(lambda x: _weigh(x, weight), mean_state)),
            sums=(
                counted,
                # A float, for the company of the sums; exact up to 2**24 rows.
                here.num_rows.astype(float),
                jax.tree.map(lambda x: _only_first(x, here), first_state),
                _own_place(output.loss, here, num_towers) if step.diagnostics else (),
            ),
        )

    def finish(fields: Fields, means: Any, sums: Any) -> tuple[Fields, Any]:
        gradients, averaged, mean_state = means
        counted, num_rows, first_state, tower_losses = sums
        # Sum over weight, rounded once: 5 of 10 is 0.5 however the rows were cut.
        exact = {number: total / num_rows for number, total in counted.by_number.items()}
        leaves = {**averaged, **exact}
        metrics = jax.tree.unflatten(counted.treedef, [leaves[n] for n in range(len(leaves))])
        model_state = _join_state(fields.model_state, mean_state, first_state)
        new = _update(step, fields, gradients, metrics["loss"], model_state)
        if not (step.diagnostics or step.skip_nonfinite):
            return new, metrics
        finite = jnp.stack([jnp.isfinite(x).all() for x in jax.tree.leaves(new.params)])
        good = finite.all() & jnp.isfinite(metrics["loss"])
        if step.skip_nonfinite:
            metrics["skipped"] = 1 - good.astype(jnp.float32)
            kept = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, fields)
            new = kept._replace(step=new.step)  # the batch is used up; the update is not made
        if step.diagnostics:
            metrics.update(tower_losses=tower_losses, finite_params=finite)
        return new, metrics

    return Job(tower, finish)


def averaged_output(step: StepParts, parts: Parts, fields: Fields, tower_rows: int) -> str | None:
    """Names what a loss averages over its rows itself, or None if all it returns is per example.

    Raises:
        OutputError: the loss returned something that it must not.
    """
    forward = _forward(step, parts.split)
    rows = [jax.ShapeDtypeStruct((tower_rows, *x.shape[1:]), _device_dtype(x)) for x in parts.rows]
    shared = Shared(fields, parts.shared)
    here = Tower(jnp.int32(0), jnp.int32(tower_rows))

    def run(rows: list[Any]) -> LossOutput:
        return forward(fields.params, shared, rows, here)

    output = jax.eval_shape(run, rows)
    by_row = is_per_example(output.loss, tower_rows)
    is_row = find_row_leaves(lambda rows: run(rows).metrics, rows, output.metrics, "metrics")
    if not by_row:
        return "a scalar loss"
    flat, _ = jax.tree_util.tree_flatten_with_path(output.metrics)
    for (path, _), by_row in zip(flat, is_row, strict=True):
        if not by_row:
            return f"metrics{jax.tree_util.keystr(path)} is not per example"
    return None


def _forward(step: StepParts, split: Split) -> Callable[..., LossOutput]:
    """The loss of one tower, as a function of (params, shared, rows, here)."""

    def forward(params: Any, shared: Shared, rows: list[Any], here: Tower) -> LossOutput:
        fields: Fields = shared.state
        rng = None
        if step.loss.takes_rng:
            rng = jax.random.fold_in(jax.random.fold_in(fields.rng, fields.step), here.number)
        batch = split.rebuild(shared.rest, rows, here)
        output = step.loss(params, batch, rng, fields.model_state)
        return output._replace(model_state=_like_before(fields.model_state, output.model_state))

    return forward


def _device_dtype(leaf: Any) -> Any:
    """The dtype that an array has on a device (float32 for NumPy's float64, by default)."""
    return leaf.dtype if isinstance(leaf, jax.Array) else jax.dtypes.canonicalize_dtype(leaf.dtype)


def _wide(value: Any) -> jax.Array:
    """At least float32, in which sums of many rows are right."""
    value = jnp.asarray(value)
    return value.astype(jnp.promote_types(value.dtype, jnp.float32))


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


def _update(
    step: StepParts, fields: Fields, gradients: Any, loss: jax.Array, model_state: Any
) -> Fields:
    import optax  # noqa: PLC0415 (half of the time of `import multitower`, needed here first)

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


def _like_before(old: Any, new: Any) -> Any:
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise OutputError(
            "the loss returned a model_state of another structure than it was given: return the "
            f"same tree with new values.\ngiven: {jax.tree.structure(old)}\n"
            f"returned: {jax.tree.structure(new)}"
        )
    return jax.tree.map(jnp.asarray, new)


def _sort_state(model_state: Any, source: str) -> tuple[dict[int, Any], dict[int, Any]]:
    """Leaves that are averaged over towers, and leaves that are taken from the first one."""
    averaged: dict[int, Any] = {}
    first: dict[int, Any] = {}
    for number, leaf in enumerate(jax.tree.leaves(model_state)):
        is_float = jnp.issubdtype(leaf.dtype, jnp.inexact)
        (averaged if is_float and source == "mean" else first)[number] = leaf
    return averaged, first


def _join_state(old: Any, averaged: dict[int, Any], first: dict[int, Any]) -> Any:
    leaves = {**averaged, **first}
    olds, treedef = jax.tree.flatten(old)
    for number, leaf in enumerate(olds):
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[number] = jax.random.wrap_key_data(
                leaves[number], impl=jax.random.key_impl(leaf)
            )
    return jax.tree.unflatten(treedef, [leaves[number] for number in range(len(olds))])


def _weigh(leaf: jax.Array, weight: jax.Array) -> jax.Array:
    # An empty tower saw copies of rows only: whatever it found, even a NaN, does not count.
    return jnp.where(weight > 0, leaf * weight.astype(leaf.dtype), jnp.zeros_like(leaf))


def _only_first(leaf: jax.Array, here: Tower) -> jax.Array:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    return jnp.where(here.number == 0, leaf, jnp.zeros_like(leaf))


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

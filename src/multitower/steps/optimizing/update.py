"""The update: one of the parameters and their moving average, from the mean gradient."""

from typing import Any

import jax
import jax.numpy as jnp

from multitower.errors import OutputError
from multitower.functions.outputs import wide
from multitower.steps.optimizing.clipping import clipped, leaf_squares
from multitower.steps.optimizing.extra_metrics import NORM, extra_metrics
from multitower.steps.optimizing.optimizer import call_update
from multitower.steps.parts import StepParts
from multitower.steps.precision import SMALLEST_SCALE, next_scale, unscaled
from multitower.steps.state.fields import Fields


def begin(step: StepParts, params: Any) -> tuple[Any, Any]:
    """The first optimizer state, and the first moving average, which is None without `ema_decay`.

    Args:
        step: what the step is made of.
        params: the first parameters, or a block or piece of them.
    """
    ema = jax.tree.map(wide, params) if step.ema_decay is not None else None
    return with_strong_types(step.optimizer.init(params)), ema


def with_strong_types(tree: Any) -> Any:
    """The same numbers, none of which adapts to the dtypes around it, as Python's numbers do.

    A checkpoint keeps dtypes only: a run that it begins would compute with others.
    """

    def strong(leaf: Any) -> Any:
        is_weak = getattr(leaf, "weak_type", isinstance(leaf, int | float | complex))
        return jax.lax.convert_element_type(leaf, jnp.result_type(leaf)) if is_weak else leaf

    return jax.tree.map(strong, tree)


def finite_leaves(params: Any) -> jax.Array:
    """Whether all elements of each leaf are finite, bool, shape (leaves,)."""
    found = [jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]
    return jnp.stack(found) if found else jnp.ones(0, bool)


def stays_finite(old: Any, new: Any) -> jax.Array:
    """Whether no finite number of an optimizer's state has become infinite or NaN, bool, shape ().

    A gradient that `optax.MultiSteps` adds up reaches the parameters steps later.
    """
    pairs = zip(jax.tree.leaves(old), jax.tree.leaves(new), strict=True)
    found = [
        (jnp.isfinite(after) | ~jnp.isfinite(before)).all()
        for before, after in pairs
        if jnp.issubdtype(after.dtype, jnp.inexact)
    ]
    return jnp.stack(found).all() if found else jnp.bool_(True)


def update_if_good(
    step: StepParts,
    fields: Fields,
    gradients: Any,
    metrics: dict[str, Any],
    model_state: Any,
) -> tuple[Fields, dict[str, Any]]:
    """Makes an update, unless `skip_nonfinite` is set and something is not finite.

    With a loss scale, no update is made from gradients that are not finite.

    Args:
        step: what the step is made of.
        fields: the state before the update.
        gradients: means over all rows, times the loss scale.
        metrics: means over all rows; the metrics that the step adds are written into this dict.
        model_state: the model state after the update.

    Returns:
        The state after it, and all metrics.
    """
    gradients = unscaled(gradients, fields.loss_scale)
    squares = leaf_squares(gradients) if NORM in step.extra_metrics else None
    new = update(step, fields, gradients, metrics["loss"], model_state, squares=squares)
    told = extra_metrics(step, new.opt_state, squares)  # of this update, even if it is not made
    if not (step.diagnostics or step.skip_nonfinite or fields.loss_scale is not None):
        return new, {**metrics, **told}
    finite = finite_leaves(new.params)
    good = jnp.bool_(True)
    if step.skip_nonfinite:
        good = finite.all() & jnp.isfinite(metrics["loss"])
        good &= stays_finite(fields.opt_state, new.opt_state)
    if fields.loss_scale is not None:
        no_overflow = finite_leaves(gradients).all()
        good &= no_overflow
        new = new._replace(loss_scale=next_scale(fields.loss_scale, no_overflow))
        metrics["loss_scale"] = fields.loss_scale["scale"]
        # Where a smaller scale can help, the step does not report the parameters as not finite.
        finite |= ~no_overflow & (fields.loss_scale["scale"] > SMALLEST_SCALE)
    if step.skip_nonfinite or fields.loss_scale is not None:
        metrics["skipped"] = 1 - good.astype(jnp.float32)
        choose = lambda n, o: n if n is o else jnp.where(good, n, o)  # the key does not change
        kept = jax.tree.map(choose, new, fields)
        # The step still counts, as the batch has been used.
        new = kept._replace(step=new.step, loss_scale=new.loss_scale)
    if step.diagnostics:
        metrics["finite_params"] = finite
    return new, {**metrics, **told}


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
        step: what the step is made of.
        fields: the state before the update.
        gradients: means over all rows.
        loss: the mean over all rows, shape (), for optimizers that take it.
        model_state: the model state after the update.
        squares: sums of squares of the whole gradients, shape (leaves,); None to compute them from
            `gradients`, which must then not be blocks.
    """
    import optax  # noqa: PLC0415 (see call_update)

    if step.clip_norm is not None:
        squares = leaf_squares(gradients) if squares is None else squares
        gradients = clipped(gradients, squares, step.clip_norm)
    updates, opt_state = call_update(
        step.optimizer, gradients, fields.opt_state, fields.params, loss
    )
    opt_state = with_strong_types(opt_state)
    params = optax.apply_updates(fields.params, updates)
    count = fields.step + 1
    ema_params = None
    if step.ema_decay is not None:
        decay = step.ema_decay(count) if callable(step.ema_decay) else step.ema_decay
        ema_params = jax.tree.map(lambda e, p: _ema(e, p, decay), fields.ema_params, params)
    given = (count, params, opt_state, ema_params, model_state, fields.rng)
    return check_same_types(fields, Fields(*given, loss_scale=fields.loss_scale))


def _ema(average: jax.Array, value: jax.Array, decay: Any) -> jax.Array:
    with jax.numpy_dtype_promotion("standard"):  # a schedule has one dtype, parameters have several
        new = average - (1 - decay) * (average - value.astype(average.dtype))
    return new.astype(average.dtype)


def check_same_types(old: Fields, new: Fields) -> Fields:
    """Refuses an update that changes the structure, a shape or a dtype of the state.

    The next step would be compiled again, or lose bits.
    """
    if jax.tree.structure(old) != jax.tree.structure(new):
        raise OutputError(
            "the update changes the structure of the training state: the optimizer's update, or "
            "the loss's model_state, returns another tree than it was given.\n"
            f"before: {jax.tree.structure(old)}\nafter: {jax.tree.structure(new)}"
        )
    flat, _ = jax.tree_util.tree_flatten_with_path(old)
    for (path, before), after in zip(flat, jax.tree.leaves(new), strict=True):
        if before.shape != after.shape or before.dtype != after.dtype:
            remedy = "cast in the loss (model state) or give the optimizer the matching dtype."
            if len(before.shape) > len(after.shape):
                remedy = "return an array of the shape that was given."
            elif before.shape != after.shape:
                remedy = (
                    "in the loss the batch has the rows of one tower, and mt.all_rows(x) has those "
                    "of all towers. A state of the rows themselves is returned as aux of "
                    "mt.value_and_grad."
                )
            raise OutputError(
                f"state{jax.tree_util.keystr(path)} is {before.dtype}{list(before.shape)} and "
                f"would become {after.dtype}{list(after.shape)} in the update. Keep both: {remedy}"
            )
    return new

"""plan: memory and traffic of a recipe's steps in every layout, before any step is made."""

import jax

from multitower.data.augmentation import augmented
from multitower.planning.plan import Plan
from multitower.planning.plan import plan as plan_step
from multitower.recipes.definition import Recipe, takes
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob, clip_norm_of, steps_per_epoch_of


def plan(recipe: Recipe, options: RunOptions, *, machines: int, memory: str | None) -> Plan:
    """Plans a recipe's steps from shapes; only the data set is read.

    Args:
        recipe: what to train.
        options: of the run; `devices` is the number on each machine, and they need not exist.
        machines: the number of machines.
        memory: memory of one device, as for `multitower.plan`.

    Returns:
        The plan.

    Raises:
        MultitowerError: as for `multitower.plan`.
    """
    job = RecipeJob.of(recipe, RunOptions(global_batch=options.global_batch), None)
    steps_per_epoch = steps_per_epoch_of(job.data, job.global_batch)
    rng = jax.random.key(0)
    return plan_step(
        recipe.loss if recipe.augment is None else augmented(recipe.loss, recipe.augment),
        recipe.make_optimizer(recipe.steps, steps_per_epoch=steps_per_epoch),
        jax.eval_shape(recipe.init, rng),
        job.first_batch(job.global_batch),
        devices=options.devices,
        machines=machines,
        towers=options.towers,
        memory=memory,
        model_state=None if recipe.model_state is None else recipe.model_state(),
        rng=rng if takes(recipe.loss, "rng") else None,
        ema_decay=recipe.ema_decay if options.ema_decay is None else options.ema_decay,
        clip_norm=clip_norm_of(recipe, options),
        compute_dtype=options.compute_dtype,
        sync_every=options.sync_every,
        outer_optimizer=options.outer_optimizer(),
        local_state="average" if options.local_state == "average" else "keep",
        updates="asynchronous" if options.asynchronous else "synchronous",
        max_staleness=options.max_staleness,
        rotation=options.rotation_order(),
    )

"""plan: memory and traffic of a recipe's steps in every layout, before any step is made."""

import jax

from multitower.data.augmentation import augmented
from multitower.planning.plan import Plan
from multitower.planning.plan import plan as plan_step
from multitower.recipes.definition import Recipe, takes
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob, make_optimizer, planned_options


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
    rng = jax.random.key(0)
    try:
        params = jax.eval_shape(recipe.init, rng)
    except Exception:  # it uses values of arrays
        params = recipe.init(rng)
    return plan_step(
        recipe.loss if recipe.augment is None else augmented(recipe.loss, recipe.augment),
        make_optimizer(recipe, job.options, job.steps, job.data),
        params,
        job.first_batch(job.global_batch),
        machines=machines,
        memory=memory,
        model_state=None if recipe.model_state is None else recipe.model_state(),
        rng=rng if takes(recipe.loss, "rng") else None,
        **planned_options(recipe, options),
    )

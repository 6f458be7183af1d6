"""Gives a run more steps than it was begun with, even if it is finished."""

from pathlib import Path

from multitower.errors import RunError
from multitower.recipes.definition import Recipe
from multitower.runs.directory import RESULT, read_config, write_config
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob, make_optimizer, steps_of


def check_extension(directory: Path, recipe: Recipe, options: RunOptions, before: int) -> str:
    """Refuses a number of steps that a run cannot be given; changes no file.

    Args:
        directory: the directory of the run.
        recipe: the recipe of the run.
        options: the options of the run, with the new number of steps.
        before: the number of steps it was begun with.

    Returns:
        The directory.

    Raises:
        RunError: the new number of steps is smaller; or the optimizer depends on the number of
            steps, so that the updates so far would have been different.
    """
    steps = steps_of(recipe, options)
    if steps < before:
        raise RunError(
            f"--steps {steps}: the run in {directory} makes {before} steps. Pass more to extend it."
        )
    _refuse_another_optimizer(recipe, options, before)
    return str(directory)


def extend_run(directory: Path, steps: int) -> str:
    """Writes the new number of steps into a run's configuration; its old result is deleted.

    Args:
        directory: the directory of the run.
        steps: the number of steps that it makes now, in all.

    Returns:
        The directory.

    Raises:
        RunError: a file cannot be read or written.
    """
    config = read_config(directory)
    # In this order, because a run without a result can be resumed with any number of steps.
    (directory / RESULT).unlink(missing_ok=True)
    length = {"steps": steps, "epochs": None}
    write_config(directory, {**config, "options": {**config["options"], **length}})
    return str(directory)


def _refuse_another_optimizer(recipe: Recipe, options: RunOptions, before: int) -> None:
    """Refuses a recipe whose optimizer, such as its schedule, depends on the number of steps."""
    from multitower.training.same_run import describe_run  # noqa: PLC0415 (importing stays quick)

    job = RecipeJob.of(recipe, options, None, keep_best=False)
    steps = job.steps
    params = job.trainer.step.init(**job.first_state()).params
    two = [
        describe_run(make_optimizer(recipe, options, number, job.data), params, {})["optimizer"]
        for number in (before, steps)
    ]
    if two[0] != two[1]:
        raise RunError(
            f"--steps {steps}: the optimizer of {recipe.name} depends on the number of steps, as "
            f"the learning rate of most schedules does. Its updates so far are not those of "
            f"a run of {steps} steps, which has to begin anew: multitower train --config "
            f"config.json --steps {steps}, with the config.json of this run."
        )

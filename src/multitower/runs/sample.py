"""sample: the text that a trained language model writes."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np

from multitower.errors import RunError
from multitower.recipes.definition import DataSets, Recipe
from multitower.runs.options import LARGEST_SEED, RunOptions
from multitower.runs.samples import params_on_host
from multitower.runs.setup import RecipeJob


def sample(
    recipe: Recipe,
    options: RunOptions,
    directory: Path,
    prompt: str,
    *,
    num_bytes: int = 400,
    temperature: float = 0.7,
    seed: int = 0,
    best: bool = False,
) -> str:
    """Continues a text with the newest checkpoint of a run.

    Args:
        recipe: the recipe of the run.
        options: the options of the run; `devices` may differ.
        directory: the directory of the run.
        prompt: the beginning of the text.
        num_bytes: bytes to write.
        temperature: 0 takes the most probable byte each time; 1 draws from the model's
            probabilities.
        seed: the seed of the draws.
        best: use the best state that the run has kept.

    Returns:
        The text after the prompt.

    Raises:
        RunError: the recipe is not a language model, the prompt is empty or too long for it, or a
            number is out of range.
        CheckpointError: there is no checkpoint, or it cannot be read.

    Example:
        >>> from pathlib import Path
        >>> from multitower.recipes import find_recipe
        >>> from multitower.runs.options import RunOptions
        >>> from multitower.runs.sample import sample
        >>> sample(find_recipe("digits"), RunOptions(), Path("runs/a"), "To be, or")
        Traceback (most recent call last):
        multitower.RunError: runs/a is a run of the recipe digits, which writes no text. ...
    """
    if recipe.generate is None:
        raise RunError(
            f"{directory} is a run of the recipe {recipe.name}, which writes no text. Give the "
            "directory of a run of gpt: multitower train gpt."
        )
    if num_bytes < 1:
        raise RunError(f"{num_bytes} bytes were asked for: it must be 1 or more.")
    if not 0 <= temperature < math.inf:
        raise RunError(f"temperature={temperature}: it must be 0 or more.")
    if not 0 <= seed <= LARGEST_SEED:
        raise RunError(f"seed={seed} is out of range: use 0 to {LARGEST_SEED}.")
    # Only the weights are needed: the text of the run is not read, and may be missing.
    rows = np.zeros(options.global_batch or recipe.global_batch)
    without_text = replace(recipe, data=lambda: DataSets(train=rows, test=rows))
    job = RecipeJob.of(without_text, options, directory, keep_best=False)
    state = job.trainer.restore(**job.first_state(), best=best)
    how = {"num_bytes": num_bytes, "temperature": temperature, "seed": seed}
    return recipe.generate(params_on_host(state), prompt, **how)

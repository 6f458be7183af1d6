"""verify: the same few steps of a recipe on several numbers of devices; are all bits the same?"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any

from multitower.errors import DeviceError
from multitower.proof.verification import Verification, compare
from multitower.recipes.definition import Recipe
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob

_STEPS = 5
_TOWERS = 8


def verify(
    recipe: Recipe,
    options: RunOptions,
    devices: Sequence[int],
    watch: Callable[[str], None] = lambda doing: None,
) -> Verification:
    """Makes a recipe's first steps on several numbers of devices, and compares all bits.

    Args:
        recipe: what to train.
        options: of the runs; without `towers` there are 8, or as many as the most devices; without
            `steps` 5 are made. Nothing is written anywhere.
        devices: numbers of devices; one that comes twice checks that a run repeats itself.
        watch: is told before every step what is being done, in words.

    Returns:
        The fingerprints after every step, and where runs that differ part from the first.

    Raises:
        DeviceError: fewer towers than devices.
        MultitowerError: what the recipe's steps raise.
    """
    towers = options.towers or max(_TOWERS, *devices)
    if towers < max(devices):
        raise DeviceError(
            f"{towers} towers cannot fill {max(devices)} devices: use at most {towers} devices, or "
            f"--towers {max(devices)}."
        )
    options = replace(options, towers=towers, steps=options.steps or _STEPS)

    def run(count: int) -> Iterator[Any]:
        job = RecipeJob.of(recipe, replace(options, devices=count), None)
        step = job.trainer.step
        state = step.init(**job.first_state())
        for number, batch in enumerate(islice(job.batches(0), options.steps), start=1):
            of_all = "1 device" if count == 1 else f"{count} devices"
            watch(f"step {number} of {options.steps} on {of_all}")
            state, metrics = step(state, batch)
            yield state, metrics

    return compare(devices, run)

"""verify: the same few steps of a recipe on several numbers of devices; are all bits the same?"""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from multitower.errors import DeviceError
from multitower.hardware.devices import devices_in_words
from multitower.proof.record import Found, Run, Spot
from multitower.proof.verification import Verification, compare, look
from multitower.recipes.definition import Recipe
from multitower.runs.options import RunOptions
from multitower.runs.setup import RecipeJob, steps_of_round
from multitower.towers.feeding import prefetch

_STEPS = 5
_TOWERS = 8


def with_defaults(options: RunOptions, most_devices: int) -> RunOptions:
    """The options of runs to be compared.

    Args:
        options: without `towers` there are 8, or as many as the most devices; without `steps` 5
            are made, or as many as it takes until the towers have met once, or their rotation
            has begun anew.
        most_devices: of one run, over all its processes.

    Raises:
        DeviceError: fewer towers than devices.
        ArgumentError: towers that do not divide into the groups of a rotation.
    """
    towers = options.towers or max(_TOWERS, most_devices)
    if towers < most_devices:
        raise DeviceError(
            f"{towers} towers cannot fill {most_devices} devices: use at most {towers} devices, or "
            f"--towers {most_devices}."
        )
    steps = options.steps or max(_STEPS, steps_of_round(options, towers) + 1)
    return replace(options, towers=towers, steps=steps)


def verify(
    recipe: Recipe,
    options: RunOptions,
    devices: Sequence[int],
    watch: Callable[[str], None] = lambda doing: None,
) -> Verification:
    """Makes a recipe's first steps on several numbers of devices, and compares all bits.

    Args:
        recipe: what to train.
        options: of the runs, with defaults from `with_defaults`. Nothing is written anywhere.
        devices: numbers of devices; one that comes twice checks that a run repeats itself. Where
            several processes make one run, a single one, of each process.
        watch: is told before every step what is being done, in words.

    Returns:
        The records of all runs, and where those that differ part from the first one.

    Raises:
        DeviceError: fewer towers than devices.
        MultitowerError: what the recipe's steps raise.
    """
    options = with_defaults(options, jax.process_count() * max(devices))
    return compare(devices, run_maker(recipe, options, watch))


def run_maker(
    recipe: Recipe, options: RunOptions, watch: Callable[[str], None] = lambda doing: None
) -> Callable[[int], Run]:
    """What makes a recipe's first steps on a number of devices; arguments as for `verify`."""

    def run(count: int) -> Run:
        # Over processes a trainer makes local updates in calls: here in calls of one, everywhere.
        steps_per_call = None if options.sync_every is None else 1
        here = replace(options, devices=count, steps_per_call=steps_per_call)
        job = RecipeJob.of(recipe, here, None)
        step = job.trainer.step
        state = step.init(**job.first_state())
        batches = islice(job.batches(0), options.steps)
        of_all = devices_in_words(count)
        # Fed as in training: over several processes, each one reads the rows of its own towers.
        with closing(prefetch(batches, **job.feeding())) as ahead:
            for number, batch in enumerate(ahead, start=1):
                watch(f"step {number} of {options.steps} on {of_all}")
                if steps_per_call is None:
                    state, metrics = step(state, batch)
                else:
                    state, metrics = step(state, [batch])
                    metrics = jax.tree.map(lambda leaf: leaf[0], metrics)
                yield state, metrics

    return run


class Look(NamedTuple):
    """What a process that makes a run once more is to write down.

    Attributes:
        place: a leaf at one moment, and the process that has it.
        file: where to.
    """

    place: Found
    file: Path

    def to_text(self) -> str:
        """As JSON, for a command line."""
        step, process, spot = self.place
        return json.dumps([step, process, *spot, str(self.file)])

    @classmethod
    def of_text(cls, text: str) -> "Look":
        """From what `to_text` made."""
        step, process, stage, place, leaf, file = json.loads(text)
        return cls(Found(step, process, Spot(stage, place, leaf)), Path(file))

    def write(self, recipe: Recipe, options: RunOptions, devices: int) -> None:
        """Makes the run up to its step, and writes what it has there; call it on every process."""
        value = look(run_maker(recipe, options)(devices), self.place)
        if value is not None and jax.process_index() == self.place.process:
            about = json.dumps([value.dtype.name, value.shape])
            self.file.write_bytes(f"{about}\n".encode() + value.tobytes())

    def read(self) -> np.ndarray[Any, Any] | None:
        """What has been written; None if there was nothing."""
        if not self.file.exists():
            return None
        about, _, content = self.file.read_bytes().partition(b"\n")
        dtype, shape = json.loads(about)
        return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)

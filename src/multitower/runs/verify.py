"""verify: the same few steps of a recipe on several numbers of devices; are all bits the same?"""

import json
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
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

_STEPS = 5
_TOWERS = 8


def with_defaults(options: RunOptions, most_devices: int) -> RunOptions:
    """The options of runs to be compared.

    Args:
        options: the given options. By default there are 8 towers, or `most_devices` if that is
            more. By default 5 steps are made, or more, until the towers have met once or their
            rotation has begun again.
        most_devices: the largest number of devices of a run, over all its processes.

    Raises:
        DeviceError: fewer towers than devices.
        ArgumentError: the towers do not divide into the groups of a rotation.
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
        options: of the runs, with defaults from `with_defaults`. No files are written.
        devices: numbers of devices; the same number twice checks that a run is reproducible. If
            several processes make one run, a single number, of each process.
        watch: called before every step with the current work in words.

    Returns:
        The records of all runs, and the first difference of each from the first run.

    Raises:
        DeviceError: fewer towers than devices.
        MultitowerError: an error of the recipe's steps.
    """
    options = with_defaults(options, jax.process_count() * max(devices))
    return compare(devices, run_maker(recipe, options, watch))


def run_maker(
    recipe: Recipe, options: RunOptions, watch: Callable[[str], None] = lambda doing: None
) -> Callable[[int], Run]:
    """Makes a function that makes a recipe's first steps on a number of devices."""

    def run(count: int) -> Run:
        # With several processes a trainer makes local updates in calls of several steps; here each
        # call is one step, in every layout.
        steps_per_call = None if options.sync_every is None else 1
        here = replace(options, devices=count, steps_per_call=steps_per_call)
        job = RecipeJob.of(recipe, here, None)
        step, steps = job.trainer.step, options.steps
        assert steps is not None  # as `with_defaults` returns them
        state = step.init(**job.first_state())
        of_all = devices_in_words(count)
        # Fed as in training: with several processes, each reads the rows of its own towers.
        with closing(job.calls(0, steps)) as calls:
            for number, call in enumerate(calls, start=1):
                watch(f"step {number} of {steps} on {of_all}")
                state, metrics = step(state, call.batch)
                if steps_per_call is not None:
                    metrics = jax.tree.map(lambda leaf: leaf[0], metrics)
                yield state, metrics

    return run


class Look(NamedTuple):
    """The value that a process must write when it repeats a run.

    Attributes:
        place: a leaf at one moment, and the process that has it.
        file: the file to write to.
    """

    place: Found
    file: Path

    def to_text(self) -> str:
        """As JSON text, for an environment variable."""
        step, process, spot = self.place
        return json.dumps([step, process, *spot, str(self.file)])

    @classmethod
    def of_text(cls, text: str) -> "Look":
        """From what `to_text` made."""
        step, process, stage, place, leaf, file = json.loads(text)
        return cls(Found(step, process, Spot(stage, place, leaf)), Path(file))

    def write(self, recipe: Recipe, options: RunOptions, devices: int) -> None:
        """Repeats the run up to its step, and writes the value; call it on every process."""
        value = look(run_maker(recipe, options)(devices), self.place)
        if value is not None and jax.process_index() == self.place.process:
            about = json.dumps([value.dtype.name, value.shape])
            self.file.write_bytes(f"{about}\n".encode() + value.tobytes())

    def read(self) -> np.ndarray[Any, Any] | None:
        """The value that was written; None if there was none."""
        if not self.file.exists():
            return None
        about, _, content = self.file.read_bytes().partition(b"\n")
        dtype, shape = json.loads(about)
        return np.frombuffer(content, jnp.dtype(dtype)).reshape(shape)

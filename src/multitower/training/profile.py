"""Profiles: JAX's trace of some steps of a run, and a profile of device memory after them."""

import operator
from pathlib import Path
from typing import Any

import jax

from multitower.errors import RunError
from multitower.processes.together import is_first
from multitower.steps.state.train_state import TrainState

MEMORY = "memory.prof"


class Profile:
    """Traces the calls that make the steps `first` to `last`.

    A trace begins when the devices have finished all earlier steps, and ends when they have
    finished the last one, so that it holds whole steps. With several processes only process 0
    writes one.

    Args:
        directory: for the trace, and for `memory.prof`.
        steps: numbers of the first and the last step, counted from 1; None to trace nothing.
    """

    def __init__(self, directory: Path, steps: tuple[int, int] | None) -> None:
        self._directory = directory
        self._steps = steps if is_first() else None
        self._is_tracing = False

    def __enter__(self) -> "Profile":
        return self

    def __exit__(self, *_: object) -> None:
        self._stop()  # for a run that stops early

    def before(self, number: int, count: int, state: TrainState) -> None:
        """Starts a trace if it is due.

        Args:
            number: steps made so far.
            count: steps that the next call makes.
            state: the state before this call.
        """
        if self._steps is None or self._is_tracing:
            return
        first, last = self._steps
        if number + count >= first and number < last:
            state.block_until_ready()  # host-device sync: once in a run
            jax.profiler.start_trace(str(self._directory), create_perfetto_trace=True)
            self._is_tracing = True

    def after(self, number: int, state: TrainState, metrics: Any) -> None:
        """Ends the trace if it is due; waits for the results of the call, `state` and `metrics`."""
        if self._is_tracing and self._steps is not None and number >= self._steps[1]:
            state.block_until_ready()  # host-device sync: once in a run
            jax.block_until_ready(metrics)  # host-device sync: likewise
            self._stop()
            jax.profiler.save_device_memory_profile(str(self._directory / MEMORY))

    def _stop(self) -> None:
        if self._is_tracing:
            self._is_tracing = False
            jax.profiler.stop_trace()


def check_profile(profile: tuple[int, int], steps: int | None = None) -> None:
    """Refuses a range of steps that a run does not make.

    Args:
        profile: numbers of the first and the last step, counted from 1.
        steps: the steps of the run; None if they are not known yet.

    Raises:
        RunError: the range is empty, or the run does not make these steps.

    Example:
        >>> from multitower.training.profile import check_profile
        >>> check_profile((10, 13), 12)
        Traceback (most recent call last):
        multitower.RunError: profile=10:13, and the run makes 12 steps: ...
    """
    try:
        first, last = map(operator.index, profile)
    except (TypeError, ValueError) as error:
        raise RunError(
            f"profile={profile!r}: it must be the numbers of the first and the last step, such as "
            "(10, 13)."
        ) from error
    if not 1 <= first <= last:
        raise RunError(
            f"profile={first}:{last}: say the numbers of the first and the last step, such as "
            "10:13; steps count from 1."
        )
    if steps is not None and last > steps:
        raise RunError(
            f"profile={first}:{last}, and the run makes {steps} steps: the last one to profile is "
            f"at most step {steps}."
        )

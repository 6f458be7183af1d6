"""Epochs: how many steps they have, if the size of the data is known."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from multitower.errors import ArgumentError, RunError
from multitower.towers.refusals import whole_number

# `TrainState.step` is int32.
MOST_STEPS = 2**31 - 1


def steps_of_epoch(batches: Any, said: Any) -> Any:
    """The steps of one epoch, a number that need not be whole; None if unknown.

    Args:
        batches: the function that makes batches, or the iterator of `make_batches`.
        said: `steps_per_epoch` as the user gave it, or None.

    Raises:
        ArgumentError: it is not a finite number above 0.
    """
    size = getattr(batches, "steps_per_epoch", None) if said is None else said
    if size is not None and not 0 < size < math.inf:
        raise ArgumentError(f"steps_per_epoch={size}: it must be a number above 0.")
    return size


def steps_of_run(
    steps: int | None, epochs: float | None, said: Any, batches: Callable[[int], Iterator[Any]]
) -> int:
    """How many steps a run makes: `steps`, or those of `epochs`, rounded up to a whole step.

    Raises:
        ArgumentError: not exactly one of steps and epochs is given, or the size of an epoch is
            not known.
        RunError: fewer than one step, or more than int32 can count.
    """
    if (steps is None) == (epochs is None):
        raise ArgumentError(
            f"fit(steps={steps}, epochs={epochs}): give one of them: the updates to make in all, "
            "or the passes over the data."
        )
    if epochs is None:
        assert steps is not None
        is_whole = isinstance(steps, float) and steps.is_integer()  # such as 1e5
        # The last step is saved, and of 2.5 steps none is the last.
        steps = whole_number("steps", int(steps) if is_whole else steps, 1, RunError)
        check_steps(steps)
        return steps
    if not 0 < epochs < math.inf:
        raise RunError(f"epochs={epochs}: a run makes more than 0 epochs.")
    size = steps_of_epoch(batches, said)
    if size is None:
        first = batches(0)
        size = steps_of_epoch(first, None)
        close = getattr(first, "close", None)
        if close is not None:
            close()
    if size is None:
        raise ArgumentError(
            f"epochs={epochs}, and the size of an epoch is not known: batches(first) does not "
            "return an iterator of mt.make_batches. Pass steps_per_epoch=, the number of examples "
            "divided by the rows of a batch, or steps=."
        )
    return steps_in(epochs, size)


def check_steps(steps: float) -> None:
    """Refuses a number of updates out of range.

    Raises:
        RunError: fewer than one, or more than int32 can count.
    """
    if steps < 1:
        raise RunError(f"steps={steps}: a run makes at least one step.")
    if steps > MOST_STEPS:
        # Python cannot format a larger integer as a float.
        said = f"steps={steps:.15g}" if steps < 1e300 else "steps above 1e300"
        raise RunError(f"{said}: a run makes at most {MOST_STEPS} steps, counted in int32.")


def steps_in(epochs: float, size: float) -> int:
    """The updates of `epochs` epochs of `size` updates each, rounded up to a whole number.

    Raises:
        RunError: more than int32 can count.

    Example:
        >>> from multitower.training.fitting.epochs import steps_in
        >>> steps_in(1.5, 3), steps_in(100, 1.12)  # a product of 112.00000000000001
        (5, 112)
    """
    try:
        steps = max(1, round(epochs * size, 9))
    except OverflowError:  # an integer too large for a float
        steps = math.inf
    check_steps(steps)
    return math.ceil(steps)

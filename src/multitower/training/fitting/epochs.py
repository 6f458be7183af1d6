"""Epochs: how many steps they have, if the size of the data is known."""

import math
from collections.abc import Callable, Iterator
from typing import Any

from multitower.errors import ArgumentError, RunError, whole_number
from multitower.towers.leaves import as_python

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
    if size is not None and not _is_above_0(size):
        raise ArgumentError(f"steps_per_epoch={size!r}: it must be a number above 0.")
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
        return check_steps(steps)
    if not _is_above_0(epochs):
        raise RunError(f"epochs={epochs!r}: it must be a number above 0.")
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
    return steps_in(as_python(epochs), size)


def _is_above_0(value: Any) -> bool:
    try:
        return not isinstance(value, bool) and bool(0 < value < math.inf)
    except (TypeError, ValueError):  # a word, or an array
        return False


def check_steps(steps: Any) -> int:
    """A number of updates, as a Python integer; of 2.5 steps none is the last, which is saved.

    Raises:
        RunError: it is not a whole number, fewer than one, or more than int32 can count.
    """
    is_whole = isinstance(steps, float) and steps.is_integer()  # such as 1e5
    number = whole_number("steps", int(steps) if is_whole else steps, 1, RunError)
    _refuse_too_many(number)
    return number


def _refuse_too_many(steps: float) -> None:
    if steps > MOST_STEPS:
        # Python cannot format a larger integer as a float.
        said = f"steps={float(steps):.15g}" if steps < 1e300 else "steps above 1e300"
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
    _refuse_too_many(steps)
    return math.ceil(steps)

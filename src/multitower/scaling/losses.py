"""Compares loss curves between numbers of devices: a speed-up counts only for equal training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from multitower.hardware.devices import devices_in_words

_RELATIVE = 1e-3
_ABSOLUTE = 1e-6  # a smaller loss consists of rounding
# Rounding errors grow from step to step up to the size of the loss: only the first steps are
# compared.
_FEW_STEPS = 10


@dataclass(frozen=True)
class LossCheck:
    """The result of a comparison of loss curves.

    Attributes:
        same: whether all curves are the same; None if they were not compared.
        rule: what "the same" means; or why nothing was compared.
        steps: how many steps were compared.
        largest_difference: the largest relative difference; None if nothing was compared.
        differences: a sentence for each curve that differs, about the first step at which it does.
    """

    same: bool | None
    rule: str
    steps: int
    largest_difference: float | None
    differences: tuple[str, ...]


def compare_losses(curves: Mapping[int | str, Sequence[float]], *, exact: bool) -> LossCheck:
    """Compares the losses of the same steps on several numbers of devices with those on the first.

    Args:
        curves: the loss of every step, by number of devices or layout of processes.
        exact: whether all bits must agree; otherwise the first 10 steps, to 0.1 percent.

    Returns:
        Whether they agree, and where they differ.

    Example:
        >>> from multitower.scaling.losses import compare_losses
        >>> check = compare_losses({1: [0.7, 0.6], 2: [0.7, 0.5]}, exact=False)
        >>> print(check.differences[0])
        step 2: the loss is 0.6 on 1 device and 0.5 on 2 devices
    """
    if len(curves) < 2:
        return LossCheck(None, "one measurement: there is nothing to compare", 0, None, ())
    fewest = next(iter(curves))
    steps = len(curves[fewest]) if exact else min(_FEW_STEPS, len(curves[fewest]))
    largest = 0.0
    differences: list[str] = []
    for count, curve in curves.items():
        pairs = list(zip(curves[fewest][:steps], curve[:steps], strict=True))
        largest = max(largest, *(_relative(a, b) for a, b in pairs))
        found = next((i for i, pair in enumerate(pairs) if not _agree(*pair, exact=exact)), None)
        if found is not None:
            a, b = pairs[found]
            differences.append(
                f"step {found + 1}: the loss is {a!r} on {_devices(fewest)} and {b!r} on "
                f"{_devices(count)}"
            )
    rule = "the same bits" if exact else f"within rounding ({_RELATIVE:g} of the loss)"
    return LossCheck(not differences, rule, steps, largest, tuple(differences))


def _agree(a: float, b: float, *, exact: bool) -> bool:
    return a == b if exact else abs(a - b) <= _RELATIVE * max(abs(a), abs(b)) + _ABSOLUTE


def _relative(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b)) if a != b else 0.0


def _devices(count: int | str) -> str:
    return count if isinstance(count, str) else devices_in_words(count)

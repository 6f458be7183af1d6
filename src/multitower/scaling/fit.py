"""A model of the step time, to predict it on more devices; and the error of its predictions.

On D devices, `step_s = compute_s / D + transfer_s * 2 (D - 1) / D + latency_s * L(D)`. The work is
shared. A ring all-reduce sends 2 (D - 1) / D times the gradients. Each of its L(D) steps has a
latency: L(D) = D - 1 in a ring, log2 D in a tree. No coefficient is below zero.
"""

import itertools
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from multitower.errors import RunError

_FEWEST_POINTS = 3
_ROUNDS: dict[str, Callable[[int], float]] = {
    "log2 devices": math.log2,
    "devices - 1": lambda count: count - 1.0,
}
_EXACT = 1e-12  # a smaller residual is rounding: the fit is exact


class Fit(NamedTuple):
    """The coefficients.

    Attributes:
        compute_s: seconds of one step on one device.
        transfer_s: seconds to send all gradients once.
        latency_s: seconds of latency of one step of the reduction.
        rounds: the number of steps of the reduction: `"devices - 1"` or `"log2 devices"`, whichever
            fits better.
    """

    compute_s: float
    transfer_s: float
    latency_s: float
    rounds: str

    def step_s(self, count: int) -> float:
        """The step time on `count` devices, in seconds."""
        return float(np.dot(self[:3], _terms(count, self.rounds)))


class HeldOut(NamedTuple):
    """A measured point, and its prediction by a fit to all other points.

    Attributes:
        devices: the number of devices.
        measured_s: the measured step time, in seconds.
        predicted_s: the predicted step time, in seconds.
        error: the relative error; 0.1 if the prediction is 10 percent too long.
    """

    devices: int
    measured_s: float
    predicted_s: float
    error: float


def check_enough(counts: int) -> None:
    """Refuses to predict from too few points.

    Args:
        counts: how many different numbers of devices were measured in strong scaling.

    Raises:
        RunError: fewer than three.
    """
    if counts < _FEWEST_POINTS:
        raise RunError(
            f"a prediction needs strong scaling on at least {_FEWEST_POINTS} different numbers of "
            f"devices, so that one can be held out to check it, and there are {counts}. Measure "
            "more of them, such as --devices 1,2,4, or leave --predict out."
        )


def fit_step_times(measured: Mapping[int, float]) -> Fit:
    """Fits the model, with the least sum of squared relative errors.

    Args:
        measured: the step time in seconds for each number of devices, one or more.

    Returns:
        The coefficients. If several fits are equally good, the one with the fewest above zero.

    Example:
        >>> from multitower.scaling.fit import fit_step_times
        >>> fit = fit_step_times({1: 1.0, 2: 0.5, 4: 0.25})
        >>> round(fit.compute_s, 6), fit.transfer_s, fit.latency_s, round(fit.step_s(8), 6)
        (1.0, 0.0, 0.0, 0.125)
    """
    counts = sorted(measured)
    times = np.array([measured[count] for count in counts])
    best: tuple[float, Fit] | None = None
    for rounds in _ROUNDS:
        # Divided by the time, so that a short step counts as much as a long one.
        rows = np.array([_terms(count, rounds) for count in counts]) / times[:, None]
        found, residual = _non_negative(rows)
        if best is None or residual < best[0] - _EXACT:
            compute_s, transfer_s, latency_s = found.tolist()
            best = residual, Fit(compute_s, transfer_s, latency_s, rounds)
    assert best is not None
    return best[1]


def held_out(measured: Mapping[int, float]) -> list[HeldOut]:
    """Predicts each measured point from all others.

    Args:
        measured: as for `fit_step_times`, three or more.

    Returns:
        One for each point, in ascending order of devices.

    Raises:
        RunError: fewer than three points.

    Example:
        >>> from multitower.scaling.fit import held_out
        >>> last = held_out({1: 1.0, 2: 0.5, 4: 0.5})[-1]
        >>> last.devices, round(last.predicted_s, 6), round(last.error, 6)
        (4, 0.25, -0.5)
    """
    check_enough(len(measured))
    found: list[HeldOut] = []
    for count in sorted(measured):
        others = {other: time for other, time in measured.items() if other != count}
        predicted = fit_step_times(others).step_s(count)
        error = predicted / measured[count] - 1
        found.append(HeldOut(count, measured[count], predicted, error))
    return found


def _terms(count: int, rounds: str) -> list[float]:
    return [1 / count, 2 * (count - 1) / count, _ROUNDS[rounds](count)]


def _non_negative(rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], float]:
    """The x >= 0 with the least |rows @ x - 1|^2, and this least value.

    It is the unconstrained solution for some subset of the columns, with zeros for the others. With
    three columns all subsets can be tried, small ones first.
    """
    width = rows.shape[1]
    ones = np.ones(len(rows))
    best, least = np.zeros(width), float(len(rows))
    for size in range(1, width + 1):
        for columns in itertools.combinations(range(width), size):
            chosen = list(columns)
            x = np.zeros(width)
            x[chosen] = np.linalg.lstsq(rows[:, chosen], ones, rcond=None)[0]
            residual = float(np.sum((rows @ x - ones) ** 2))
            if (x >= 0).all() and residual < least - _EXACT:
                best, least = x, residual
    return best, least

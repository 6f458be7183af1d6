"""The curves of a run: reads `metrics.jsonl`, and thins curves without losing spikes."""

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from multitower.errors import RunError
from multitower.training.observe import read_line

# About as many as a chart has room for, so that a page with several charts stays small.
_MOST_STRETCHES = 240
# No float32 is near it; sums and differences of such numbers are still finite.
_LARGEST = 1e300


class Stretch(NamedTuple):
    """Consecutive points of a curve that are drawn as one.

    Attributes:
        first: step of the first point.
        last: step of the last point.
        mean: the mean of the finite values; NaN if there is none.
        low: the smallest finite value, or NaN.
        high: the largest finite value, or NaN.
        num_lost: how many values were not finite.
    """

    first: int
    last: int
    mean: float
    low: float
    high: float
    num_lost: int

    @property
    def drawable(self) -> bool:
        """Whether there is a finite value."""
        return math.isfinite(self.mean)

    @property
    def middle(self) -> float:
        """Where the mean is drawn."""
        return (self.first + self.last) / 2


class Curve(NamedTuple):
    """One metric of one phase.

    Attributes:
        stretches: in the order of steps; at least one.
        points_per_stretch: the most points of one; 1 where every point is drawn.
        final: the last value; None if it was not finite.
    """

    stretches: Sequence[Stretch]
    points_per_stretch: int
    final: float | None


Curves = dict[str, dict[str, Curve]]
_Point = tuple[int, float | None]


def read_curves(path: Path) -> Curves:
    """Reads what `multitower.MetricsFile` wrote.

    Args:
        path: of the file; a missing file counts as empty.

    Returns:
        A curve for each metric and phase: metric to phase to curve, the loss first and the speed
        last.

    Raises:
        RunError: the file cannot be read.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.runs.report_page.curves import read_curves
        >>> path = Path(tempfile.mkdtemp()) / "metrics.jsonl"
        >>> _ = path.write_text('{"phase": "train", "step": 1, "loss": 0.5}')
        >>> read_curves(path)["loss"]["train"].final
        0.5
    """
    points: dict[str, dict[str, list[_Point]]] = {}
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            for line in file:
                _collect(line, points)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error}. The report draws its curves from it; move it away "
            "for a report without curves."
        ) from error
    order = sorted(points, key=lambda metric: (metric != "loss", metric == "examples_per_s"))
    return {
        metric: {phase: thin(points[metric][phase]) for phase in sorted(points[metric], key=_rank)}
        for metric in order
    }


def thin(points: Sequence[_Point], most: int = _MOST_STRETCHES) -> Curve:
    """Joins neighbouring points until few enough are left; the extremes are kept beside the means.

    Args:
        points: step and value, in the order of steps; None for a value that was not finite.
        most: the largest number of stretches.

    Returns:
        The curve.

    Example:
        >>> from multitower.runs.report_page.curves import thin
        >>> thin([(1, 1.0), (2, 9.0), (3, 2.0), (4, None)], most=2).stretches[0]
        Stretch(first=1, last=2, mean=5.0, low=1.0, high=9.0, num_lost=0)
    """
    count = min(most, len(points))
    bounds = [i * len(points) // count for i in range(count + 1)]
    stretches = [_joined(points[begin:end]) for begin, end in itertools.pairwise(bounds)]
    return Curve(stretches, math.ceil(len(points) / count), points[-1][1])


def _rank(phase: str) -> bool:
    # The few points of a test phase are drawn last, over the many of the training.
    return phase == "test"


def _collect(line: str, points: dict[str, dict[str, list[_Point]]]) -> None:
    report = read_line(line)
    if report is None:
        return
    phase, step = report.pop("phase"), report.pop("step")
    for metric, value in report.items():
        # JSON's null stands for a NaN or an infinity, which Python would also write as words.
        finite = isinstance(value, int | float) and abs(value) < _LARGEST
        points.setdefault(metric, {}).setdefault(phase, []).append(
            (step, value if finite else None)
        )


def _joined(points: Sequence[_Point]) -> Stretch:
    values = [value for _, value in points if value is not None]
    return Stretch(
        first=points[0][0],
        last=points[-1][0],
        mean=sum(values) / len(values) if values else math.nan,
        low=min(values, default=math.nan),
        high=max(values, default=math.nan),
        num_lost=len(points) - len(values),
    )

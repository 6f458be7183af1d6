"""Charts: matplotlib computes the shapes, and the style sheet their colours and widths."""

import io
import re
from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import Any, NamedTuple
from xml.etree import ElementTree

from markupsafe import Markup
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from multitower.runs.report_page.curves import Curve, Curves, Stretch
from multitower.runs.report_page.page import render
from multitower.runs.report_page.scales import Scale, for_metric, for_steps
from multitower.runs.report_page.wording import counted, is_share, name, score

# Up to this many points of a phase are also drawn as dots; more would look like a band.
_MOST_DOTS = 60
_GAP = float("nan")
_WHOLE = 4000  # the width of a chart in whole numbers, for the strips that the pointer finds


class _Layout(NamedTuple):
    """A drawing of a chart in units of about a pixel; the style sheet shows the one that fits."""

    name: str
    width: int
    height: int
    left: int = 50
    right: int = 14
    top: int = 10
    bottom: int = 46


_LAYOUTS = (_Layout("medium", 490, 290), _Layout("narrow", 300, 280), _Layout("wide", 1030, 290))


def draw_charts(curves: Curves) -> Markup:
    """Draws one chart per metric, all with the same axis of steps.

    Args:
        curves: as `read_curves` returns them.

    Returns:
        HTML, `<figure>` after `<figure>`.

    Example:
        >>> from multitower.runs.report_page.charts import draw_charts
        >>> from multitower.runs.report_page.curves import thin
        >>> "loss over 2 steps" in draw_charts({"loss": {"train": thin([(1, 2.0), (2, 1.0)])}})
        True
    """
    steps = [curve.stretches[-1].last for phases in curves.values() for curve in phases.values()]
    across = for_steps(max(steps, default=1))
    return render("charts.html", charts=[_chart(*one, across) for one in curves.items()])


def _chart(metric: str, phases: Mapping[str, Curve], across: Scale) -> dict[str, Any]:
    """The values for the template."""
    drawn = [s for curve in phases.values() for s in curve.stretches if s.drawable]
    low, high = min((s.low for s in drawn), default=0.0), max((s.high for s in drawn), default=1.0)
    up = for_metric(metric, low, high, percent=is_share(metric) and 0 <= low <= high <= 1)
    return {
        "metric": metric,
        "logarithmic": up.logarithmic,
        "words": _in_words(metric, phases, across),
        "pictures": [_picture(phases, across, up, one) for one in _LAYOUTS],
        "insets": {one.name: _inset(one) for one in _LAYOUTS},
        "strips": list(_strips(metric, phases, across)),
        "whole": _WHOLE,
        "phases": [_legend(metric, phase, phases[phase]) for phase in phases],
    }


# ---------------------------------------------------------------- the drawing


def _picture(phases: Mapping[str, Curve], across: Scale, up: Scale, layout: _Layout) -> Markup:
    """An SVG of shapes with classes."""
    width, height = layout.width, layout.height
    box = (
        layout.left / width,
        layout.bottom / height,
        1 - (layout.left + layout.right) / width,
        1 - (layout.top + layout.bottom) / height,
    )
    file = io.BytesIO()
    # Not the user's own matplotlibrc, which may ask for LaTeX.
    with style.context(["default", {"svg.fonttype": "none", "path.simplify": False}]):
        figure = Figure(figsize=(width / 72, height / 72))
        axes = figure.add_axes(box)
        _draw_axes(axes, across, up)
        for phase, curve in phases.items():
            _draw_curve(axes, "test" if phase == "test" else "train", curve)
        figure.savefig(file, format="svg")
    shapes = Markup("").join(_shapes(file.getvalue()))
    return Markup('<svg class="{}" viewBox="0 0 {} {}">{}</svg>').format(
        layout.name, width, height, shapes
    )


def _draw_axes(axes: Axes, across: Scale, up: Scale) -> None:
    if up.logarithmic:
        axes.set_yscale("log")
    axes.set_xlim(across.low, across.high)
    axes.set_ylim(up.low, up.high)
    axes.set_xticks(*zip(*across.ticks, strict=True))
    axes.set_yticks(*zip(*up.ticks, strict=True))
    axes.set_yticks([], minor=True)
    axes.set_xlabel("step", fontsize=13, labelpad=6, gid="across")
    axes.tick_params(length=0, pad=9, labelsize=13)
    axes.grid(axis="y")
    for artist in axes.get_ygridlines():
        artist.set_gid("grid")
    for labels, kind in ((axes.get_xticklabels(), "across"), (axes.get_yticklabels(), "up")):
        for label in labels:
            label.set_gid(kind)


def _draw_curve(axes: Axes, kind: str, curve: Curve) -> None:
    """A phase: where values were lost, the band of extremes, the line of means, its dots."""
    lost = [s for s in curve.stretches if s.num_lost]
    if lost:
        steps = [step for s in lost for step in (s.middle, s.middle, _GAP)]
        axes.plot(steps, [0, 1, _GAP] * len(lost), transform=axes.get_xaxis_transform(), gid="lost")
    runs = [
        list(run) for drawable, run in groupby(curve.stretches, lambda s: s.drawable) if drawable
    ]
    if curve.points_per_stretch > 1:
        for run in runs:
            # A stretch has a width: its extremes fill it, so that no spike at an end is cut off.
            ends = [(end, s) for s in run for end in (s.first, s.last)]
            high, low = [(x, s.high) for x, s in ends], [(x, s.low) for x, s in reversed(ends)]
            axes.fill(*zip(*high, *low, strict=True), gid=f"band {kind}")
    points = [point for run in runs for point in (*((s.middle, s.mean) for s in run), (_GAP, _GAP))]
    if points:
        axes.plot(*zip(*points, strict=True), gid=f"line {kind}")
    alone = [run[0] for run in runs if len(run) == 1]
    dotted = [s for s in curve.stretches if s.drawable and len(curve.stretches) <= _MOST_DOTS]
    # A line without length has round ends: a dot.
    dots = [end for s in dotted or alone for end in ((s.middle, s.mean),) * 2 + ((_GAP, _GAP),)]
    if dots:
        axes.plot(*zip(*dots, strict=True), gid=f"dots {kind}")


def _shapes(svg: bytes) -> Iterator[Markup]:
    """The shapes that were named when they were drawn: coordinates only, with the name as class."""
    for group in ElementTree.fromstring(svg).iterfind(".//{*}g"):
        kind = group.get("id", "")
        if re.search(r"_\d+$", kind):
            continue  # matplotlib's own names
        for shape in group.iterfind("./{*}path"):
            path = re.sub(r"\d+\.\d+", lambda found: f"{float(found[0]):.5g}", shape.get("d", ""))
            yield Markup('<path class="{}" d="{}"/>').format(kind, " ".join(path.split()))
        for shape in group.iterfind("./{*}text"):
            x, y = (float(shape.get(axis, 0)) for axis in "xy")
            yield Markup('<text class="{}" x="{:.5g}" y="{:.5g}">{}</text>').format(
                kind, x, y, shape.text
            )


# ---------------------------------------------------------------- the words


def _inset(layout: _Layout) -> str:
    """Where the axes lie in the drawing, as CSS says it."""
    return (
        f"{100 * layout.top / layout.height:.4g}% {100 * layout.right / layout.width:.4g}% "
        f"{100 * layout.bottom / layout.height:.4g}% {100 * layout.left / layout.width:.4g}%"
    )


def _strips(
    metric: str, phases: Mapping[str, Curve], across: Scale
) -> Iterator[tuple[int, int, str]]:
    """One vertical strip per point, which shows the numbers of the point as a tooltip."""
    stretches = max((curve.stretches for curve in phases.values()), key=len)
    begin = 0.0
    for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
        end = across.high if following is None else (stretch.last + following.first) / 2
        told = [
            f"{phase} {_reading(metric, one)}"
            for phase, curve in phases.items()
            for one in curve.stretches
            if begin < one.middle <= end
        ]
        left, right = (round(_WHOLE * step / across.high) for step in (begin, end))
        yield left, right - left, "\n".join([f"step {_steps(stretch)}", *told])
        begin = end


def _reading(metric: str, stretch: Stretch) -> str:
    if not stretch.drawable:
        return "not finite"
    mean, low, high = (score(metric, x) for x in (stretch.mean, stretch.low, stretch.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def _legend(metric: str, phase: str, curve: Curve) -> dict[str, Any]:
    return {
        "name": phase,
        "kind": "test" if phase == "test" else "train",
        "final": "not finite" if curve.final is None else score(metric, curve.final),
        "num_lost": sum(stretch.num_lost for stretch in curve.stretches),
        "points": curve.points_per_stretch,
    }


def _in_words(metric: str, phases: Mapping[str, Curve], across: Scale) -> str:
    """The chart in words, for readers who cannot see it."""
    parts = [f"{name(metric)} over {counted(round(across.high), 'step')}."]
    for phase, curve in phases.items():
        drawn = [s for s in curve.stretches if s.drawable]
        if not drawn:
            parts.append(f"{phase}: no finite value.")
            continue
        lowest, highest = min(drawn, key=lambda s: s.low), max(drawn, key=lambda s: s.high)
        parts.append(
            f"{phase}: from {score(metric, drawn[0].mean)} to {score(metric, drawn[-1].mean)}, "
            f"lowest {score(metric, lowest.low)} at step {_steps(lowest)}, "
            f"highest {score(metric, highest.high)} at step {_steps(highest)}."
        )
    return " ".join(parts)


def _steps(stretch: Stretch) -> str:
    first, last = f"{stretch.first:,}", f"{stretch.last:,}"
    return first if first == last else f"{first} to {last}"

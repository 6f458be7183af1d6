"""Charts: the curves of one metric as a figure with an SVG that keeps its letters at any width."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby

from multitower.runs.report_page.curves import Curve, Curves, Stretch
from multitower.runs.report_page.scales import Scale, for_metric, for_steps
from multitower.runs.report_page.wording import counted, escape, is_share, name, score

# Lines are drawn on a square of so many units, which the browser stretches over the plot.
_SIZE = 4000
# Up to so many points of a phase are also shown as dots; more would be a band of their own.
_MOST_DOTS = 60


def draw_charts(curves: Curves) -> str:
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
    if not curves:
        return "<p>The run has written no metrics.</p>"
    last = max(curve.stretches[-1].last for phases in curves.values() for curve in phases.values())
    return "\n".join(_figure(metric, phases, for_steps(last)) for metric, phases in curves.items())


def _figure(metric: str, phases: Mapping[str, Curve], across: Scale) -> str:
    stretches = [s for curve in phases.values() for s in curve.stretches if s.drawable]
    if stretches:
        low, high = min(s.low for s in stretches), max(s.high for s in stretches)
        up = for_metric(metric, low, high, percent=is_share(metric) and 0 <= low <= high <= 1)
    else:
        up = for_metric(metric, 0.0, 1.0)
    scale = "<small>log scale</small>" if up.logarithmic else ""
    return f"""<figure class="card">
<figcaption><h3>{escape(name(metric))}</h3>{scale}</figcaption>
<div class="plot">{_picture(metric, phases, across, up)}</div>
<ul class="legend">{"".join(_legend(metric, phase, phases[phase]) for phase in phases)}</ul>
{_note(metric, phases)}</figure>"""


def _picture(metric: str, phases: Mapping[str, Curve], across: Scale, up: Scale) -> str:
    """The SVG: marks at percentages of its size, and inside it the stretched square of lines."""
    rows = ((_percent(1 - up.place(value)), label) for value, label in up.ticks)
    columns = ((_percent(across.place(value)), label) for value, label in across.ticks)
    marks = [
        f'<line class="grid" x1="0" x2="100%" y1="{y}" y2="{y}"/>'
        f'<text class="up" x="-10" y="{y}" dy="0.35em">{label}</text>'
        for y, label in rows
    ] + [f'<text class="across" x="{x}" y="100%" dy="1.7em">{label}</text>' for x, label in columns]
    marks.append('<text class="across" x="50%" y="100%" dy="3.2em">step</text>')
    lines = [_lines(phase, curve, across, up) for phase, curve in phases.items()]
    return (
        f'<svg role="img" aria-label="{escape(_in_words(metric, phases, across))}">'
        f"{''.join(marks)}"
        f'<svg viewBox="0 0 {_SIZE} {_SIZE}" preserveAspectRatio="none">'
        f"{''.join(lines)}{_readings(metric, phases, across)}</svg></svg>"
    )


def _lines(phase: str, curve: Curve, across: Scale, up: Scale) -> str:
    """A phase: where values were lost, the band of extremes, the line of means, its dots."""
    kind = _kind(phase)
    lost = "".join(f"M{_x(s, across)} 0V{_SIZE}" for s in curve.stretches if s.num_lost)
    drawn = [f'<path class="lost" d="{lost}"/>'] if lost else []
    runs = [
        list(run) for drawable, run in groupby(curve.stretches, lambda s: s.drawable) if drawable
    ]
    if curve.points_per_stretch > 1:
        band = "".join(_band(run, across, up) for run in runs)
        drawn.append(f'<path class="band {kind}" d="{band}"/>')
    means = ([(_x(s, across), _y(s.mean, up)) for s in run] for run in runs)
    line = "".join(_path(points) for points in means)
    drawn.append(f'<path class="line {kind}" d="{line}"/>')
    # A line without length has round ends: a dot, round however the square is stretched.
    alone = [run[0] for run in runs if len(run) == 1]
    dotted = [s for run in runs for s in run] if len(curve.stretches) <= _MOST_DOTS else alone
    dots = "".join(f"M{_x(s, across)} {_y(s.mean, up)}h0" for s in dotted)
    drawn.append(f'<path class="dots {kind}" d="{dots}"/>' if dots else "")
    return "".join(drawn)


def _band(run: Sequence[Stretch], across: Scale, up: Scale) -> str:
    # A stretch has a width: its extremes fill it, so that a spike at either end is not cut off.
    there = [(_at(end, across), _y(s.high, up)) for s in run for end in (s.first, s.last)]
    back = [(_at(end, across), _y(s.low, up)) for s in run for end in (s.first, s.last)]
    return _path([*there, *reversed(back)]) + "Z"


def _readings(metric: str, phases: Mapping[str, Curve], across: Scale) -> str:
    """What the pointer finds: one upright strip per point, with its numbers as a tooltip."""
    stretches = max((curve.stretches for curve in phases.values()), key=len)
    strips: list[str] = []
    begin = 0.0
    for stretch, following in zip(stretches, [*stretches[1:], None], strict=True):
        end = across.high if following is None else (stretch.last + following.first) / 2
        told = [
            f"{phase} {_reading(metric, one)}"
            for phase, curve in phases.items()
            for one in curve.stretches
            if begin < _middle(one) <= end
        ]
        title = escape("\n".join([f"step {_steps(stretch)}", *told]))
        left, right = _at(begin, across), _at(end, across)
        place = f'x="{left}" width="{right - left}" height="{_SIZE}"'
        strips.append(f"<rect {place}><title>{title}</title></rect>")
        begin = end
    return f'<g class="readings">{"".join(strips)}</g>'


def _reading(metric: str, stretch: Stretch) -> str:
    if not stretch.drawable:
        return "not finite"
    mean, low, high = (score(metric, x) for x in (stretch.mean, stretch.low, stretch.high))
    return mean if low == high else f"{mean} ({low} to {high})"


def _legend(metric: str, phase: str, curve: Curve) -> str:
    kind = _kind(phase)
    dots = f'<path class="dots {kind}" d="M14 6h0"/>' if kind == "test" else ""
    swatch = f'<svg aria-hidden="true"><path class="line {kind}" d="M2 6H26"/>{dots}</svg>'
    final = "not finite" if curve.final is None else score(metric, curve.final)
    num_lost = sum(stretch.num_lost for stretch in curve.stretches)
    lost = f"✗ {escape(phase)}: {counted(num_lost, 'value')} not finite"
    warning = f'<li class="lost">{lost}</li>' if num_lost else ""
    return f"<li>{swatch}{escape(phase)}, last <b>{final}</b></li>{warning}"


def _note(metric: str, phases: Mapping[str, Curve]) -> str:
    """What else one must know to read the chart."""
    notes: list[str] = []
    if metric == "examples_per_s":
        notes.append("Mean since the first step of the process, which compiles and is left out.")
    notes += [
        f"{phase.capitalize()}: means of up to {curve.points_per_stretch:,} points, in a band from "
        "the lowest to the highest."
        for phase, curve in phases.items()
        if curve.points_per_stretch > 1
    ]
    return f'<p class="note">{escape(" ".join(notes))}</p>\n' if notes else ""


def _in_words(metric: str, phases: Mapping[str, Curve], across: Scale) -> str:
    """The chart for those who do not see it."""
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


def _kind(phase: str) -> str:
    """The class of a phase in the style sheet."""
    return "test" if phase == "test" else "train"


def _path(points: Iterable[tuple[int, int]]) -> str:
    return "M" + "L".join(f"{x} {y}" for x, y in points)


def _x(stretch: Stretch, across: Scale) -> int:
    return _at(_middle(stretch), across)


def _middle(stretch: Stretch) -> float:
    return (stretch.first + stretch.last) / 2


def _at(step: float, across: Scale) -> int:
    return round(_SIZE * across.place(step))


def _y(value: float, up: Scale) -> int:
    return round(_SIZE * (1 - up.place(value)))


def _percent(share: float) -> str:
    return f"{100 * share:.5g}%"


def _steps(stretch: Stretch) -> str:
    first, last = f"{stretch.first:,}", f"{stretch.last:,}"
    return first if first == last else f"{first} to {last}"

"""The pipeline of a run with stages, drawn: a row for each device, a box for each program."""

from collections.abc import Mapping
from typing import Any

from markupsafe import Markup

_LEFT, _WIDTH, _ROW, _GAP = 76, 1000, 26, 4
_MOST = 400  # programs; more would be too narrow to see


def draw_pipeline(pipeline: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The values with which the page shows a pipeline.

    Args:
        pipeline: as in `result.json`; None for a run without stages.

    Returns:
        The values for the template, by name; None if there is nothing to show.

    Example:
        >>> from multitower.runs.report_page.pipeline import draw_pipeline
        >>> found = {"rounds": 1, "bubble": 0.0, "least_bubble": 0.0}
        >>> found["timeline"] = [[0, 0, 0, 0, "backward", 0, 3]]
        >>> draw_pipeline(found)["picture"].count("<rect")
        2
    """
    if not pipeline or "timeline" not in pipeline:
        return None
    rounds, traced = pipeline["rounds"], pipeline.get("traced")
    if traced:
        traced = {**traced, "picture": _picture(traced["timeline"][:_MOST], rounds)}
    picture = _picture(pipeline["timeline"][:_MOST], rounds)
    return {**pipeline, "picture": picture, "traced": traced}


def _picture(slots: list[list[Any]], rounds: int) -> Markup:
    """An SVG in which a tooltip explains each box."""
    num_devices = 1 + max(place for place, *_ in slots)
    unit = (_WIDTH - _LEFT) / max(slot[-1] for slot in slots)
    height = num_devices * (_ROW + _GAP)
    shapes = [
        Markup('<text x="0" y="{}">device {}</text><rect class="idle" x="{}" y="{}" width="{}" '
               'height="{}"/>')
        .format(_top(place) + 18, place, _LEFT, _top(place), _WIDTH - _LEFT, _ROW)
        for place in range(num_devices)
    ]  # fmt: skip
    for place, stage, number, tower, kind, start, end in slots:
        where = f"{stage}, round {number}" if rounds > 1 else str(stage)
        shapes.append(
            Markup('<rect class="{}" x="{:.2f}" y="{}" width="{:.2f}" height="{}"><title>tower {}, '
                   "stage {}, {}</title></rect>")
            .format(kind, _LEFT + unit * start, _top(place), unit * (end - start), _ROW, tower,
                    where, kind)
        )  # fmt: skip
    words = "Programs of one step on each device"
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{0}"><svg class="pipeline" '
        'role="img" aria-label="{0}" viewBox="0 0 {1} {2}">{3}</svg></div>\n'
        '<p class="note">Blue: forward. Orange: backward. A box says its tower and stage.</p>'
    ).format(words, _WIDTH, height, Markup("").join(shapes))


def _top(place: int) -> int:
    return place * (_ROW + _GAP)

"""Draws the speed-up and the efficiency against the number of devices."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.style import context
from matplotlib.ticker import (
    FixedLocator,
    FormatStrFormatter,
    NullLocator,
    PercentFormatter,
    ScalarFormatter,
)

from multitower.hardware.devices import devices_in_words

# Colours that colour-blind people can distinguish, and markers for those who see no colour.
_STYLES = {
    "strong": {"color": "#1f5fc4", "marker": "o", "label": "strong (global batch fixed)"},
    "weak": {"color": "#b8500b", "marker": "s", "label": "weak (tower batch fixed)"},
}


@context("default")  # not the user's own matplotlibrc, which may ask for LaTeX
def plot_scaling(result: Mapping[str, Any]) -> bytes:
    """Draws a scaling measurement; error bars are quartiles.

    Args:
        result: from `multitower.scaling.measure.scale`.

    Returns:
        The content of a PNG file.
    """
    figure = Figure(figsize=(9.6, 4.4), dpi=150, layout="constrained")
    canvas = FigureCanvasAgg(figure)  # no display, and no state outside of this function
    left, right = figure.subplots(1, 2)
    counts: list[int] = result["devices"]
    # Layouts stand side by side: several may have the same number of devices.
    places = list(range(len(counts))) if result["layouts"] else counts
    for kind, style in _STYLES.items():
        if result[kind]:
            _draw(left, places, result[kind], "speedup", style)
            _draw(right, places, result[kind], "efficiency", style)
    ideal = {"color": "#6b7078", "linestyle": "--", "linewidth": 1.2, "zorder": 1}
    left.plot(places, [count / counts[0] for count in counts], label="ideal", **ideal)
    right.plot(places, [1.0 for _ in counts], label="ideal", **ideal)
    against = devices_in_words(counts[0])
    if result["layouts"]:
        against = result["layouts"][0]
    left.set_title(f"examples/s, against {against}", fontsize=12)
    right.set_title("efficiency, share of the ideal", fontsize=12)
    right.yaxis.set_major_formatter(PercentFormatter(1.0))
    for axes in (left, right):
        _dress(axes, places, result["layouts"])
    left.set_yscale("log", base=2)  # so that the ideal is a straight line
    left.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    right.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize=11)
    figure.suptitle(_title(result), fontsize=13, fontweight="bold")
    file = io.BytesIO()
    canvas.print_png(file, metadata={"Software": None})
    return file.getvalue()


def _draw(
    axes: Axes,
    places: Sequence[int],
    entries: Sequence[Mapping[str, Any]],
    name: str,
    style: Mapping[str, Any],
) -> None:
    middle = [entry[name]["median"] for entry in entries]
    below = [entry[name]["median"] - entry[name]["lower_quartile"] for entry in entries]
    above = [entry[name]["upper_quartile"] - entry[name]["median"] for entry in entries]
    axes.errorbar(
        places,
        middle,
        yerr=(below, above),
        linewidth=2,
        markersize=7,
        capsize=4,
        **style,
    )


def _dress(axes: Axes, places: Sequence[int], layouts: Sequence[str] | None) -> None:
    if layouts:
        axes.set_xticks(places, labels=layouts)
        axes.set_xlabel("processes x devices of each", fontsize=12)
    else:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(list(places)))
        axes.xaxis.set_major_formatter(ScalarFormatter())
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlabel("devices", fontsize=12)
    axes.tick_params(labelsize=11)
    axes.grid(axis="y", color="#e0e0db")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _title(result: Mapping[str, Any]) -> str:
    mode = "" if result["towers"] is None else f", {result['towers']} towers"
    if result["simulated"]:
        return f"{result['recipe']}{mode}: simulated devices cannot show a speed-up"
    return f"{result['recipe']}{mode} on {result['host']['device_kind']}"

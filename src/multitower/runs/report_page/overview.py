"""The overview of a run: its headline figures, and a picture of its towers on their devices."""

from collections.abc import Mapping, Sequence
from typing import Any

from multitower.runs.report_page.wording import (
    ABSENT,
    counted,
    duration,
    escape,
    name,
    number,
    score,
)

# A device with more towers than this shows the first and the last one.
_MOST_CHIPS = 64
_NOUNS = {"cpu": "CPU device", "gpu": "GPU", "tpu": "TPU"}


def place_in_words(result: Mapping[str, Any]) -> str:
    """What ran where, in a line.

    Example:
        >>> from multitower.runs.report_page.overview import place_in_words
        >>> host = {"platform": "gpu", "device_kind": "NVIDIA H100"}
        >>> place_in_words({"steps": 9, "towers": 8, "devices": 2, "host": host})
        '9 steps, 8 towers on 2 GPUs (NVIDIA H100)'
    """
    host: Mapping[str, Any] = result.get("host") or {}
    platform, kind = str(host.get("platform", "device")), host.get("device_kind")
    devices = int(result.get("devices") or 1)
    simulated = platform == "cpu" and devices > 1
    noun = "simulated CPU device" if simulated else _NOUNS.get(platform, platform)
    of_kind = f" ({kind})" if kind and kind != platform else ""
    parts = [
        counted(int(result[key]), noun_of)
        for key, noun_of in (("steps", "step"), ("towers", "tower"))
        if key in result
    ]
    return f"{', '.join(parts)} on {counted(devices, noun)}{of_kind}"


def show_figures(result: Mapping[str, Any]) -> str:
    """Shows the headline figures: scores, steps, speed, time and the fingerprint.

    Args:
        result: of the run.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.overview import show_figures
        >>> "<dt>test accuracy</dt><dd>98 %</dd>" in show_figures({"test_accuracy": 0.98})
        True
    """
    scores = sorted(key for key in result if key.startswith("test_"))
    figures = [(name(key), score(key, result[key])) for key in scores]
    figures += [
        ("steps", number(result.get("steps"))),
        ("examples per second", _speed(result)),
        ("wall time", duration(result.get("seconds"))),
    ]
    cards = "".join(
        f'<div class="card"><dt>{escape(title)}</dt><dd>{text}</dd></div>'
        for title, text in figures
    )
    return f'<dl class="figures">{cards}</dl>\n{_best(result)}{_fingerprint(result)}'


def show_placement(
    placement: Sequence[tuple[str, Sequence[int]]], result: Mapping[str, Any]
) -> str:
    """Shows which device runs which towers, and what that says about the speed.

    Args:
        placement: name and towers of each device.
        result: of the run.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.overview import show_placement
        >>> "<li>3</li>" in show_placement([("cpu:0", [2, 3])], {})
        True
    """
    rows = "\n".join(
        f'<tr><th scope="row">{escape(device)}</th><td>{_chips(towers)}</td>'
        f'<td class="count">{len(towers):,}</td></tr>'
        for device, towers in placement
    )
    return f"""{_warning(result)}<p>{_slices(result)}</p>
<div class="scroll" tabindex="0" role="region" aria-label="Towers of each device">
<table class="placement">
<thead><tr><th scope="col">device</th><th scope="col">towers</th>\
<th scope="col" class="count">count</th></tr></thead>
<tbody>
{rows}
</tbody>
</table></div>"""


def _speed(result: Mapping[str, Any]) -> str:
    speed: float | None = result.get("examples_per_s")
    if speed is None:
        return ABSENT
    caution = "<small>no measure of speed-up</small>" if _warning(result) else ""
    return number(round(speed) if speed >= 100 else speed) + caution


def _best(result: Mapping[str, Any]) -> str:
    best: Mapping[str, float] = result.get("best") or {}
    told = ", ".join(f"{name(key)} {score(key, value)}" for key, value in best.items())
    return f"<p>Best test phase: {escape(told)}.</p>\n" if told else ""


def _fingerprint(result: Mapping[str, Any]) -> str:
    meaning = (
        "The same on any number of devices: it depends on the towers alone."
        if result.get("same_bits")
        else "Of this number of devices; with a fixed number of towers it is the same on any."
    )
    return f"""<div class="fingerprint"><h3>Fingerprint of the trained state</h3>
<code>{escape(result.get("fingerprint", ABSENT))}</code><p class="note">{meaning}</p></div>"""


def _warning(result: Mapping[str, Any]) -> str:
    """Says that simulated devices cannot show a speed-up: they share the cores of one machine."""
    host: Mapping[str, Any] = result.get("host") or {}
    if host.get("platform") != "cpu":
        return ""
    devices, cores = int(result.get("devices") or 1), host.get("cpu_cores")
    shared = f"the {counted(int(cores), 'core')}" if cores else "the cores"
    said = (
        f"These {devices} devices are simulated: they share {shared} of one machine."
        if devices > 1
        else "This run used one device, the CPU."
    )
    return f"""<p class="callout"><strong>No measure of speed-up.</strong> {said} The run's \
examples per second say nothing about the speed-up that several accelerators would give.</p>
"""


def _slices(result: Mapping[str, Any]) -> str:
    rows, towers = result.get("batch_size"), result.get("towers")
    if not rows or not towers:
        return "Every tower takes its own slice of each batch."
    even = rows % towers == 0
    each = counted(rows // towers, "example") if even else f"about {rows / towers:.1f} examples"
    batch = f"Each batch of {counted(rows, 'example')}"
    if towers == 1:
        return f"{batch} goes to one tower."
    return f"{batch} is cut into {counted(towers, 'tower')} of {each}."


def _chips(towers: Sequence[int]) -> str:
    if not towers:
        return "idle"
    shown = list(map(str, towers))
    if len(towers) > _MOST_CHIPS:
        shown = [shown[0], "…", shown[-1]]
    return f'<ol class="chips">{"".join(f"<li>{one}</li>" for one in shown)}</ol>'

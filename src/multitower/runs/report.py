"""`report.html`: a run on one page, in one file that needs no other and no network."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from multitower.runs.directory import METRICS, REPORT, write_whole
from multitower.runs.report_page.charts import draw_charts
from multitower.runs.report_page.curves import read_curves
from multitower.runs.report_page.overview import place_in_words, show_figures, show_placement
from multitower.runs.report_page.page import make_page
from multitower.runs.report_page.samples import Sample, show_samples
from multitower.runs.report_page.tables import show_origin, show_settings
from multitower.runs.report_page.wording import score

__all__ = ["Sample", "write_report"]


def write_report(
    directory: Path,
    *,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    placement: Sequence[tuple[str, Sequence[int]]],
    samples: Sequence[Sample] = (),
) -> Path:
    """Writes `report.html`, whole or not at all: figures, curves, devices, settings, samples.

    The curves are those of `metrics.jsonl` in the same directory. A long one is drawn as means of
    neighbouring points with a band from the smallest to the largest of them, so that the page
    stays small and a spike stays visible.

    Args:
        directory: of the run.
        config: as in `config.json`: `"recipe"`, `"settings"`, `"options"`.
        result: as in `result.json`.
        placement: for each device its name, such as `"cpu:0"`, and the numbers of its towers.
        samples: test examples with what the model says about them; shown in this order.

    Returns:
        The path of the file.

    Raises:
        RunError: the metrics cannot be read, an image is none, or the file cannot be written.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.runs.report import write_report
        >>> config = {"recipe": "digits", "settings": {}, "options": {"steps": 9}}
        >>> result = {"recipe": "digits", "steps": 9, "test_accuracy": 0.98}
        >>> with tempfile.TemporaryDirectory() as here:
        ...     path = write_report(
        ...         Path(here), config=config, result=result, placement=[("cpu:0", [0, 1])]
        ...     )
        ...     "98 %" in path.read_text(encoding="utf-8")
        True
    """
    curves = read_curves(directory / METRICS)
    sections = {
        "Curves": f'<div class="charts">{draw_charts(curves)}</div>',
        "Sample predictions": show_samples(samples) if samples else "",
        "Devices and towers": show_placement(placement, result),
        "Settings": f'<div class="tables">{show_settings(config, result)}</div>',
        "Software and machine": f'<div class="tables">{show_origin(result)}</div>',
    }
    recipe = str(result.get("recipe", "run"))
    accuracy = result.get("test_accuracy")
    scored = "" if accuracy is None else f": {score('test_accuracy', accuracy)} test accuracy"
    page = make_page(
        title=f"{recipe}{scored}",
        kind="run",
        heading=recipe,
        summary=place_in_words(result),
        lead=show_figures(result),
        sections=sections,
        footer="All numbers are in result.json, config.json and metrics.jsonl beside this file.",
    )
    return write_whole(directory / REPORT, page)

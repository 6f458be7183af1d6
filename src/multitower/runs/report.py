"""`report.html`: a run on one page, in a single file that needs no network."""

import base64
import io
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from multitower.errors import RunError
from multitower.runs.directory import METRICS, REPORT, write_whole
from multitower.runs.report_page.charts import draw_charts
from multitower.runs.report_page.curves import read_curves
from multitower.runs.report_page.overview import describe
from multitower.runs.report_page.page import render
from multitower.runs.report_page.pipeline import draw_pipeline
from multitower.runs.samples import Sample, TextSample

__all__ = ["Sample", "TextSample", "write_report"]


def write_report(
    directory: Path,
    *,
    config: Mapping[str, Any],
    result: Mapping[str, Any],
    placement: Sequence[tuple[str, Sequence[int]]],
    samples: Sequence[Sample] = (),
    texts: Sequence[TextSample] = (),
) -> Path:
    """Writes `report.html`, completely or not at all: figures, curves, devices, settings, samples.

    The curves are those of `metrics.jsonl` in the same directory. A long curve is drawn as means of
    neighbouring points with a band from the smallest to the largest of them, so that the page stays
    small and spikes stay visible.

    Args:
        directory: of the run.
        config: as in `config.json`: `"recipe"`, `"settings"`, `"options"`.
        result: as in `result.json`.
        placement: for each device its name, such as `"cpu:0"`, and the numbers of its towers.
        samples: test examples with the model's predictions; shown in this order.
        texts: texts that a language model has written.

    Returns:
        The path of the file.

    Raises:
        RunError: the metrics or an image cannot be read, or the file cannot be written.

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
    page = render(
        "run.html",
        result=result,
        charts=draw_charts(read_curves(directory / METRICS)),
        samples=[_shown(number, sample) for number, sample in enumerate(samples)],
        texts=texts,
        placement=placement,
        pipeline=draw_pipeline(result.get("pipeline")),
        **describe(result, config),
    )
    return write_whole(directory / REPORT, page)


def _shown(number: int, sample: Sample) -> dict[str, Any]:
    share = sample.probability if math.isfinite(sample.probability) else 0.0
    return {
        **sample._asdict(),
        "right": sample.label == sample.predicted,
        "width": f"{100 * share:.1f}",
        "source": _source(number, sample.image),
    }


def _source(number: int, image: np.ndarray[Any, Any]) -> str:
    """An image as a data URL with a PNG in it."""
    fits = image.dtype == np.uint8 and image.ndim == 3 and image.shape[-1] in (1, 3)
    if not fits or 0 in image.shape:
        raise RunError(
            f"samples[{number}].image is {image.dtype} of shape {image.shape}: it must be uint8 of "
            "shape (height, width, 1) for grey or (height, width, 3) for RGB. For floats from 0 to "
            "1 say (255 * image).round().astype('uint8')."
        )
    file = io.BytesIO()
    Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image).save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode("ascii")

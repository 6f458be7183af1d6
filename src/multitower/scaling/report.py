"""Writes the files of a scaling measurement: `scale.json`, `scale.png` and `scale.html`."""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from multitower.runs.directory import write_whole
from multitower.runs.report_page.page import render
from multitower.runs.report_page.pipeline import draw_pipeline
from multitower.scaling.directory import NUMBERS, PAGE, PICTURE
from multitower.scaling.plot import plot_scaling
from multitower.scaling.stage_times import pipeline_tables, pipelines, waiting_in_words
from multitower.scaling.words import (
    caution,
    losses_in_words,
    prediction_in_words,
    speed_tables,
    split_in_words,
    split_tables,
    turns_in_words,
    where_in_words,
)


def write_scaling(directory: Path, result: Mapping[str, Any]) -> list[Path]:
    """Writes the numbers, a picture and a page with both; each file completely or not at all.

    Args:
        directory: where to write them.
        result: from `multitower.scaling.measure.scale`; if it has a `"command"`, the page shows it.

    Returns:
        The paths of the three files.

    Raises:
        RunError: a file cannot be written.
    """
    numbers = json.dumps(result, indent=2, allow_nan=False) + "\n"
    picture = plot_scaling(result)
    contents = {PICTURE: picture, PAGE: _page(result, picture), NUMBERS: numbers}
    for name, content in contents.items():  # the numbers last: then all are complete
        write_whole(directory / name, content)
    return [directory / name for name in (NUMBERS, PICTURE, PAGE)]


def _page(result: Mapping[str, Any], picture: bytes) -> str:
    return render(
        "scaling.html",
        beside=Path(__file__),
        result=result,
        picture=base64.b64encode(picture).decode("ascii"),
        caution=caution(result),
        where=where_in_words(result),
        speed=speed_tables(result),
        turns=turns_in_words(result),
        losses=[losses_in_words(result), *result["losses"]["differences"]],
        split=split_in_words(result),
        parts=split_tables(result),
        programs=pipeline_tables(result),
        waits=waiting_in_words(result),
        pipelines=[
            (where, draw_pipeline(one)) for where, one in pipelines(result) if one["layout"][1] > 1
        ],
        prediction=prediction_in_words(result),
        settings=_settings(result),
        files=(NUMBERS, PICTURE),
    )


def _settings(result: Mapping[str, Any]) -> list[tuple[str, str]]:
    named = {
        "command": result.get("command"),
        (
            "turns in every layout" if result["layouts"] else "turns of every number of devices"
        ): result["rounds"],
        "measured steps of a turn": result.get("counted_steps", result["steps"]),
        "steps before them": result["lead_steps"],
        "seed": result["seed"],
        **{f"recipe: {name}": value for name, value in result["options"].items()},
    }
    return [(name, str(value)) for name, value in named.items() if value is not None]

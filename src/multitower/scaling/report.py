"""What a scaling measurement leaves behind: `scale.json`, `scale.png` and `scale.html`."""

import base64
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from multitower.errors import RunError
from multitower.runs.directory import write_whole
from multitower.runs.report_page.page import make_page
from multitower.runs.report_page.tables import show_origin, show_table
from multitower.runs.report_page.wording import escape
from multitower.scaling.words import (
    Table,
    caution,
    losses_in_words,
    prediction_in_words,
    speed_tables,
    split_in_words,
    split_tables,
)

NUMBERS = "scale.json"
PICTURE = "scale.png"
PAGE = "scale.html"


def make_scaling_directory(path: Path, *, overwrite: bool = False) -> Path:
    """Makes the directory of a measurement, before it begins; a run may be there already.

    Args:
        path: where; it may exist.
        overwrite: whether a measurement that is there already may be thrown away.

    Returns:
        The path.

    Raises:
        RunError: there is a measurement already, or the directory cannot be made.

    Example:
        >>> import tempfile
        >>> from pathlib import Path
        >>> from multitower.scaling.report import make_scaling_directory
        >>> with tempfile.TemporaryDirectory() as here:
        ...     make_scaling_directory(Path(here) / "first").name
        'first'
    """
    old = path / NUMBERS
    if old.exists() and not overwrite:
        raise RunError(
            f"{old} holds another measurement. Name another directory, or say --force to replace "
            "it."
        )
    try:
        path.mkdir(parents=True, exist_ok=True)
        for name in (NUMBERS, PICTURE, PAGE):
            (path / name).unlink(missing_ok=True)
    except OSError as error:
        raise RunError(
            f"the directory {path} cannot be used: {error.strerror or error}. Name another one."
        ) from error
    write_whole(old, "{}\n").unlink()  # a directory that cannot be written is an error now
    return path


def write_scaling(directory: Path, result: Mapping[str, Any], picture: bytes) -> list[Path]:
    """Writes the numbers, the picture and a page with both, each whole or not at all.

    Args:
        directory: where.
        result: of `multitower.scaling.measure.scale`; if it has a `"command"`, the page shows that.
        picture: a PNG file.

    Returns:
        The paths of the three files.

    Raises:
        RunError: a file cannot be written.
    """
    numbers = json.dumps(result, indent=2, allow_nan=False) + "\n"
    contents = {PICTURE: picture, PAGE: _page(result, picture), NUMBERS: numbers}
    for name, content in contents.items():  # the numbers last: they say that all is there
        write_whole(directory / name, content)
    return [directory / name for name in (NUMBERS, PICTURE, PAGE)]


def _page(result: Mapping[str, Any], picture: bytes) -> str:
    counts = ", ".join(map(str, result["devices"]))
    noun = "simulated devices" if result["simulated"] else "devices"
    prediction = prediction_in_words(result)
    encoded = base64.b64encode(picture).decode("ascii")
    image = (
        '<figure class="card scaling"><img alt="Speed-up and efficiency against the number of '
        f'devices; the numbers are in the tables below" src="data:image/png;base64,{encoded}">'
        "</figure>"
    )
    warning = caution(result)
    return make_page(
        title=f"{result['recipe']}: scaling",
        kind="scaling",
        heading=str(result["recipe"]),
        summary=f"The same steps on {counts} {noun} ({result['host']['device_kind']})",
        lead="" if warning is None else f'<p class="callout">{escape(warning)}</p>',
        sections={
            "Speed-up": image + _tables(speed_tables(result)),
            "Loss curve": "".join(f"<p>{escape(line)}</p>" for line in _losses(result)),
            "Where the time goes": f"<p>{escape(split_in_words(result))}</p>"
            + _tables(split_tables(result)),
            "Prediction": "" if prediction is None else f"<p>{escape(prediction)}</p>",
            "Measurement": f'<div class="tables">{show_table(*_settings(result))}</div>',
            "Software and machine": f'<div class="tables">{show_origin(result)}</div>',
        },
        footer=f"All numbers are in {NUMBERS}, the picture is in {PICTURE} beside this file.",
    )


def _losses(result: Mapping[str, Any]) -> list[str]:
    return [losses_in_words(result), *result["losses"]["differences"]]


def _settings(result: Mapping[str, Any]) -> Table:
    named = {
        "command": result.get("command"),
        "turns of every number of devices": result["rounds"],
        "measured steps of a turn": result["steps"],
        "steps before them": result["lead_steps"],
        "seed": result["seed"],
        **{f"recipe: {name}": value for name, value in result["options"].items()},
    }
    rows = [(name, str(value)) for name, value in named.items() if value is not None]
    return Table("How it was measured", ("setting", "value"), rows)


def _tables(tables: Iterable[Table]) -> str:
    shown = "\n".join(show_table(*table) for table in tables)
    return f'<div class="stack">{shown}</div>'

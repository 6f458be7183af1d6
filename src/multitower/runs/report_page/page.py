"""The page of a report: fills templates in, to a single file that needs no network."""

import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape

from multitower.runs.report_page import wording


def render(template: str, beside: Path | None = None, **values: Any) -> Markup:
    """Fills a template in. Text is escaped; what a template makes is HTML.

    Args:
        template: the file name of the template.
        beside: a file in the same directory, if the template is not in that of this module.
        **values: the values for the template, by name.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.page import render
        >>> page = render("page.html", result={"recipe": "<c>"})
        >>> "<h1>&lt;c&gt;</h1>" in page
        True
    """
    here = Path(__file__)
    environment = Environment(
        loader=FileSystemLoader([path.parent for path in (here, beside or here)]),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters.update(_FILTERS)
    now = datetime.now().astimezone()
    return Markup(environment.get_template(template).render(now=now, **values))


def _breakable(text: str) -> Markup:
    # Paths and identifiers may be broken where their parts meet, so that columns can be narrow.
    return Markup(re.sub(r"([/_])", r"\1<wbr>", str(escape(text))))


def _named(values: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(wording.name(key), value) for key, value in values.items()]


_FILTERS: dict[str, Any] = {
    "breakable": _breakable,
    "counted": wording.counted,
    "ends": wording.ends,
    "name": wording.name,
    "named": _named,
    "number": wording.number,
    "percent": wording.percent,
    "score": wording.score,
    "setting": wording.setting,
}

"""Tables: the settings of a run, its software and its machine."""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from multitower.runs.report_page.wording import escape, name, setting

# Options that a run fills in where nothing was asked for, and their names in its result.
_FILLED_IN = {
    "devices": "devices",
    "towers": "towers",
    "steps": "steps",
    "global_batch": "batch_size",
    "seed": "seed",
}


def show_settings(config: Mapping[str, Any], result: Mapping[str, Any]) -> str:
    """Shows the options of a run, what was asked for and what was used, and of its recipe.

    Args:
        config: `"recipe"`, `"options"` of the run, and `"settings"` of the recipe.
        result: of the run; its `"options"` are the recipe's, with all defaults.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.tables import show_settings
        >>> config = {"recipe": "digits", "options": {"seed": None}, "settings": {}}
        >>> html = show_settings(config, {"seed": 7})
        >>> '<th scope="row">seed</th><td class="unset">not set</td><td>7</td>' in html
        True
    """
    asked: Mapping[str, Any] = config.get("options") or {}
    of_run = [
        (name(key), value, result.get(_FILLED_IN.get(key, ""), value))
        for key, value in asked.items()
    ]
    of_recipe = {**(config.get("settings") or {}), **(result.get("options") or {})}
    rows = [("recipe", config.get("recipe"), result.get("recipe")), *of_run]
    shown = show_table("Run", ("option", "asked for", "used"), rows)
    if of_recipe:
        named = [(name(key), value) for key, value in of_recipe.items()]
        shown += show_table("Recipe", ("option", "value"), named)
    return shown


def show_origin(result: Mapping[str, Any]) -> str:
    """Shows which software and which machine a result comes from.

    Args:
        result: of the run, with `"versions"` and `"host"`.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.tables import show_origin
        >>> html = show_origin({"versions": {"jax": "0.10.2"}})
        >>> '<th scope="row">jax</th><td>0.10.2</td>' in html
        True
    """
    versions: Mapping[str, Any] = result.get("versions") or {}
    host: Mapping[str, Any] = result.get("host") or {}
    return show_table("Versions", ("software", "version"), list(versions.items())) + show_table(
        "Machine", ("property", "value"), [(name(key), value) for key, value in host.items()]
    )


def show_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Shows a table; the first cell of a row is its heading.

    Args:
        title: of the table.
        heads: what is in each column.
        rows: the cells; None for what is not known.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.tables import show_table
        >>> '<th scope="row">1</th><td>2</td>' in show_table("sums", ("a", "b"), [(1, 2)])
        True
    """
    head = "".join(f'<th scope="col">{one}</th>' for one in heads)
    # A focusable region, so that a wide table can be scrolled with the keyboard, too.
    return f"""<div class="scroll" tabindex="0" role="region" aria-label="{title}"><table>
<caption>{title}</caption>
<thead><tr>{head}</tr></thead>
<tbody>
{"".join(map(_row, rows))}</tbody>
</table></div>
"""


def _row(cells: Sequence[Any]) -> str:
    first, *others = cells
    values = "".join(map(_cell, others))
    return f'<tr><th scope="row">{escape(first)}</th>{values}</tr>\n'


def _cell(value: Any) -> str:
    if value is None:
        return '<td class="unset">not set</td>'
    # Paths and identifiers may be broken where their parts meet, so that columns can be narrow.
    text = re.sub(r"([/_])", r"\1<wbr>", escape(setting(value)))
    return f"<td>{text}</td>"

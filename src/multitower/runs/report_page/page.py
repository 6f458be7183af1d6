"""The page around the sections of a report: one file that needs no other and no network."""

import time
from collections.abc import Mapping
from importlib import resources

from multitower.runs.report_page.wording import escape


def make_page(
    *,
    title: str,
    kind: str,
    heading: str,
    summary: str,
    lead: str,
    sections: Mapping[str, str],
    footer: str,
) -> str:
    """Makes a whole page.

    Args:
        title: of the browser's window.
        kind: what the page is about, in a few words.
        heading: the name of what it is about.
        summary: the line below.
        lead: HTML before the first section.
        sections: heading and HTML of each; one without HTML is left out.
        footer: where the numbers are.

    Returns:
        HTML.

    Example:
        >>> from multitower.runs.report_page.page import make_page
        >>> page = make_page(
        ...     title="a", kind="b", heading="<c>", summary="d", lead="", sections={}, footer="e"
        ... )
        >>> "<h1>&lt;c&gt;</h1>" in page
        True
    """
    style = resources.files("multitower.runs.report_page").joinpath("style.css").read_text("utf-8")
    now = time.time()
    moment = time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(now))
    date = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    body = "\n".join(
        f"<section>\n<h2>{escape(name)}</h2>\n{content}\n</section>"
        for name, content in sections.items()
        if content
    )
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} | multitower</title>
<style>
{style}</style>
</head>
<body>
<header>
<p class="eyebrow">multitower {escape(kind)}, <time datetime="{moment}">{date}</time></p>
<h1>{escape(heading)}</h1>
<p class="summary">{escape(summary)}</p>
</header>
<main>
{lead}
{body}
</main>
<footer>
<p>{escape(footer)}</p>
</footer>
</body>
</html>
"""

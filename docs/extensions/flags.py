"""A hook of MkDocs that keeps flags in one piece; mkdocs.yml names it.

Browsers may break a line after any hyphen: `--batch-size` would end up as `--` and
`batch-size`.
"""

import re
from typing import Any

# Blocks of code scroll, and are left as they are.
_CODE = re.compile(r"<pre.*?</pre>|<code>(?P<inline>[^<]*)</code>", re.DOTALL)
_FLAG = re.compile(r"(?<![\w-])--?[A-Za-z][\w-]*")


def on_page_content(html: str, **_: Any) -> str:
    """Called with the HTML of every page."""
    return _CODE.sub(_keep, html)


def _keep(code: re.Match[str]) -> str:
    if code["inline"] is None:
        return code[0]
    return (
        "<code>"
        + _FLAG.sub(r'<span class="flag">\g<0></span>', code["inline"])
        + "</code>"
    )

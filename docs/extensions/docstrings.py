"""How mkdocstrings reads multitower's docstrings; mkdocs.yml names it."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_NAME = re.compile(r"(?<!\[)`(multitower\.[\w.]+)`")


class MultitowerDocstrings(griffe.Extension):
    """Shows examples as code, and makes public names links.

    Griffe knows a section "Examples:"; the source has one each, called "Example:".
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when all modules are read."""
        _prepare(pkg, {f"{pkg.path}.{name}" for name in pkg.exports or ()})


def _prepare(thing: griffe.Object, linked: set[str]) -> None:
    if thing.docstring:
        text = _EXAMPLE.sub("Examples:", thing.docstring.value)
        thing.docstring.value = _NAME.sub(lambda name: _link(name, linked), text)
    for member in thing.members.values():
        if not member.is_alias:
            _prepare(member, linked)


def _link(name: re.Match[str], linked: set[str]) -> str:
    return f"[{name[0]}][{name[1]}]" if name[1] in linked else name[0]

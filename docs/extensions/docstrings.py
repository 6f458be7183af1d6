"""How mkdocstrings reads multitower's docstrings; mkdocs.yml names it."""

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^Example:$", re.MULTILINE)
_NAME = re.compile(r"(?<!\[)`(multitower\.[\w.]+)`")

# Names outside of `multitower` itself that have a place in the reference.
_ELSEWHERE = {
    "multitower.data.augmentation.augmented",
    "multitower.training.evaluation.evaluate",
    "multitower.training.observe.MetricsFile",
}


class MultitowerDocstrings(griffe.Extension):
    """Shows examples as code, makes names links, and finds functions by theirs.

    Griffe knows a section "Examples:"; the source has one each, called "Example:".
    `multitower.train_step` is a function for Python, and the module `train_step.py`
    for Griffe: the function is told that it has the shorter name too.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Called when all modules are read."""
        exports = [str(name) for name in pkg.exports or ()]
        linked = {f"{pkg.path}.{name}" for name in exports} | _ELSEWHERE
        _prepare(pkg, linked)
        for name in exports:
            member = pkg.members[name]
            if not member.is_alias and member.is_module and name in member.members:
                function = member.members[name]
                alias = griffe.Alias(name, function)
                function.aliases[f"{pkg.path}.{name}"] = alias


def _prepare(thing: griffe.Object, linked: set[str]) -> None:
    if thing.docstring:
        text = _EXAMPLE.sub("Examples:", thing.docstring.value)
        thing.docstring.value = _NAME.sub(lambda name: _link(name, linked), text)
    for member in thing.members.values():
        if not member.is_alias:
            _prepare(member, linked)


def _link(name: re.Match[str], linked: set[str]) -> str:
    return f"[{name[0]}][{name[1]}]" if name[1] in linked else name[0]

"""Programs that CI runs rarely, or never as a whole, still fit the library that they measure."""

import ast
import importlib

import pytest

from places import ROOT

PROGRAMS = [
    path
    for folder in ("benchmarks", "tests/cluster", "examples", "docs")
    for path in sorted((ROOT / folder).rglob("*.py"))
]


def names_taken_from_the_library(path):
    """Pairs (module, name) of each `from multitower.module import name`, anywhere in a file."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
        if module.split(".")[0] == "multitower":
            yield from ((module, alias.name) for alias in node.names)


def exists(module, name):
    if hasattr(importlib.import_module(module), name):
        return True
    try:
        importlib.import_module(f"{module}.{name}")
    except ImportError:
        return False
    return True


@pytest.mark.parametrize("folder", ["benchmarks", "tests/cluster"])
def test_there_is_something_to_look_at(folder):
    files = [path for path in PROGRAMS if path.is_relative_to(ROOT / folder)]
    assert any(True for path in files for _ in names_taken_from_the_library(path))


def test_the_names_that_they_import_exist():
    """Lie: a name has moved, and a benchmark stops with an ImportError on the day of the GPU."""
    missing = [
        f"{path.relative_to(ROOT)}: from {module} import {name}"
        for path in PROGRAMS
        for module, name in names_taken_from_the_library(path)
        if not exists(module, name)
    ]
    assert not missing, "\n".join(missing)

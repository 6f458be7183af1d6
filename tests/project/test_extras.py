"""Where a package of an extra is missing, the error says which command installs it."""

import importlib.metadata
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import multitower as mt
from multitower.cli.main import main
from multitower.errors import install_command
from multitower.recipes import digits
from multitower.recipes.catalog import find_recipe
from multitower.runs.options import RunOptions
from multitower.runs.train import run
from places import ROOT

SOURCES = sorted(Path(mt.__file__).parent.rglob("*.py"))
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def packages_of(extra):
    """The requirements of an extra, with those of the extras that it includes."""
    found = {}
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == "multitower":
            for included in requirement.extras:
                found |= packages_of(included)
        else:
            found[requirement.name] = requirement
    return found


def draw(tmp_path):
    run(find_recipe("digits"), RunOptions(steps=1), directory=tmp_path)


def command_line(_):
    assert main(["doctor"]) == 2


# Package: what is imported from it, and what a user does that needs it.
NEEDED = {
    "jinja2": ("jinja2", draw),
    "matplotlib": ("matplotlib", draw),
    "orbax-checkpoint": ("orbax.checkpoint", mt.Checkpoints),
    "pillow": ("PIL", draw),
    "rich": ("rich", command_line),
    "scikit-learn": ("sklearn", lambda _: digits.load()),
    "tensorboardX": ("tensorboardX", mt.EventFiles),
    "tyro": ("tyro", command_line),
}


def take_away(module, monkeypatch):
    """What imports a module has not been imported yet, and will not find it."""
    late = (f"{module}.", "multitower.runs.report", "multitower.cli.")
    for name in [one for one in sys.modules if one.startswith(late)]:
        if name == "multitower.cli.main":
            continue
        parent, _, child = name.rpartition(".")
        monkeypatch.delattr(sys.modules.get(parent), child, raising=False)
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)


@pytest.mark.parametrize("package", packages_of("cli"))
def test_a_missing_package_is_named_with_the_command_that_installs_it(
    package, monkeypatch, tmp_path, capsys
):
    """Lie: a command that fails, or installs a stranger's package, where an index is asked."""
    module, use = NEEDED[package]
    take_away(module, monkeypatch)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines_of_the_metadata())
    if use is command_line:
        use(tmp_path)
        said = capsys.readouterr().err.rstrip("\n")
    else:
        with pytest.raises(mt.errors.MultitowerError) as raised:
            use(tmp_path)
        said = str(raised.value)
    command = said.partition(" Run: ")[2]
    assert command.startswith("pip install ")
    named = [Requirement(word) for word in shlex.split(command)[2:]]
    assert packages_of("cli")[package] in named
    assert all(one in packages_of("cli").values() for one in named)


def lines_of_the_metadata():
    """What `importlib.metadata.requires` says of a wheel with today's pyproject.toml."""
    extras = [f"{line}; extra == '{extra}'" for extra in EXTRAS for line in EXTRAS[extra]]
    return [*PROJECT["dependencies"], *extras]


def test_every_optional_package_has_a_row_above():
    assert set(NEEDED) == set(packages_of("cli")) >= set(packages_of("checkpoint"))


def test_the_command_line_asks_for_all_that_it_will_need(monkeypatch, capsys):
    """Lie: a command that ends in the next missing package."""
    take_away("tyro", monkeypatch)
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines_of_the_metadata())
    command_line(None)
    words = shlex.split(capsys.readouterr().err.partition(" Run: ")[2])
    assert {Requirement(word).name for word in words[2:]} == set(packages_of("cli"))


def test_a_source_tree_that_is_not_installed_names_the_packages_alone(monkeypatch):
    def is_not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", is_not_installed)
    assert install_command("tyro", "rich") == "pip install tyro rich"


def test_the_names_of_packages_are_compared_as_pip_does(monkeypatch):
    lines = ["Tensorboard_X>=2.6,<3; extra == 'cli'", "jax[cuda13]>=0.10", "plain"]
    monkeypatch.setattr(importlib.metadata, "requires", lambda _: lines)
    command = install_command("tensorboard-x", "jax", "plain", "other")
    assert command == "pip install 'Tensorboard_X>=2.6,<3' 'jax[cuda13]>=0.10' plain other"


def test_commands_are_written_in_one_place():
    """Lie: `pip install 'multitower[cli]'`, which looks the name up in an index."""
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        if path.name != "errors.py":
            assert "pip install" not in text, path
            assert not re.search(r"multitower\[\w+\]", text), path

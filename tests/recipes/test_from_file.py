"""Recipes in files: a user's own works like a shipped one, and says what is wrong where it is."""

import json
import re

import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.recipes.catalog import find_recipe, option_names
from multitower.runs.options import RunOptions
from multitower.runs.train import run
from places import CIRCLE

EXAMPLE = CIRCLE

WITH_OPTIONS = """
import dataclasses, helper_beside
from multitower.recipes import digits

@dataclasses.dataclass(frozen=True)
class Options:
    steps: int = helper_beside.STEPS

def make_recipe(options):
    return dataclasses.replace(digits.recipe, name="mine", steps=options.steps)
"""


@pytest.mark.slow
def test_the_example_learns_and_is_short():
    assert len(EXAMPLE.read_text().splitlines()) <= 42
    result = run(find_recipe(str(EXAMPLE)), RunOptions(devices=3, towers=4))
    assert result["recipe"] == "circle"
    assert result["test_accuracy"] > 0.95


@pytest.mark.slow
def test_the_command_line_takes_a_file(tmp_path, capsys):
    where = ["--run-dir", str(tmp_path), "--devices", "1", "--steps", "2"]
    assert main(["train", str(EXAMPLE), *where]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["recipe"] == "circle"
    assert json.loads((tmp_path / "config.json").read_text())["recipe"] == str(EXAMPLE)
    assert "training circle on 1 CPU device" in capsys.readouterr().out


def test_a_file_may_have_options_and_modules_beside_it(tmp_path):
    (tmp_path / "mine.py").write_text(WITH_OPTIONS)
    (tmp_path / "helper_beside.py").write_text("STEPS = 7")
    assert find_recipe(str(tmp_path / "mine.py")).steps == 7
    found = find_recipe(str(tmp_path / "mine.py"), {"steps": "9"})
    assert (found.name, found.steps, found.options) == ("mine", 9, {"steps": 9})
    assert option_names(str(tmp_path / "mine.py")) == ("steps",)
    with pytest.raises(mt.RunError, match=r"no option 'rate'. There are: steps=7"):
        find_recipe(str(tmp_path / "mine.py"), {"rate": "1"})


def test_modules_beside_the_file_are_found_through_a_link_to_it(tmp_path):
    """Lie: they are looked for beside the link, where Python itself does not look."""
    (tmp_path / "files").mkdir()
    text = WITH_OPTIONS.replace("helper_beside", "helper_behind_a_link")
    (tmp_path / "files" / "mine.py").write_text(text)
    (tmp_path / "files" / "helper_behind_a_link.py").write_text("STEPS = 7")
    (tmp_path / "link.py").symlink_to(tmp_path / "files" / "mine.py")
    assert find_recipe(str(tmp_path / "link.py")).steps == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1", "mine.py defines no recipe. End it with: recipe = Recipe("),
        (
            "recipe = {'name': 'x'}",
            "recipe of type dict: it must be a Recipe, from multitower.recipes",
        ),
        ("\n\nrecipe = 1 / 0", "mine.py, line 3: ZeroDivisionError: division by zero"),
        ("\ndef recipe(:", "mine.py, line 2: SyntaxError"),
        ("import no_such_module", "mine.py, line 1: ModuleNotFoundError: No module named"),
        (
            "from multitower.recipes import Recipe\nrecipe = Recipe(name='x')",
            "line 2: TypeError",
        ),
        (
            "import dataclasses as d\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), optimizer=3)",
            "line 3: ArgumentError: the recipe's optimizer is int: it must be a function, such as",
        ),
        (
            "import dataclasses as d\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), global_batch=0)",
            "line 3: ArgumentError: the recipe's global_batch is 0: it must be a whole number",
        ),
        (
            "import dataclasses as d\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), data=lambda: None)",
            "the recipe's data() returned NoneType: it must return DataSets(train=..., test=...)",
        ),
        (
            "import dataclasses as d\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), init=lambda: 1.0)",
            "the recipe's init takes the arguments (), and a run calls init(key). Write init=",
        ),
        (
            "import dataclasses as d\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), data=lambda seed: None)",
            "the recipe's data takes the arguments (seed), and a run calls data(). Write data=",
        ),
        (  # the lie: a run of 500 steps has the learning rate 500
            "import dataclasses as d, optax\nfrom multitower.recipes import digits\n"
            "recipe = d.replace(digits.make_recipe(digits.Options()), optimizer=optax.sgd)",
            "the recipe's optimizer takes the arguments (learning_rate, momentum, ",
        ),
        ("def make_recipe(options): ...", "defines make_recipe(options), and no dataclass Options"),
        (
            "class Options:\n    rate = 1\ndef make_recipe(options): ...",
            "no dataclass Options. Write @dataclasses.dataclass(frozen=True) before class Options",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    rate: float = 1.0\n"
            "def make_recipe(): ...",
            "mine.py: make_recipe takes the arguments (): write def make_recipe(options): ...",
        ),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass Options:\n    rate: float\n"
            "def make_recipe(options): ...",
            "needs a value for its option 'rate', which has no default: say --set rate=VALUE",
        ),
    ],
)
def test_what_is_wrong_is_one_line_with_its_place(tmp_path, capsys, text, message):
    (tmp_path / "mine.py").write_text(text)
    assert main(["train", str(tmp_path / "mine.py")]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("name", ["none.py", "some/where", "./digits"])
def test_a_missing_file_is_named(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(mt.RunError, match=re.escape(f"there is no file {tmp_path / name}")):
        find_recipe(name)


def test_a_file_with_a_like_name_is_named_and_no_other_of_the_directory(tmp_path):
    # The lie: any file is like any other, since they have a long path in common.
    for name in ("conftest.py", "recipe.py"):
        (tmp_path / name).touch()
    with pytest.raises(mt.RunError, match=r"recpie\.py\. Did you mean 'recipe\.py'\? Name a"):
        find_recipe(str(tmp_path / "recpie.py"))
    with pytest.raises(mt.RunError, match=r"mnist-8x8\.py\. Name a"):
        find_recipe(str(tmp_path / "mnist-8x8.py"))


def test_a_file_that_is_no_python_is_an_error(tmp_path):
    (tmp_path / "recipe.txt").touch()
    with pytest.raises(mt.RunError, match=r"its name must end in \.py"):
        find_recipe(str(tmp_path / "recipe.txt"))

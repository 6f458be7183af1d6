"""--config: what a file says counts, what a flag says counts more, and nothing is passed over."""

import itertools
import json
from pathlib import Path

import pytest

import multitower as mt
import places
from multitower.cli.flags.config_file import Config, read_config_file
from multitower.cli.flags.settings import expand_flags
from multitower.cli.main import main
from multitower.cli.train import train

RECIPE = str(places.CIRCLE)
TOML = """
recipe = "cifar10"
[settings]
synthetic = true
lr_base = 0.002
[options]
towers = 4
keep_best = "accuracy"
"""


def test_toml_and_json_say_the_same(tmp_path):
    (tmp_path / "a.toml").write_text(TOML)
    settings = {"synthetic": "True", "lr_base": "0.002"}
    options = {"towers": 4, "keep_best": "accuracy"}
    content = {"recipe": "cifar10", "settings": settings, "options": options}
    (tmp_path / "a.json").write_text(json.dumps(content))
    found = read_config_file(tmp_path / "a.toml")
    assert found == read_config_file(tmp_path / "a.json") == Config("cifar10", settings, options)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "a.json cannot be read as JSON"),
        ("[]", "must be tables"),
        ('{"settings": 3}', "must be tables"),
        (
            '{"steps": 3}',
            r"has 'steps': .* Write it into options, in TOML below a line \[options\]",
        ),
        ('{"rate": 3}', r"has 'rate': .* Write it into settings"),
        ('{"option": {}}', "has 'option': there are recipe, settings"),
        ('{"options": {"step": 3}}', r"a\.json: a run has no option 'step'. Did you mean 'steps'"),
        ('{"options": {"steps": "ten"}}', r"steps=ten: .* is a whole number or none"),
    ],
)
def test_a_mistake_in_the_file_is_named(tmp_path, text, said):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(mt.RunError, match=said):
        read_config_file(tmp_path / "a.json")


def test_a_file_that_is_not_there():
    with pytest.raises(mt.RunError, match=r"nowhere\.toml cannot be read"):
        read_config_file(Path("nowhere.toml"))


def test_options_of_the_recipe_are_flags(tmp_path):
    def expand_train_flags(words):
        return expand_flags(words, {"train": train})

    words = ["train", "cifar10", "--lr-base", "0.1", "--steps", "3", "--lr-decay=0.5"]
    expanded = ["train", "cifar10", "--set", "lr_base=0.1", "--steps", "3", "--set", "lr_decay=0.5"]
    assert expand_train_flags(words) == expanded
    # The recipe may come from the file.
    (tmp_path / "a.toml").write_text(TOML)
    config = ["train", "--config", str(tmp_path / "a.toml")]
    with_option = [*config, "--set", "ma_decay=0.9"]
    assert expand_train_flags([*config, "--ma-decay", "0.9"]) == with_option
    with pytest.raises(mt.RunError, match=r"no option --ma-decax. Did you mean '--ma-decay'\?"):
        expand_train_flags([*config, "--ma-decax", "0.9"])
    assert expand_train_flags(["resume", "x", "--lr-base", "1"]) == [
        "resume",
        "x",
        "--lr-base",
        "1",
    ]
    assert expand_train_flags([]) == []


@pytest.mark.slow
def test_a_saved_configuration_makes_the_same_run_and_flags_come_first(tmp_path):
    # The lie: a config file that is read, and half of it ignored.
    flags = ["--steps", "3", "--towers", "2", "--seed", "7", "--tower-batch", "4"]
    assert main(["train", RECIPE, *flags, "--run-dir", str(tmp_path / "first")]) == 0
    config = str(tmp_path / "first" / "config.json")
    assert main(["train", "--config", config, "--run-dir", str(tmp_path / "again")]) == 0
    results = [
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("first", "again")
    ]
    same = ("fingerprint", "seed", "steps", "towers", "batch_size")
    assert [results[0][key] for key in same[1:]] == [7, 3, 2, 8]
    assert [results[0][key] for key in same] == [results[1][key] for key in same]
    flags = ["--config", config, "--seed", "8", "--run-dir", str(tmp_path / "other")]
    assert main(["train", RECIPE, *flags]) == 0
    other = json.loads((tmp_path / "other" / "result.json").read_text())
    assert (other["seed"], other["steps"]) == (8, 3)
    assert other["fingerprint"] != results[0]["fingerprint"]


def test_a_recipe_must_be_named_once(tmp_path, capsys):
    assert main(["train"]) == 2
    assert "name a recipe: digits, mnist" in capsys.readouterr().err
    (tmp_path / "a.toml").write_text(TOML)
    assert main(["train", "digits", "--config", str(tmp_path / "a.toml")]) == 2
    assert "is of the recipe cifar10" in capsys.readouterr().err
    assert main(["train", "digits", "--batch-size", "8", "--tower-batch", "4"]) == 2
    assert "Give one of them" in capsys.readouterr().err


def test_one_file_under_two_names_is_one_recipe(tmp_path, monkeypatch, capsys):
    """Lie: two recipes, where the file and the command name the same one."""
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()  # defines no recipe: it is looked for, and nothing is trained
    names = ("my.py", "./my.py", str(tmp_path / "my.py"))
    for typed, named in itertools.product(names, names):
        Path("a.toml").write_text(f'recipe = "{named}"')
        assert main(["train", typed, "--config", "a.toml"]) == 2
        assert "a.toml is of the recipe" not in capsys.readouterr().err
    assert main(["train", "other.py", "--config", "a.toml"]) == 2
    assert "a.toml is of the recipe" in capsys.readouterr().err

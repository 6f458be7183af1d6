"""Every flag arrives where it acts: what a command passes on is looked at, and nothing is trained.

The lie each test would catch: a flag that is read, listed by --help, and dropped.
"""

import dataclasses
import importlib

import pytest

import places
from multitower.cli.main import main
from multitower.processes.run_lock import held_run_directory
from multitower.runs.options import RunOptions

CIRCLE = str(places.CIRCLE)
train_command = importlib.import_module("multitower.cli.train")
resume_command = importlib.import_module("multitower.cli.resume")


@pytest.fixture
def passed(monkeypatch):
    """What `run` and `score` are called with, instead of training."""
    calls = []

    def run(recipe, options, watch, **how):
        calls.append((options, how))
        return {"test_loss": 0.0, "seconds": 0.0, "fingerprint": "0" * 64}

    def score(recipe, options, directory, **how):
        calls.append((options, how))
        return {}

    monkeypatch.setattr(train_command, "run", run)
    monkeypatch.setattr(resume_command, "score", score)
    return calls


FLAGS = {
    "--devices 2": {"devices": 2},
    "--towers 4": {"towers": 4},
    "--steps 7": {"steps": 7},
    "--batch-size 24": {"global_batch": 24},
    "--tower-batch 3 --towers 4": {"global_batch": 12, "towers": 4},
    "--seed 5": {"seed": 5},
    "--checkpoint-every 3": {"checkpoint_every": 3},
    "--evaluate-every 2": {"evaluate_every": 2},
    "--keep-best loss --best min": {"keep_best": "loss", "best": "min"},
    "--shard-update --towers 4": {"shard_update": True, "towers": 4},
    "--stages 2 --layout 1x2 --towers 4": {"stages": 2, "layout": "1x2", "towers": 4},
    "--clip-norm 0.5": {"clip_norm": 0.5},
}


@pytest.mark.parametrize("flags", FLAGS)
def test_a_flag_of_train_arrives(flags, passed, tmp_path):
    assert main(["train", CIRCLE, "--run-dir", str(tmp_path / "run"), *flags.split()]) == 0
    ((options, how),) = passed
    expected = {field.name: field.default for field in dataclasses.fields(RunOptions)}
    assert dataclasses.asdict(options) == {**expected, **FLAGS[flags]}
    assert how == {"directory": tmp_path / "run", "resume": False, "allow_previous": False}


def test_every_option_of_a_run_has_a_flag_that_is_tried():
    tried = {name for options in FLAGS.values() for name in options}
    assert tried == {field.name for field in dataclasses.fields(RunOptions)}


@pytest.fixture
def stopped(passed, tmp_path):
    """The directory of a run that was begun with four towers and not finished."""
    directory = tmp_path / "run"
    assert main(["train", CIRCLE, "--run-dir", str(directory), "--towers", "4", "--seed", "3"]) == 0
    passed.clear()
    return directory


@pytest.mark.parametrize(
    ("flags", "devices", "allow_previous"),
    [("", None, False), ("--devices 2", 2, False), ("--allow-previous", None, True)],
)
def test_a_flag_of_resume_arrives(flags, devices, allow_previous, passed, stopped):
    assert main(["resume", str(stopped), *flags.split()]) == 0
    ((options, how),) = passed
    assert (options.devices, options.towers, options.seed) == (devices, 4, 3)
    assert how == {"directory": stopped, "resume": True, "allow_previous": allow_previous}


@pytest.mark.parametrize(("flags", "best"), [("", False), ("--best", True)])
def test_a_flag_of_eval_arrives(flags, best, passed, stopped):
    assert main(["eval", str(stopped), *flags.split()]) == 0
    ((options, how),) = passed
    assert options.towers == 4
    assert how == {"best": best}


def test_resume_asks_for_the_lock(passed, stopped, capsys):
    with held_run_directory(stopped):
        assert main(["resume", str(stopped)]) == 2
    assert not passed
    assert "another" in capsys.readouterr().err


def test_resume_auto_goes_on_only_with_the_same_settings(passed, stopped, capsys):
    (stopped / "checkpoints").mkdir()  # it has trained
    words = ["train", CIRCLE, "--run-dir", str(stopped), "--towers", "4", "--resume", "auto"]
    assert main([*words, "--seed", "3"]) == 0
    ((_, how),) = passed
    assert how["resume"]
    assert main([*words, "--seed", "4"]) == 2
    assert "there seed is 3, and here 4" in " ".join(capsys.readouterr().err.split())
    begun = ["train", "cifar10", "--synthetic", "--run-dir", str(stopped.parent / "set")]
    assert main([*begun, "--set", "lr_base=0.1"]) == 0
    (stopped.parent / "set" / "checkpoints").mkdir()
    passed.clear()
    assert main([*begun, "--resume", "auto", "--set", "lr_base=0.2"]) == 2
    assert not passed

"""Every flag arrives where it acts: what a command passes on is looked at, and nothing is trained.

The lie each test would catch: a flag that is read, listed by --help, and dropped.
"""

import contextlib
import dataclasses
import importlib
import io
import json
import re
import shlex
import sys

import pytest

import multitower as mt
import places
from multitower.cli.main import main
from multitower.planning.layouts import PlannedLayout
from multitower.planning.plan import Plan
from multitower.processes.leaving import HEARTBEAT_S
from multitower.processes.run_lock import held_run_directory
from multitower.runs.options import RunOptions

CIRCLE = str(places.CIRCLE)
train_command = importlib.import_module("multitower.cli.train")
finish_command = importlib.import_module("multitower.cli.finish")
resume_command = importlib.import_module("multitower.cli.resume")
verify_command = importlib.import_module("multitower.cli.verify")
plan_command = importlib.import_module("multitower.cli.plan")
scale_command = importlib.import_module("multitower.cli.scale")


@pytest.fixture
def passed(monkeypatch):
    """What `run` and `score` are called with, instead of training."""
    calls = []

    def run(recipe, options, watch, *, begins, **how):
        calls.append((options, how))
        begins()  # as a run does before its first step
        return {"test_loss": 0.0, "seconds": 0.0, "fingerprint": "0" * 64}

    def score(recipe, options, directory, **how):
        calls.append((options, how))
        return {"step": 3, "test_loss": 0.5}

    monkeypatch.setattr(finish_command, "run", run)
    monkeypatch.setattr(resume_command, "score", score)
    return calls


FLAGS = {
    "--devices 2": {"devices": 2},
    "--towers 4": {"towers": 4},
    "--steps 7": {"steps": 7},
    "--batch-size 24": {"global_batch": 24},
    "--tower-batch 3 --towers 4": {"global_batch": 12, "towers": 4},
    "--seed 5": {"seed": 5},
    "--checkpoint-every 3 --keep-last 1": {"checkpoint_every": 3, "keep_last": 1},
    "--evaluate-every 2": {"evaluate_every": 2},
    "--keep-best loss --best min": {"keep_best": "loss", "best": "min"},
    "--shard-update --towers 4": {"shard_update": True, "towers": 4},
    "--shard-params": {"shard_params": True},
    "--steps-per-call 3": {"steps_per_call": 3},
    "--stages 2 --layout 1x2 --towers 4": {"stages": 2, "layout": "1x2", "towers": 4},
    "--stages 2 --towers 4 --no-remat": {"stages": 2, "towers": 4, "remat": False},
    "--stages 4 --towers 4 --interleave": {"stages": 4, "towers": 4, "interleave": True},
    "--clip-norm 0.5": {"clip_norm": 0.5},
    "--sync-every 4 --towers 4": {"sync_every": 4, "towers": 4},
    "--sync-every 4 --outer-lr 1 --outer-momentum 0 --local-state average": {
        "sync_every": 4,
        "outer_lr": 1.0,
        "outer_momentum": 0.0,
        "local_state": "average",
    },
    "--profile 2:3": {"profile": "2:3"},
    "--log wandb,mlflow": {"log": "wandb,mlflow"},
    "--compute-dtype bfloat16": {"compute_dtype": "bfloat16"},
    "--compute-dtype float16": {"compute_dtype": "float16"},
    "--compute-dtype float32": {},  # the same program as without
    "--epochs 2.5": {"epochs": 2.5},
    "--ema-decay 0.9": {"ema_decay": 0.9},
    "--on-nonfinite skip": {"on_nonfinite": "skip"},
    "--extra-metrics learning_rate,gradient_norm": {"extra_metrics": "learning_rate,gradient_norm"},
    "--early-stopping accuracy:5 --evaluate-every 2": {
        "early_stopping": "accuracy:5",
        "evaluate_every": 2,
    },
    "--early-stopping loss:2:min --evaluate-every 2 --min-delta 0.01": {
        "early_stopping": "loss:2:min",
        "evaluate_every": 2,
        "min_delta": 0.01,
    },
    "--asynchronous --max-staleness 0 --towers 4": {
        "asynchronous": True,
        "max_staleness": 0,
        "towers": 4,
    },
    "--asynchronous --rotation 0,1,0 --stale-scale 0.5 --momentum-correction": {
        "asynchronous": True,
        "rotation": "0,1,0",
        "stale_scale": 0.5,
        "momentum_correction": True,
    },
    "--asynchronous --max-staleness 1 --towers 4 --tower-batch 3": {
        "asynchronous": True,
        "max_staleness": 1,
        "towers": 4,
        "global_batch": 6,
    },
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


def test_steps_and_epochs_take_each_others_place(passed, tmp_path):
    directory, again = tmp_path / "run", ["train", "--config"]
    for words in (
        ["train", CIRCLE, "--run-dir", directory, "--epochs", "0.1"],  # 3 steps
        ["resume", directory],
        [*again, directory / "config.json", "--steps", "4", "--run-dir", tmp_path / "b"],
        [*again, tmp_path / "b/config.json", "--epochs", "2", "--run-dir", tmp_path / "c"],
        ["resume", directory, "--steps", "5"],
    ):
        assert main([str(word) for word in words]) == 0
    assert main(["resume", str(directory), "--steps", "2"]) == 2  # fewer than it makes
    found = [(options.steps, options.epochs) for options, _ in passed]
    assert found == [(None, 0.1), (None, 0.1), (4, None), (None, 2.0), (5, None)]
    saved = json.loads((directory / "config.json").read_text())["options"]
    assert (saved["steps"], saved["epochs"]) == (5, None)


@pytest.mark.parametrize(("flags", "best"), [("", False), ("--best", True)])
def test_a_flag_of_eval_arrives(flags, best, passed, stopped):
    assert main(["eval", str(stopped), *flags.split()]) == 0
    ((options, how),) = passed
    assert options.towers == 4
    assert how == {"best": best}


@pytest.mark.parametrize("first", [True, False])
def test_the_first_process_alone_prints_scores(first, passed, stopped, monkeypatch, capsys):
    monkeypatch.setattr(resume_command, "is_first", lambda: first)
    capsys.readouterr()
    assert main(["eval", str(stopped)]) == 0
    printed = '{\n  "step": 3,\n  "test_loss": 0.5\n}\n'
    assert capsys.readouterr().out == (printed if first else "")


def test_resume_asks_for_the_lock(passed, stopped, capsys):
    with held_run_directory(stopped):
        assert main(["resume", str(stopped)]) == 2
    assert not passed
    assert "another" in capsys.readouterr().err


def test_resume_auto_waits_for_the_processes_of_the_run_before(passed, stopped, monkeypatch):
    """They end a heartbeat after the first one: to be refused then would end the job."""
    waited = []

    def held(path, *, wait_s):
        waited.append((path, wait_s))
        return contextlib.nullcontext()

    monkeypatch.setattr(train_command, "held_for_all", held)
    (stopped / "checkpoints").mkdir()
    words = ["train", CIRCLE, "--run-dir", str(stopped), "--towers", "4", "--seed", "3"]
    assert main([*words, "--resume", "auto"]) == 0
    assert waited == [(stopped, 2 * HEARTBEAT_S)]


def test_resume_auto_goes_on_only_with_the_same_settings(passed, stopped, capsys):
    (stopped / "checkpoints").mkdir()  # it has trained
    words = ["train", CIRCLE, "--run-dir", str(stopped), "--towers", "4", "--resume", "auto"]
    assert main([*words, "--seed", "3"]) == 0
    ((_, how),) = passed
    assert how["resume"]
    assert main([*words, "--seed", "4"]) == 2
    assert "holds a run with seed 3, and this command has seed 4" in capsys.readouterr().err
    assert main([*words, "--seed", "3", "--compute-dtype", "float32"]) == 0
    begun = ["train", "cifar10", "--synthetic", "--run-dir", str(stopped.parent / "set")]
    assert main([*begun, "--set", "lr_base=0.1"]) == 0
    (stopped.parent / "set" / "checkpoints").mkdir()
    passed.clear()
    assert main([*begun, "--resume", "auto", "--set", "lr_base=0.2"]) == 2
    assert not passed


@pytest.fixture
def recipes(passed, monkeypatch):
    """The recipe of each call of `run` and `score`."""
    found = []

    def noting(call):
        def noted(recipe, *rest, **how):
            found.append(recipe)
            return call(recipe, *rest, **how)

        return noted

    monkeypatch.setattr(finish_command, "run", noting(finish_command.run))
    monkeypatch.setattr(resume_command, "score", noting(resume_command.score))
    return found


def test_what_is_set_of_a_recipe_arrives_and_is_kept(recipes, tmp_path):
    directory = str(tmp_path / "run")
    flags = ["--set", "lr_base=0.25", "--lr-decay", "0.5", "--data", str(tmp_path)]
    assert main(["train", "cifar10", "--run-dir", directory, *flags]) == 0
    assert main(["resume", directory]) == 0
    assert main(["eval", directory, "--data", str(tmp_path / "other")]) == 0
    trained, resumed, scored = (recipe.options for recipe in recipes)
    assert (trained["lr_base"], trained["lr_decay"]) == (0.25, 0.5)
    assert trained["data"] == str(tmp_path)
    assert resumed == trained
    assert scored == {**trained, "data": str(tmp_path / "other")}


@pytest.fixture
def asked(monkeypatch):
    """What `verify` and `scale` would compare and measure."""
    calls = []

    def look(*arguments):
        calls.append(arguments)
        raise mt.RunError("this is all that is looked at")

    monkeypatch.setattr(verify_command, "compare_runs", look)
    monkeypatch.setattr("multitower.scaling.plan.scale", look)
    return calls


OF_BOTH = {
    "--towers 4": {"towers": 4},
    "--batch-size 24": {"global_batch": 24},
    "--seed 5": {"seed": 5},
    "--shard-update --towers 4": {"shard_update": True, "towers": 4},
    "--stages 2 --towers 4": {"stages": 2, "towers": 4},
    "--stages 2 --towers 4 --interleave --no-remat": {
        "stages": 2,
        "towers": 4,
        "interleave": True,
        "remat": False,
    },
    "--sync-every 4 --towers 4 --outer-lr 1": {"sync_every": 4, "towers": 4, "outer_lr": 1.0},
    "--asynchronous --rotation 0,1,2,3 --towers 4 --stale-scale 1": {
        "asynchronous": True,
        "rotation": "0,1,2,3",
        "towers": 4,
        "stale_scale": 1.0,
    },
    "--clip-norm 0.5 --ema-decay 0.9 --compute-dtype bfloat16": {
        "clip_norm": 0.5,
        "ema_decay": 0.9,
        "compute_dtype": "bfloat16",
    },
}


@pytest.mark.parametrize(
    ("command", "flags", "expected"),
    [
        *(("verify", *pair) for pair in OF_BOTH.items()),
        *(("scale", *pair) for pair in OF_BOTH.items()),
        ("verify", "--steps 7", {"steps": 7}),
        ("scale", "--shard-params", {"shard_params": True}),
    ],
)
def test_a_flag_of_verify_or_scale_arrives(command, flags, expected, asked, tmp_path):
    where = ["--run-dir", str(tmp_path)] if command == "scale" else []
    assert main([command, CIRCLE, "--devices", "1,2", *flags.split(), *where]) == 2
    ((recipe, options, counts, *_),) = asked
    assert (recipe.name, list(counts)) == ("circle", [1, 2])
    assert options == RunOptions(**expected)


IN_LAYOUTS = (
    "--towers 4|--steps 7|--batch-size 24|--seed 5|--stages 2|--interleave|--no-remat|"
    "--clip-norm 0.5|--compute-dtype bfloat16|--set lr_base=0.25"
)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("command", "flags"),
    [
        (
            "verify",
            f"{IN_LAYOUTS}|--shard-update|--sync-every 4|--outer-momentum 0.0|--set synthetic=true",
        ),
        ("scale", f"{IN_LAYOUTS}|--strong|--rounds 2|--set synthetic=true"),
        ("scale", "--towers 4|--shard-update|--strong|--set synthetic=true"),
        ("scale", "--shard-params|--weak|--steps 3|--set synthetic=true"),
    ],
)
def test_flags_reach_the_processes_of_layouts(command, flags, monkeypatch, tmp_path):
    """Lie: layouts that are compared in another training than the one that was asked for."""
    started = []

    def look(layout, words):
        started.append((layout, shlex.join(words)))
        raise mt.RunError("this is all that is looked at")

    module = verify_command if command == "verify" else scale_command
    monkeypatch.setattr(module, "run_in_layout", look)
    where = ["--run-dir", str(tmp_path)] if command == "scale" else []
    words = [command, "cifar10", *flags.replace("|", " ").split(), *where]
    assert main([*words, "--layouts", "1x2"]) == 2
    ((layout, said),) = started
    assert layout == (1, 2)
    assert said.startswith(f"{command} cifar10 ")
    for flag in [*flags.split("|"), "--json", *([f"--run-dir {tmp_path}"] if where else [])]:
        assert f" {flag}" in said
    assert (" --add" in said) is (command == "scale")


def test_flags_of_plan_arrive(monkeypatch, capsys):
    asked = []

    kinds = ("parameters", "gradients", "optimizer_state", "average", "rows", "activations")
    memory = dict.fromkeys(kinds, 0)
    layout = PlannedLayout({"devices": 8, "stages": 2, "layout": (4, 2)}, 8, memory, 100, 0, 0)
    notes, limits = ("stages=3 is left out: no.",), ("What breaks first: 9 (stages=2: ...).",)
    found = Plan([layout], 10, 24, 1, 8, 4, notes, limits, None)

    def look(recipe, options, **how):
        asked.append((recipe.name, options, how))
        return found

    monkeypatch.setattr(plan_command, "plan_recipe", look)
    flags = "--devices 8 --machines 4 --towers 64 --batch-size 24 --memory 24GiB"
    assert main(["plan", CIRCLE, *flags.split()]) == 1  # nothing fits
    printed = capsys.readouterr().out
    assert re.search(r"flags of train +devices .*\n--stages 2 --layout 4x2 +8 ", printed)
    assert "10 B: --stages 2 --layout 4x2 needs least" in printed
    assert "What breaks first: 9 (--stages 2: ...).\n--stages 3 is left out: no.\n" in printed
    expected = RunOptions(devices=8, towers=64, global_batch=24)
    assert asked == [("circle", expected, {"machines": 4, "memory": "24GiB"})]
    for flags, wanted in (
        (
            "--sync-every 16 --local-state average --outer-momentum 0",
            {"sync_every": 16, "local_state": "average", "outer_momentum": 0.0},
        ),
        ("--clip-norm 1 --ema-decay 0.9", {"clip_norm": 1.0, "ema_decay": 0.9}),
        ("--compute-dtype bfloat16", {"compute_dtype": "bfloat16"}),
        (
            "--asynchronous --max-staleness 3 --rotation 0,1,2,3",
            {"asynchronous": True, "max_staleness": 3, "rotation": "0,1,2,3"},
        ),
    ):
        assert main(["plan", CIRCLE, *flags.split()]) == 1
        assert asked[-1][1] == RunOptions(**wanted)
    capsys.readouterr()
    assert main(["plan", CIRCLE, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["layouts"][0]["options"]["layout"] == [4, 2]


@pytest.mark.slow
def test_what_scale_measures_and_what_is_set_arrive(asked, tmp_path):
    flags = ["--weak", "--steps", "3", "--rounds", "2", "--run-dir", str(tmp_path)]
    sets = ["--synthetic", "--set", "lr_base=0.25"]
    assert main(["scale", "cifar10", "--devices", "2", *flags, *sets]) == 2
    assert main(["verify", "cifar10", "--devices", "1,2", *sets]) == 2
    (scaled, _, _, how), (verified, *_) = asked
    assert (how.kinds, how.steps, how.rounds, how.predict) == (("weak",), 3, 2, None)
    for recipe in (scaled, verified):
        assert (recipe.options["lr_base"], recipe.options["synthetic"]) == (0.25, True)


@pytest.mark.parametrize(
    ("flags", "wanted"),
    [([], (1, None)), (["--devices", "2"], (2, None)), (["--simulate", "2"], (None, 2))],
    ids=["one", "devices", "simulated"],
)
def test_a_sample_of_a_run_whose_towers_were_its_devices(flags, wanted, monkeypatch, capsys):
    """Lie: a run with local updates on two devices has one tower, since a sample needs no more."""
    asked = []
    command = importlib.import_module("multitower.cli.sample")
    monkeypatch.setattr(command, "read_run", lambda _, devices: asked.append(devices) or (None, 0))
    monkeypatch.setattr(command, "start_devices", lambda *words: asked.append(words[:2]))
    monkeypatch.setattr(command, "continue_text", lambda *_, **__: " text")
    assert main(["sample", "runs/text", "--prompt", "a", *flags]) == 0
    assert asked == [wanted[0], wanted]
    assert capsys.readouterr().out == "a text\n"


@pytest.mark.parametrize(
    ("encoding", "shown"), [("ascii", b"caf? ?? ?"), ("utf-8", "caf\xe9 \u65e5\u672c ?".encode())]
)
def test_a_terminal_that_lacks_characters_gets_a_text_all_the_same(encoding, shown, monkeypatch):
    """Lie: a traceback of Python, where the model has written what the terminal cannot show."""
    command = importlib.import_module("multitower.cli.sample")
    monkeypatch.setattr(command, "read_run", lambda *_, **__: (None, None))
    monkeypatch.setattr(command, "start_devices", lambda *_: None)
    monkeypatch.setattr(command, "continue_text", lambda *_, **__: " \u65e5\u672c \udcff")
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding))
    assert main(["sample", "runs/text", "--prompt", "caf\xe9"]) == 0
    sys.stdout.flush()
    assert written.getvalue() == shown + b"\n"

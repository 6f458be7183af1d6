"""The command line: every flag does what it says, every mistake is one clear line."""

import importlib.metadata
import json
import os
import subprocess
import sys
import warnings

import pytest

import multitower as mt
from circle_run import CIRCLE
from forks import Fork
from multitower.cli.console import make_show_warning, say_parts
from multitower.cli.main import main
from multitower.cli.wording import in_flags
from multitower.towers.placement import place
from multitower.training.checkpoints.best import warn_of_worst
from multitower.training.same_run import check_same_run, describe_arrays
from processes import clean_environment, ended, run_fork

KEYS = {
    "recipe", "options", "seed", "steps", "batch_size", "test_accuracy", "test_loss", "fingerprint",
    "towers", "devices", "placement", "same_bits", "examples_per_s", "seconds", "versions",
    "host",
}  # fmt: skip
QUICK = ["--steps", "2", "--batch-size", "16"]


def train(run_dir, *flags):
    """`multitower train digits` in this process, which simulates eight devices."""
    code = main(["train", "digits", *QUICK, "--run-dir", str(run_dir), *flags])
    assert code == 0
    return json.loads((run_dir / "result.json").read_text())


def in_new_process(*words, **settings):
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")}
    return subprocess.run(
        [sys.executable, "-m", "multitower", *words],
        env={**environment, "JAX_PLATFORMS": "cpu", **settings},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


@pytest.mark.slow
def test_a_run_leaves_a_result_with_all_keys(tmp_path, capsys):
    result = train(tmp_path, "--devices", "2", "--seed", "4")
    assert set(result) == KEYS
    assert (result["recipe"], result["steps"], result["batch_size"]) == ("digits", 2, 16)
    assert (result["seed"], result["devices"], result["towers"]) == (4, 2, 2)
    assert len(result["fingerprint"]) == 64
    # A whole number of the 359 test images: none twice, none left out.
    assert (359 * result["test_accuracy"]) == pytest.approx(round(359 * result["test_accuracy"]))
    wanted = {"python", "jax", "jaxlib", "numpy", "optax", "multitower"}
    assert set(result["versions"]) == wanted
    assert (result["host"]["platform"], result["host"]["NPROC"]) == ("cpu", "32")
    shown = capsys.readouterr().out
    assert "training digits on 2 CPU devices" in shown
    assert "step 2/2  loss" in shown
    assert "accuracy" in shown
    assert "examples/s" in shown
    assert f"wrote {tmp_path / 'result.json'}" in shown


@pytest.mark.slow
def test_towers_and_simulate(tmp_path, capsys):
    words = [CIRCLE, "--steps", "2", "--simulate", "8", "--towers", "3"]
    assert main(["train", *words, "--run-dir", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["devices"], result["towers"], result["same_bits"]) == (3, 3, True)
    captured = capsys.readouterr()
    assert "8 simulated CPU devices" in captured.out
    # The library's warnings are one line too.
    assert captured.err.startswith("multitower: --towers 3 keep 3 of 8 devices busy")
    assert captured.err.count("\n") == 1


@pytest.mark.slow
def test_without_a_run_directory_there_is_a_new_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", CIRCLE, *QUICK, "--devices", "1"]) == 0
    (path,) = tmp_path.glob("runs/circle-*/result.json")
    result = json.loads(path.read_text())
    assert set(result) == KEYS
    assert result["devices"] == 1
    shown = capsys.readouterr().out
    assert "training circle on 1 CPU device" in shown
    assert "step 2/2  loss" in shown
    assert "result.json" in shown


@pytest.mark.slow
def test_a_result_is_replaced_only_by_force(tmp_path, capsys):
    (tmp_path / "result.json").write_text("{}")
    assert main(["train", "digits", *QUICK, "--run-dir", str(tmp_path)]) == 2
    assert (tmp_path / "result.json").read_text() == "{}"
    assert "--force" in capsys.readouterr().err
    assert set(train(tmp_path, "--devices", "1", "--force")) == KEYS


@pytest.mark.slow
def test_on_a_terminal_there_is_a_bar(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich's word for: this is a terminal
    assert main(["train", CIRCLE, *QUICK, "--devices", "1", "--run-dir", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "━" in shown
    assert "2/2" in shown


def test_help_reads_well(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["train", "--help"])
    shown = " ".join(capsys.readouterr().out.replace("│", " ").split())
    for flag in (
        "RECIPE What to train: digits, mnist, cifar10, cifar10-resnet20, gpt, or your own recipe",
        "--devices N", "--simulate N", "--towers T", "--steps N", "--batch-size N", "--seed N",
        "--run-dir DIR", "--force", "--data DIR", "--synthetic", "--download", "--set NAME=VALUE",
        "cifar10: data, synthetic, lr_base,",
        "(default: all accelerators, or two simulated devices)",
    ):  # fmt: skip
        assert flag in shown
    assert "None" not in shown
    assert "multi-process options" in shown


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train", "mnits"], "there is no recipe 'mnits'. Did you mean 'mnist'? There are: digits"),
        (["train", "digits", "--data", "."], "digits has no option 'data'. There are: learning_"),
        (["train", "digits", "--learning-rate", "hi"], "learning_rate=hi: this option of the"),
        (["train", "digits", "--learning-rate", "-1"], "learning_rate=-1.0 is out of range"),
        (
            ["train", "--steps", "1", "digits", "--learning-rte", "1"],
            "train digits has no option --learning-rte. Did you mean '--learning-rate'? "
            "multitower train --help lists all options.",
        ),
        (
            ["verify", "digits", "--stepz=3"],
            "no option --stepz. Did you mean '--steps'? multitower ",
        ),
        (["train", "digits", "--lr", "1"], "no option --lr. Did you mean '--learning-rate'?"),
        (["train", "mnits", "--lr", "1"], "there is no recipe 'mnits'. Did you mean 'mnist'?"),
        (["trian", "digits"], "there is no command 'trian'. Did you mean 'train'? There are: tr"),
        (["fly"], "there is no command 'fly'. There are: train, resume"),
        (
            ["train", "cifar10", "--set", "ma_deca=1"],
            "no option 'ma_deca'. Did you mean 'ma_decay'?",
        ),
        (["train", "digits", "--download"], "digits has nothing to download"),
        (["train", "cifar10", "--data", "/nowhere", "--synthetic"], "both synthetic images and"),
        (["train", "cifar10", "--set", "lr=1"], "no option 'lr'. There are: data=None"),
        (["train", "cifar10", "--set", "lr_base"], "--set lr_base: say NAME=VALUE"),
        (
            ["train", "cifar10", "--set", "reg_rate=x"],
            "reg_rate=x: this option of the r",
        ),
        (["train", "cifar10", "--synthetic", "--set", "synthetic=no"], "'synthetic' is set twice"),
        (["train", "digits", "--steps", "0"], "--steps 0: it must be a whole number, 1 or more."),
        (["train", "digits", "--steps", "3000000000"], "--steps 3000000000: a run makes at most"),
        (["train", "digits", "--batch-size", "0"], "a batch of 0 examples"),
        (["train", "digits", "--seed", "-1"], "--seed -1 is out of range"),
        (["train", "digits", "--towers", "0"], "--towers 0: it must be a whole number"),
        (["train", "digits", "--devices", "9"], "Use --devices 1 to 8, or simulate more"),
        (["train", "digits", "--devices", "0"], "--devices 0: this machine has cpu:0, "),
        (["train", "digits", "--simulate", "0"], "--simulate 0: it must be a whole number"),
        (["train", "digits", "--simulate", "5"], "--simulate 5 came too late"),
        (
            ["scale", CIRCLE, "--asynchronous", "--max-staleness", "-1"],
            "--max-staleness -1: it must",
        ),
        (["scale", CIRCLE, "--sync-every", "0", "--towers", "2"], "--sync-every 0: it must be 1"),
        (
            ["scale", CIRCLE, "--sync-every", "2", "--towers", "2", "--shard-update"],
            "--sync-every and --shard-update exclude each other",
        ),
    ],
)
def test_mistakes_are_one_line_and_code_2(words, message, capsys):
    assert main(words) == 2
    error = capsys.readouterr().err
    assert error.startswith("multitower: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--stages 2", "--stages 2 needs --towers, the microbatches that"),
        ("--asynchronous --shard-update", "--asynchronous and --shard-update exclude each other: "),
        (
            "--shard-params --towers 2",
            "--shard-params and --towers 2 exclude each other: the order of sums over parts "
            "depends on the number of devices, and with --towers the bits must not. Leave --towers "
            "out; or keep it, leave --shard-params out, and",
        ),
        (
            "--sync-every 2 --compute-dtype float16",
            "--compute-dtype float16 and --sync-every exclude each other: float16 needs a loss",
        ),
        (
            "--outer-lr 0.5",
            "--outer-lr 0.5 is for local updates: add --sync-every, or",
        ),
        ("--towers 2 --stages 2 --layout 1x4", "--layout 1x4 gives each replica 4 devices, and"),
        ("--extra-metrics lr", "--extra-metrics lr: give a list of names, "),
        (
            "--asynchronous --momentum-correction",
            "--momentum-correction, and the state of the optimizer does not hold its momentum",
        ),
    ],
)
def test_options_that_exclude_each_other_are_called_what_was_typed(
    flags, message, tmp_path, capsys
):
    words = ["train", CIRCLE, "--devices", "2", *flags.split(), "--run-dir", str(tmp_path)]
    assert main(words) == 2
    assert f"multitower: {message}" in capsys.readouterr().err


@pytest.mark.parametrize("flags", ["--stages 2", "--towers 2 --stages 40"])  # the last when traced
def test_a_run_that_was_refused_leaves_no_directory(flags, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", CIRCLE, "--devices", "2", *flags.split()]) == 2
    assert not list((tmp_path / "runs").iterdir())


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["doctor", "--simulte", "3"],
        ["train", "digits", "--steps", "many"],
        ["train", "digits", "--devices", "1", "--simulate", "2"],
    ],
)
def test_words_that_are_no_command_are_code_2(words, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    assert capsys.readouterr().err


def test_without_the_extra_it_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "tyro", None)
    assert main(["train", "digits"]) == 2
    assert "needs tyro, which is not installed. Run: pip install" in capsys.readouterr().err


def test_ctrl_c_is_no_traceback(monkeypatch, capsys, tmp_path):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("multitower.cli.finish.run", stopped)
    assert main(["train", "digits", "--devices", "1", "--run-dir", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "multitower: stopped\n"


def test_errors_are_not_wrapped_and_not_marked_up(monkeypatch, capsys):
    def refuse(*_):
        raise mt.RunError("[bold]batch['x'][/bold] " + "long " * 60)

    monkeypatch.setattr("multitower.cli.train.find_recipe", refuse)
    assert main(["train", "digits"]) == 2
    error = capsys.readouterr().err
    assert "[bold]batch['x'][/bold]" in error
    assert error.count("\n") == 1


def test_a_file_that_may_not_be_read_is_one_line(monkeypatch, capsys):
    # Up to Python 3.13, pathlib.Path.exists raises this in a folder without permission.
    def refuse(*_):
        raise PermissionError(13, "Permission denied", "/private/recipe.py")

    monkeypatch.setattr("multitower.cli.train.find_recipe", refuse)
    assert main(["train", "digits"]) == 2
    said = "multitower: [Errno 13] Permission denied: '/private/recipe.py'\n"
    assert capsys.readouterr().err == said


@pytest.mark.slow
def test_with_only_a_cpu_it_simulates_two_devices_and_says_so(tmp_path):
    done = in_new_process("train", CIRCLE, *QUICK, "--run-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "2 simulated CPU devices, as there is no accelerator" in done.stdout
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["devices"], result["host"]["NPROC"]) == (2, "32")


@pytest.mark.slow
def test_devices_counts_what_there_is():
    words = ("-m", "multitower", "train", "digits", "--devices", "2")
    done = ended(Fork(*words, env=clean_environment()))
    assert done.returncode == 2
    assert "--devices 2: this machine has cpu:0. Use --devices 1, or simulate" in done.stderr


@pytest.mark.slow
def test_devices_that_cannot_start_are_no_traceback():
    done = in_new_process("train", "digits", JAX_PLATFORMS="nonsense")
    assert done.returncode == 2
    assert "multitower: JAX cannot start its devices: " in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_number_of_cpu_devices_that_the_user_has_set_counts(tmp_path):
    words = ["train", CIRCLE, *QUICK, "--run-dir", str(tmp_path)]
    done = in_new_process(*words, JAX_NUM_CPU_DEVICES="3")
    assert done.returncode == 0, done.stderr
    assert "training circle on 3 CPU devices\n" in done.stdout


@pytest.mark.slow
def test_the_same_bits_on_any_number_of_devices(tmp_path):
    fingerprints = set()
    for flags in (["--devices", "1"], ["--simulate", "2"]):  # of which one has two towers
        where = tmp_path / "-".join(["run", *flags])
        words = ["--towers", "3", "--steps", "4", "--run-dir", str(where)]
        run_fork("-m", "multitower", "train", "digits", *words, *flags)
        fingerprints.add(json.loads((where / "result.json").read_text())["fingerprint"])
    assert len(fingerprints) == 1


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1])
def test_the_main_job_reaches_its_accuracy(tmp_path, seed):
    where = ["--seed", str(seed), "--run-dir", str(tmp_path)]
    done = in_new_process("train", "digits", *where)
    assert done.returncode == 0, done.stderr
    assert json.loads((tmp_path / "result.json").read_text())["test_accuracy"] >= 0.98


def test_a_path_in_an_error_stays_as_it_is():
    # The lie: a command to copy that names no directory.
    said = "runs/seed=3 holds a run with seed 0: multitower resume runs/seed=3 continues it."
    assert in_flags(said) == said
    assert in_flags("seed=3/best=max is not there; leave steps=4 out") == (
        "seed=3/best=max is not there; leave --steps 4 out"
    )


def test_a_warning_names_flags(capsys):
    """Lie: arguments of Python, where there are only flags; and two names for one thing."""
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = make_show_warning()
        place(None, 2)
        warn_of_worst("keep_best", "loss", "max")
    busy, direction = capsys.readouterr().err.splitlines()
    assert "--towers 2 keep 2 of 8 devices busy and leave 6 idle. Use --towers 8 or" in busy
    assert "or --simulate 2." in busy  # --devices and --simulate exclude each other
    assert direction == (
        "multitower: --keep-best loss and --best max: the state with the highest loss counts as "
        "the best. Pass --best min for the lowest."
    )
    assert in_flags("keep_best='val loss'") == "--keep-best 'val loss'"
    assert in_flags("write train_step(clip_norm=...), or mt.configure(simulated_devices=4)") == (
        "write --clip-norm, or --simulate 4"
    )
    now = {"onednn": True, "versions": {}, **describe_arrays(())}
    with pytest.raises(mt.RunError) as refused:
        check_same_run({"onednn": False}, now, "runs/1")
    assert in_flags(str(refused.value)).endswith("begin another run in another --run-dir.")


@pytest.mark.parametrize(("columns", "ends"), [("80", []), ("20", ["42.0 s"])])
def test_a_narrow_terminal_cuts_no_number_in_two(columns, ends, monkeypatch, capsys):
    """Lie: a score whose digits are on two lines."""
    parts = ["accuracy 0.9972", "42.0 s", "fingerprint 4efc"]
    say_parts(parts)
    assert capsys.readouterr().out == "accuracy 0.9972  42.0 s  fingerprint 4efc\n"  # no terminal
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")  # rich takes a dumb one for 80 columns wide
    monkeypatch.setenv("COLUMNS", columns)
    say_parts(parts)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ([parts[0], *ends, parts[2]] if ends else ["  ".join(parts)])


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"multitower {importlib.metadata.version('multitower')}\n"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["train", "digits", "--steps", "ten"], "'ten' is not a whole number, such as 8."),
        (["train", "digits", "--clip-norm", "one"], "'one' is not a number, such as 0.5."),
        (["scale", "digits", "--rounds", "1.5"], "'1.5' is not a whole number, such as 8."),
        (["train", "digits", "--best", "None"], "'None' is not one of max, min."),
        # Else the working directory, whose checkpoints/ --force would delete.
        (["train", "digits", "--run-dir", "", "--force"], "'' is no path, such as runs/1."),
        (["train", "digits", "--run-dir", "~nobody-here/1"], "'~nobody-here/1' is no path"),
    ],
)
def test_a_word_in_the_place_of_a_number_or_a_path(words, said, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(words)
    shown = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert words[2] in shown
    assert said in shown
    assert f"multitower {words[0]} --help" in shown


def test_the_home_directory_in_a_flag(tmp_path, monkeypatch, capsys):
    """Lie: a directory that is called ~, since shells leave that of --data=~/images as it is."""
    monkeypatch.setenv("HOME", str(tmp_path))
    run_dir = str(tmp_path / "run")
    assert main(["train", "mnist", "--devices", "1", "--data=~/images", "--run-dir", run_dir]) == 2
    assert f"{tmp_path}/images/train-images" in capsys.readouterr().err


def test_a_mistyped_file_name(tmp_path, capsys):
    (tmp_path / "circle.py").touch()
    assert main(["train", str(tmp_path / "circl.py")]) == 2
    assert "Did you mean 'circle.py'?" in capsys.readouterr().err

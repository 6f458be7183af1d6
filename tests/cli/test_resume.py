"""multitower resume: a stopped run goes on, elsewhere, as if it had not stopped."""

import importlib
import json
import shutil
import signal
import time

import pytest

import multitower as mt
import places
from forks import Fork
from multitower.cli.finish import told_how_to_resume
from multitower.cli.main import main
from processes import clean_environment, run_fork

# Compiled in a moment.
CIRCLE = str(places.CIRCLE)
FLAGS = ["train", CIRCLE, "--towers", "3", "--steps", "1000", "--batch-size", "12"]


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


def lines_of(directory):
    """What each step gave, and how fast it was: a step that is made again has another line.

    A run that begins anew comes to the same bits, so these show whether it went on.
    """
    return (directory / "metrics.jsonl").read_text().splitlines()


@pytest.mark.slow
def test_stopped_on_two_devices_resumed_on_three_and_scored(tmp_path):
    # The lie (law L4), as a user would see it: another fingerprint, another accuracy.
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    run_fork("-m", "multitower", *FLAGS, "--simulate", "1", "--run-dir", str(whole))
    words = [*FLAGS, "--simulate", "2", "--run-dir", str(stopped), "--checkpoint-every", "50"]
    process = Fork("-m", "multitower", *words, env=clean_environment())
    while not list(stopped.glob("checkpoints/*/about")):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "To continue: multitower resume" in told
    assert not (stopped / "result.json").exists()
    before = lines_of(stopped)
    assert len(before) >= 50
    run_fork("-m", "multitower", "resume", str(stopped), "--simulate", "3")
    assert lines_of(stopped)[: len(before)] == before, "it began anew"
    same = ("fingerprint", "test_accuracy", "test_loss", "steps", "towers")
    assert [result_of(stopped)[k] for k in same] == [result_of(whole)[k] for k in same]
    scored = json.loads(run_fork("-m", "multitower", "eval", str(stopped), "--simulate", "2"))
    assert (scored["step"], scored["examples"]) == (1000, 400)
    assert [scored[k] for k in same[:3]] == [result_of(whole)[k] for k in same[:3]]


def test_what_cannot_be_resumed_is_said(tmp_path, capsys):
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["resume", str(tmp_path / "config.json")]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    assert main(["resume", str(tmp_path)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"recipe": "digits", "options": {}}')
    (tmp_path / "result.json").write_text("{")
    assert main(["resume", str(tmp_path)]) == 2
    assert "result.json cannot be read" in capsys.readouterr().err
    (tmp_path / "result.json").write_text('{"steps": 3}')
    assert main(["resume", str(tmp_path)]) == 2
    assert "It was ended before report.html: to have" in capsys.readouterr().err
    (tmp_path / "report.html").write_text("")
    assert main(["resume", str(tmp_path)]) == 2
    assert capsys.readouterr().err.endswith("more than its 3 steps.\n")
    # The lie: an extension that deletes the result, and stops where it was.
    (tmp_path / "result.json").write_text('{"steps": 3, "stopped": "early stopping after step 3"}')
    assert main(["resume", str(tmp_path), "--steps", "9"]) == 2
    assert "is finished, by early stopping after step 3. More" in capsys.readouterr().err
    assert (tmp_path / "result.json").exists()
    (tmp_path / "result.json").unlink()
    assert main(["eval", str(tmp_path)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert main(["train", "digits", "--run-dir", str(tmp_path)]) == 2
    assert "multitower resume" in capsys.readouterr().err


CONFIGS = [
    ("[]", "is not the configuration of a run"),
    ('{"recipe": 3, "options": {}}', "is not the configuration of a run"),
    ('{"recipe": "digits"}', "is not the configuration of a run"),
    ('{"recipe": "digits", "options": []}', "is not the configuration of a run"),
    ('{"recipe": "digits", "options": {}, "settings": 3}', "is not the configuration of a run"),
    ('{"recipe": "digits", "options": {"stepz": 3}}', "config.json: a run has no option 'stepz'"),
    ('{"recipe": "digits", "options": {"steps": "x"}}', "config.json: a run is a whole number"),
]


@pytest.mark.parametrize(("config", "said"), CONFIGS)
def test_a_configuration_that_was_changed_by_hand_is_named(config, said, tmp_path, capsys):
    (tmp_path / "config.json").write_text(config)
    for command in ("resume", "eval"):
        assert main([command, str(tmp_path)]) == 2
        assert said in capsys.readouterr().err
    auto = ["train", CIRCLE, "--run-dir", str(tmp_path), "--resume", "auto"]
    if "configuration" in said:
        assert main(auto) == 2
        assert said in capsys.readouterr().err


@pytest.mark.parametrize("result", ["[]", "3", "{}"])
def test_a_damaged_result_is_named(result, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"recipe": "digits", "options": {}}')
    (tmp_path / "result.json").write_text(result)
    for more in ([], ["--steps", "9"]):
        assert main(["resume", str(tmp_path), *more]) == 2
        assert "result.json cannot be read" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_auto_starts_goes_on_and_lets_be(tmp_path, capsys):
    """What a cluster does: the same command again. Lies: a fresh start, a finished run redone."""
    run_dir = tmp_path / "run"
    command = ["train", CIRCLE, "--steps", "6", "--batch-size", "12", "--towers", "2"]
    command += ["--checkpoint-every", "2", "--run-dir", str(run_dir), "--resume", "auto"]
    assert main([*command, "--devices", "1"]) == 0
    assert "training circle" in capsys.readouterr().out
    whole, lines = result_of(run_dir)["fingerprint"], lines_of(run_dir)

    assert main(command) == 0
    assert "is finished" in capsys.readouterr().out

    (run_dir / "result.json").unlink()  # as if killed after step 4
    shutil.rmtree(run_dir / "checkpoints" / "6")
    assert main([*command, "--devices", "2"]) == 0
    assert "resuming circle" in capsys.readouterr().out
    assert result_of(run_dir)["fingerprint"] == whole
    assert lines_of(run_dir)[:4] == lines[:4], "it began anew"
    assert [json.loads(line)["step"] for line in lines_of(run_dir)] == [1, 2, 3, 4, 5, 6, 6]

    (run_dir / "result.json").unlink()  # killed before the first checkpoint
    shutil.rmtree(run_dir / "checkpoints")
    assert main([*command, "--devices", "1"]) == 0
    assert result_of(run_dir)["fingerprint"] == whole


@pytest.mark.slow
def test_a_run_that_was_refused_stands_in_nobodys_way(tmp_path, capsys):
    """Lie: a typing error that is told after the training, and then at every resume."""
    command = ["train", CIRCLE, "--devices", "1", "--steps", "2", "--run-dir", str(tmp_path)]
    for flags in (["--keep-best", "f1"], ["--keep-best", "f1", "--resume", "auto"]):
        assert main([*command, *flags]) == 2
        said = capsys.readouterr().err
        assert "--keep-best f1: the test phase has no such score. It has: " in said
        assert not (tmp_path / "checkpoints").exists()
    assert main([*command, "--keep-best", "loss", "--best", "min", "--resume", "auto"]) == 0
    assert main([*command, "--keep-best", "accuracy", "--resume", "auto"]) == 2
    assert "holds a run with" in capsys.readouterr().err


@pytest.mark.slow
def test_resume_auto_refuses_another_run(tmp_path, capsys):
    """Lie: a changed learning rate or batch that is silently the old one."""
    command = ["train", CIRCLE, "--steps", "1", "--batch-size", "2", "--devices", "1"]
    here = ["--run-dir", str(tmp_path), "--resume", "auto"]
    assert main([*command, *here]) == 0
    capsys.readouterr()
    assert main([*command, *here, "--seed", "1"]) == 2
    assert "holds a run with seed 0, and this command has seed 1" in capsys.readouterr().err
    # Nor is a run of an earlier version another one, which did not know all options.
    config = json.loads((tmp_path / "config.json").read_text())
    del config["options"]["keep_last"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert main([*command, *here]) == 0
    capsys.readouterr()
    assert main([*command, *here, "--force"]) == 2
    assert "leave --force out" in capsys.readouterr().err
    assert main([*command, "--resume", "auto"]) == 2
    assert "must be named" in capsys.readouterr().err


@pytest.mark.slow
def test_clip_norm_is_kept_by_a_resume(tmp_path):
    """Lie: a flag that is dropped, at the start or when the run goes on."""
    command = ["train", CIRCLE, "--steps", "4", "--batch-size", "12", "--towers", "2"]
    command += ["--checkpoint-every", "2", "--devices", "1"]
    plain, clipped = tmp_path / "plain", tmp_path / "clipped"
    assert main([*command, "--run-dir", str(plain)]) == 0
    assert main([*command, "--run-dir", str(clipped), "--clip-norm", "0.001"]) == 0
    assert json.loads((clipped / "config.json").read_text())["options"]["clip_norm"] == 0.001
    whole, lines = result_of(clipped)["fingerprint"], lines_of(clipped)
    assert whole != result_of(plain)["fingerprint"]

    (clipped / "result.json").unlink()  # as if killed after step 2
    shutil.rmtree(clipped / "checkpoints" / "4")
    assert main(["resume", str(clipped), "--devices", "2"]) == 0
    assert result_of(clipped)["fingerprint"] == whole
    assert lines_of(clipped)[:2] == lines[:2], "it began anew"
    assert main(["train", CIRCLE, "--clip-norm", "0"]) == 2


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (
            mt.Interrupted("SIGINT: saved. To continue, call fit(x).", 2),
            130,
            "saved. To continue: {resume}",
        ),
        (mt.RunError("no batch. To continue, call fit(x)."), 2, "no batch. To continue: {resume}"),
        (
            mt.NonFiniteError("step 9 of 9: the loss is nan."),
            2,
            "last one again: {resume}. To train anew without such steps: multitower train --config "
            "'{run_dir}/config.json' --on-nonfinite skip",
        ),
    ],
)
def test_a_run_that_stops_says_how_to_resume_it(error, code, said, monkeypatch, tmp_path, capsys):
    run_dir = tmp_path / "a run"
    (run_dir / "checkpoints" / "8").mkdir(parents=True)

    def stop(*_, **__):
        raise error

    monkeypatch.setattr(importlib.import_module("multitower.cli.finish"), "run", stop)
    (run_dir / "config.json").write_text('{"recipe": "digits", "options": {}}')
    assert main(["resume", str(run_dir), "--devices", "1"]) == code
    said = said.format(resume=f"multitower resume '{run_dir}'", run_dir=run_dir)
    assert capsys.readouterr().err.endswith(f"{said}\n")


def test_a_note_of_an_error_says_how_to_resume_it(tmp_path):
    # The lie: on the command line, too, a call of `fit` goes on.
    error = KeyError("a loader's own")
    error.add_note("The state after step 4 is saved. To continue, call fit(..., resume=True).")
    with pytest.raises(KeyError) as told, told_how_to_resume(tmp_path):
        raise error
    note = f"The state after step 4 is saved. To continue: multitower resume {tmp_path}"
    assert told.value.__notes__ == [note]


def test_the_fingerprint_is_shown_where_it_can_be_compared(monkeypatch, tmp_path, capsys):
    """Lie: a promise of the same bits without towers."""
    result = {"test_loss": 0.5, "seconds": 1.0, "fingerprint": "f" * 64}
    finish = importlib.import_module("multitower.cli.finish")
    monkeypatch.setattr(finish, "run", lambda *_, **__: result)
    for number, flags in enumerate((["--towers", "2"], [])):
        words = ["train", CIRCLE, "--devices", "1", "--run-dir", str(tmp_path / str(number))]
        assert main([*words, *flags]) == 0
        assert ("fingerprint ffffffffffff" in capsys.readouterr().out) == bool(flags)

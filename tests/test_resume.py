"""multitower resume: a stopped run goes on, elsewhere, as if it had not stopped."""

import json
import signal
import subprocess
import sys
import time

import pytest

from multitower.cli import main
from processes import clean_environment

FLAGS = ["train", "digits", "--towers", "3", "--steps", "40", "--batch-size", "12"]


def result_of(directory):
    return json.loads((directory / "result.json").read_text())


@pytest.mark.slow
def test_stopped_on_two_devices_resumed_on_three_and_scored(tmp_path, capsys):
    # The lie (law L4), as a user would see it: another fingerprint, another accuracy.
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main([*FLAGS, "--devices", "1", "--run-dir", str(whole)]) == 0
    words = [*FLAGS, "--simulate", "2", "--run-dir", str(stopped), "--checkpoint-every", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "multitower", *words],
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
    )
    while not list(stopped.glob("checkpoints/*/about")):
        time.sleep(0.05)
        assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "Resume to go on from there" in told
    assert not (stopped / "result.json").exists()
    assert main(["resume", str(stopped), "--devices", "3"]) == 0
    same = ("fingerprint", "test_accuracy", "test_loss", "steps", "towers")
    assert [result_of(stopped)[k] for k in same] == [result_of(whole)[k] for k in same]
    capsys.readouterr()
    assert main(["eval", str(stopped), "--devices", "2"]) == 0
    scored = json.loads(capsys.readouterr().out)
    assert (scored["step"], scored["examples"]) == (40, 359)
    assert [scored[k] for k in same[:3]] == [result_of(whole)[k] for k in same[:3]]


def test_what_cannot_be_resumed_is_said(tmp_path, capsys):
    assert main(["resume", str(tmp_path)]) == 2
    assert "is not the directory of a run" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{")
    assert main(["resume", str(tmp_path)]) == 2
    assert "config.json cannot be read" in capsys.readouterr().err
    (tmp_path / "config.json").write_text('{"recipe": "digits", "options": {}}')
    (tmp_path / "result.json").write_text("{}")
    assert main(["resume", str(tmp_path)]) == 2
    assert "is finished" in capsys.readouterr().err
    (tmp_path / "result.json").unlink()
    assert main(["eval", str(tmp_path)]) == 2
    assert "no complete checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoints").mkdir()
    assert main(["train", "digits", "--run-dir", str(tmp_path)]) == 2
    assert "multitower resume" in capsys.readouterr().err

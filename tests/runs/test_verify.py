"""multitower verify: a table for equal runs; a code and a line for those that are not."""

import json

import pytest

import places
from faults import change_results, divide_parameters
from multitower.cli.main import main

RECIPE = str(places.CIRCLE)
FLAGS = ["--towers", "2", "--steps", "2", "--batch-size", "14", "--devices", "1,2"]


@pytest.mark.slow
def test_it_checks_what_train_does(tmp_path, capsys):
    # The lie: a check of some other program.
    assert main(["verify", RECIPE, *FLAGS]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert shown[1].split() == ["step", "1", "device", "2", "devices"]
    for number, line in enumerate(shown[2:4], start=1):
        step, one, two = line.split()
        assert (int(step), one) == (number, two)
    assert shown[2] != shown[3]
    assert "params       same bits" in shown
    where = ["--devices", "2", "--run-dir", str(tmp_path)]
    assert main(["train", RECIPE, *FLAGS[:-2], *where]) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["fingerprint"].startswith(shown[3].split()[1])


@pytest.mark.slow
def test_a_difference_is_code_1_and_one_line(monkeypatch, capsys):
    change_results(monkeypatch, divide_parameters)
    assert main(["verify", RECIPE, *FLAGS, "--json", "--steps", "1"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["same_bits"] is False
    assert found["parts"][0][0]["step"] == found["parts"][1][0]["step"]
    assert found["parts"][0][0]["params"] != found["parts"][1][0]["params"]
    assert captured.err.startswith("multitower: step 1: 1 device and 2 devices part in the update")


@pytest.mark.slow
def test_a_model_in_stages_has_the_same_bits(capsys):
    assert main(["verify", RECIPE, *FLAGS, "--stages", "2"]) == 0
    assert "params       same bits" in capsys.readouterr().out.splitlines()


def test_mistakes_are_named(capsys):
    assert main(["verify", RECIPE, "--devices", "1,x"]) == 2
    assert "--devices 1,x: give numbers of devices, such as --devices 1,2,4" in (
        capsys.readouterr().err
    )
    assert main(["verify", RECIPE, "--devices", "1,4", "--towers", "2"]) == 2
    assert "2 towers cannot fill 4 devices" in capsys.readouterr().err
    assert main(["verify", RECIPE, "--devices", "1,99"]) == 2
    assert "--devices 99" in capsys.readouterr().err

"""multitower doctor: what it finds, and that it can find a fault."""

import json

import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.runs import doctor
from multitower.towers.placement import contiguous
from processes import run_python


@pytest.mark.slow
def test_it_names_devices_settings_and_versions():
    # In a process with two devices: with the eight of this one it compiles for half a minute.
    report = run_python("-m", "multitower", "doctor", "--simulate", "2", "--json")
    findings = json.loads(report)
    assert findings["same_bits"] is findings["same_bits_in_stages"] is True
    assert [one["name"] for one in findings["devices"]] == ["cpu:0", "cpu:1"]
    assert findings["environment"]["NPROC"] == "32"
    assert set(findings["versions"]) >= {"python", "jax", "jaxlib", "numpy", "optax"}


def test_it_can_be_read(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_trained_on", lambda *_, **__: "the same")
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.count("one device and all of them agree") == 2


def test_what_disagrees_is_told(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_trained_on", lambda found, _, **how: f"{found} {bool(how)}")
    assert main(["doctor"]) == 2
    found = capsys.readouterr()
    assert "give different bits" in found.err
    assert found.out.count("DISAGREE") == 2


@pytest.mark.slow
@pytest.mark.parametrize("in_stages", [False, True])
def test_devices_that_disagree_are_found(in_stages, monkeypatch, capsys):
    # The lie: a self-test that cannot fail.
    real, layouts = doctor.train_step, []

    def other(loss, optimizer, *, devices, towers, stages=None, layout=None):
        layouts.append(layout)
        if bool(stages) != in_stages:
            return real(loss, optimizer, devices=mt.devices(1), towers=1)
        return real(loss, optimizer, devices=devices)  # towers follow the devices

    monkeypatch.setattr(doctor, "train_step", other)
    monkeypatch.setattr(doctor, "find_devices", lambda: mt.devices(2))
    monkeypatch.setattr(doctor, "place", lambda *_: contiguous(mt.devices(2), 2))
    assert main(["doctor"]) == 2
    assert layouts == [None, None, None, (1, 2)]
    found = capsys.readouterr()
    assert "give different bits" in found.err
    assert found.out.count("DISAGREE") == 1


@pytest.mark.parametrize("simulate", ["0", "-1"])
def test_a_wrong_number_is_one_line(simulate, capsys):
    assert main(["doctor", "--simulate", simulate]) == 2
    assert "must be a whole number" in capsys.readouterr().err

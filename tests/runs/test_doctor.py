"""multitower doctor: what it finds, and that it can find a fault."""

import json

import pytest

import multitower as mt
from multitower.cli.main import main
from multitower.runs import doctor
from processes import run_python


def test_it_names_devices_settings_and_versions():
    # In a process with two devices: with the eight of this one it compiles for half a minute.
    report = run_python("-m", "multitower", "doctor", "--simulate", "2", "--json")
    findings = json.loads(report)
    assert findings["same_bits"] is True
    assert [one["name"] for one in findings["devices"]] == ["cpu:0", "cpu:1"]
    assert findings["environment"]["NPROC"] == "32"
    assert set(findings["versions"]) >= {"python", "jax", "jaxlib", "numpy", "optax"}


def test_it_can_be_read(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "_trained_on", lambda found, towers: "the same")
    assert main(["doctor"]) == 0
    assert "one device and all of them agree" in capsys.readouterr().out


def test_devices_that_disagree_are_found(monkeypatch, capsys):
    # The lie: a self-test that cannot fail.
    real = doctor.train_step

    def one_program(loss, optimizer, *, devices, towers):
        return real(loss, optimizer, devices=devices)  # towers follow the devices

    monkeypatch.setattr(doctor, "train_step", one_program)
    monkeypatch.setattr(doctor, "find_devices", lambda: mt.devices(2))
    assert main(["doctor"]) == 2
    assert "give different bits" in capsys.readouterr().err


@pytest.mark.parametrize("simulate", ["0", "-1"])
def test_a_wrong_number_is_one_line(simulate, capsys):
    assert main(["doctor", "--simulate", simulate]) == 2
    assert "must be a whole number" in capsys.readouterr().err
